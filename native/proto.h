/* The protocol between a client and PID 1 of a sandbox, version 1.
 *
 * A unix stream socket carries frames: a 12-byte little-endian header
 *     u32 length of the payload | u16 type | u16 flags | u32 channel
 * and the payload. A payload is at most WF_MAX_PAYLOAD bytes, for EXEC
 * WF_MAX_EXEC. "str" is a u32 length and that many bytes. A malformed frame
 * closes its connection and nothing else.
 *
 * Rules that the table of types does not show:
 *  - PID 1 sends HELLO first. The client picks channel numbers: not 0 for EXEC
 *    and ATTACH, and unique among its live ones. Requests that are answered by
 *    REPLY take any number.
 *  - EXIT, ERROR and REPLY are the last frame of a channel. STDIN, CREDIT,
 *    SIGNAL, DETACH and RESIZE for a channel that has ended are ignored: they
 *    may have crossed with its EXIT.
 *  - A command that does not start is told in one line of STDERR (as far as
 *    credit reaches, unless DISCARD_ERR) and EXIT not_started with the errno. A
 *    user that cannot be resolved or taken is an ERROR.
 *  - A KEEP process never waits for a viewer for more than a second: one that
 *    lags is told by TRUNCATED how many bytes it lost, then goes on.
 *  - ATTACH: STARTED, TRUNCATED if the replay is not whole, output, EXIT.
 *    Without FOLLOW it ends with an empty REPLY once the replay is sent, if
 *    the process still runs.
 *  - EXIT may come without STARTED: the command never ran, or its supervisor
 *    died first. STARTED comes before everything else of its channel.
 *  - STDIN beyond the granted credit is malformed.
 *  - Answers fit one frame: LIST shortens argv and stops at 1500 rows; MAPPED
 *    is an ERROR (E2BIG) past 4095 files, or where a process may not be looked
 *    at (EACCES): its files are then unknown.
 *  - While held or frozen, EXEC waits; its time limit starts when it does.
 *    HOLD and FREEZE end with the connection that asked for them.
 */
#ifndef WF_PROTO_H
#define WF_PROTO_H

#define WF_PROTO_VERSION 1

enum {
	WF_HEADER = 12,
	WF_MAX_PAYLOAD = 64 * 1024,
	WF_MAX_EXEC = 8 * 1024 * 1024,
	WF_STDIN_CREDIT = 64 * 1024, /* granted by EXEC with STDIN and by ATTACH with CLAIM */
};

enum wf_type {
	WF_EXEC = 1,
	WF_STDIN = 2,
	WF_CREDIT = 3,
	WF_SIGNAL = 4,
	WF_DETACH = 5,
	WF_ATTACH = 6,
	WF_LIST = 7,
	WF_INFO = 8,
	WF_HOLD = 9,
	WF_RELEASE = 10,
	WF_FREEZE = 11,
	WF_THAW = 12,
	WF_NSFDS = 13,
	WF_SHUTDOWN = 14,
	WF_RESIZE = 15,
	WF_ACCOUNT = 16,
	WF_MAPPED = 17,
	WF_LAST_REQUEST = WF_MAPPED,

	WF_HELLO = 101,
	WF_STARTED = 102,
	WF_STDOUT = 103,
	WF_STDERR = 104,
	WF_EXIT = 105,
	WF_ERROR = 106,
	WF_REPLY = 107,
	WF_STDIN_MORE = 108,
	WF_TRUNCATED = 109,
};

/* Frame flags. */
enum { WF_STDIN_EOF = 1, WF_SIGNAL_TREE = 1 };

enum wf_exec_flag {
	WF_EXEC_STDIN = 1,
	WF_EXEC_MERGE = 2,
	WF_EXEC_PTY = 4,
	WF_EXEC_BUILTIN = 8,
	WF_EXEC_KEEP = 16,
	WF_EXEC_DISCARD_OUT = 32,
	WF_EXEC_DISCARD_ERR = 64,
	WF_EXEC_ALL = 127,
};

enum wf_attach_flag {
	WF_ATTACH_REPLAY = 1,
	WF_ATTACH_FOLLOW = 2,
	WF_ATTACH_QUIET = 4,
	WF_ATTACH_CLAIM = 8,
	WF_ATTACH_ALL = 15,
};

enum wf_reason {
	WF_REASON_EXITED = 0,
	WF_REASON_SIGNALED = 1,
	WF_REASON_OOM = 2,
	WF_REASON_TIMEOUT = 3,
	WF_REASON_CANCELLED = 4,
	WF_REASON_NOT_STARTED = 5,
};

/* HELLO features. */
enum { WF_FEATURE_FREEZER = 1, WF_FEATURE_OOM = 2, WF_FEATURE_CGROUPS = 4 };

#endif
