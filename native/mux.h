/* What a host and the guest of a virtual machine say to each other over one
 * virtio-serial port, and what `keep` takes on its socket `control`.
 *
 * All numbers are little-endian. The byte stream carries frames
 *     u32 length of the payload | u16 kind | u16 stream
 * A frame that breaks a rule below ends the machine.
 *
 *  OPEN    host to guest: u16 target (enum mux_target) and its argument, at
 *          most MUX_ARGUMENT bytes. The host picks the stream, not 0 and not
 *          in use. A target that cannot be had is answered by CLOSE gone.
 *  DATA    1 to MUX_DATA bytes, at most what the other side has room for:
 *          MUX_WINDOW at first, and what CREDIT added.
 *  CREDIT  u32 bytes that went on. Of a stream that has ended: ignored, it
 *          may have crossed with the end.
 *  CLOSE   u8: 0 this direction has ended; 1 gone: and nothing is taken from
 *          the other any more. Each side sends exactly one for a stream, the
 *          answer to gone is gone.
 *  CONTROL stream 0: u16 op (enum mux_op) | u16 0 | u32 tag | i32 errno and a
 *          body. A request has errno 0; its answer has its op and tag.
 *  QUIESCE host to guest, empty, stream 0: the last frame of the host until
 *          GO or RESET. The guest answers QUIET, its own last one: both
 *          directions rest at the end of a frame, and nothing is under way.
 *  GO      host to guest, empty, stream 0: both go on where they rested.
 *  RESET   stream 0, u32 generation: the host's first frame to a machine that
 *          has booted or was restored. All streams are void without a CLOSE;
 *          the guest answers the same frame. The host ignores what comes
 *          before that answer.
 *
 * A stream to `launch` or `reroot` is the socket that this face has as
 * descriptor 3: the plan goes in, frames as in proto.h come out. The guest
 * holds its end of the launched sandbox's socket open after the stream: only
 * the end of the host's direction (CLOSE 0) ends a launch, or the sandbox as
 * the end of its owner would; a stream that is gone or void does not.
 *
 * Bodies of CONTROL (items: "key=value", each with a NUL behind):
 *  PREPARE    items, done in order: mkdir=PATH; mount=SOURCE\tTARGET\tTYPE\t
 *             WORDS\tDATA, WORDS of ro,nosuid,nodev,noexec,noatime, a SOURCE in
 *             /dev is waited for; umount=PATH; write=PATH\tTEXT; drop=1 drops
 *             what the guest has cached; address=INTERFACE\tADDRESS/PREFIX\t
 *             GATEWAY, with the loopback beside it; like=SOURCE\tTARGET: the
 *             directory TARGET gets owner, mode, mtime and attributes of SOURCE,
 *             without overlayfs's and the kernel's own. An error's body names
 *             the item.
 *  RESUME     u32 generation, that of the last RESET, else ESTALE | u64 wall
 *             clock, nanoseconds | u32 size of the entropy, at most
 *             MUX_ENTROPY | entropy | items: hostname=NAME for the sandbox;
 *             idfile=PATH\tTEXT: the new text of a file that launch has put
 *             over PATH by an item of the same form, written in place, through
 *             no link; program=PATH asks for an executable file. The answer's
 *             body are the PATHs, each with a NUL behind, where there is none.
 *             An error's body names the item.
 *  LOOK       items for the RESUME of a machine that goes on from a memory that
 *             is saved after this: idfile=PATH is opened and kept open;
 *             program=PATH is remembered where there is none. Replaces what was
 *             asked before. An error's body names the item.
 *  SYNC       a path: its file system is written out.
 *  STATS      none; the answer is the guest's meminfo.
 *  NETWORK    none; the answer is the sandbox's tcp, tcp6, udp and udp6 as
 *             /proc/net tells them, one after the other.
 *  CLOSE_OUTSIDE  none; ends the sandbox's TCP and UDP sockets that have a peer,
 *             but for peers on the loopback or at the socket's own address. The
 *             answer is u32, how many. What runs may connect anew meanwhile.
 *  SHUTDOWN   none; file systems are written out, then ENDED 0 comes. No answer.
 *  ENDED      from the guest, tag 0: the sandbox's PID 1 has ended; the body
 *             is i32, its exit code, or 256 + the signal that ended it.
 *
 * A stream to `export` (argument: a directory) carries a record for the
 * directory itself, named "", and for each thing below it: a directory before
 * what it holds, names in the order of their bytes. A record is
 *     struct export_head | name | xattrs | target | content
 * name: relative; xattrs, in the order of names: u16, u32 and that many bytes
 * of name and value each; target of a link; content of a file: for each
 * stretch of data u64 offset | u64 length | bytes, then u64 size | u64 0.
 * The last record has kind 'e', and in `size` 0 or the errno of what failed;
 * its name says where. A stream that ends without it is broken.
 *
 * keep's `control` takes connections of the same uids as `sock`. A client
 * sends one frame at a time and reads its answer:
 *  CONTROL  passed on; answered by CONTROL with the client's tag.
 *  OPEN     the connection is that stream from then on.
 *  QUIESCE  answered by QUIET, GO by GO. Until GO others are not heard, they
 *           wait. Who asks may then stop the machine through `qmp`, and lets it
 *           run again before GO. The end of its connection without a GO is one,
 *           and keep itself lets the machine run then, by `cont` through `qmp`,
 *           as soon as that is free; nobody is heard before. */
#ifndef WF_MUX_H
#define WF_MUX_H

#include <poll.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	MUX_HEADER = 8,
	MUX_PAYLOAD = 64 * 1024,
	MUX_DATA = 32 * 1024,
	MUX_WINDOW = 256 * 1024,
	MUX_STREAMS = 128,
	MUX_ARGUMENT = 4096,
	MUX_ENTROPY = 512,
	MUX_CONTROL_HEAD = 12,
};

enum mux_kind {
	MUX_OPEN = 1,
	MUX_DATA_FRAME = 2,
	MUX_CREDIT = 3,
	MUX_CLOSE = 4,
	MUX_CONTROL = 5,
	MUX_QUIESCE = 6,
	MUX_QUIET = 7,
	MUX_GO = 8,
	MUX_RESET = 9,
};

enum mux_target { TO_SANDBOX = 0, TO_LAUNCH = 1, TO_REROOT = 2, TO_EXPORT = 3 };

enum mux_op {
	OP_PREPARE = 1,
	OP_RESUME = 2,
	OP_SYNC = 3,
	OP_STATS = 4,
	OP_NETWORK = 5,
	OP_SHUTDOWN = 6,
	OP_ENDED = 7,
	OP_CLOSE_OUTSIDE = 8,
	OP_LOOK = 9,
	OP_REHEARSE = 10,
};

struct export_head {
	uint8_t kind; /* d f l p s c b, or e: the end */
	uint8_t again; /* 1: a file met before, see inode; it has no content */
	uint16_t mode; /* permission bits */
	uint32_t uid, gid;
	uint32_t name_len, xattrs_len, target_len;
	uint32_t major, minor; /* of a device */
	uint32_t links, mtime_ns;
	int64_t mtime_s;
	uint64_t size, inode;
};
_Static_assert(sizeof(struct export_head) == 64, "part of the wire format");

struct mux_buffer {
	uint8_t *data;
	size_t at, len, cap; /* what is in it: data + at, len bytes */
};

struct mux_stream {
	bool used;
	uint16_t id; /* 0: ended, only its last bytes are still to go */
	int fd;	     /* not blocking; -1 once it is of no use */
	bool sent_end, got_end, shut;
	uint32_t may_send, owed, room; /* owed: to be granted; room: left to the peer */
	struct mux_buffer in;	       /* for fd */
};

struct mux;

struct mux_calls {
	/* The guest's: a descriptor, not blocking, or -1. */
	int (*open)(struct mux *mux, uint16_t target, const char *argument);
	void (*control)(struct mux *mux, const uint8_t *payload, uint32_t size);
	/* QUIET or RESET at the host, RESET at the guest. */
	void (*event)(struct mux *mux, enum mux_kind kind);
};

struct mux {
	const struct mux_calls *calls;
	bool host, broken;
	bool held;	/* frames wait in `later` */
	bool resetting; /* the host's, until the answer */
	unsigned quiets; /* the host's: QUIESCE without its QUIET */
	uint32_t generation;
	uint16_t last_id;
	size_t turn; /* whose data comes first */
	struct mux_buffer in, out, later;
	struct mux_stream streams[MUX_STREAMS];
};

void mux_init(struct mux *mux, const struct mux_calls *calls, bool host);
void mux_free(struct mux *mux);
/* Takes what came; false once the connection is broken. */
bool mux_feed(struct mux *mux, const void *data, size_t size);
void mux_send(struct mux *mux, enum mux_kind kind, uint16_t stream,
	      const void *payload, size_t size);
/* The host's. The descriptor becomes the stream's; false: too many. */
bool mux_open(struct mux *mux, int fd, uint16_t target, const void *argument, size_t size);
void mux_reset(struct mux *mux, uint32_t generation);
void mux_quiesce(struct mux *mux);
void mux_go(struct mux *mux);

/* What the streams wait for, at most MUX_STREAMS; then what was found. */
size_t mux_watch(const struct mux *mux, struct pollfd *watched);
void mux_serve(struct mux *mux, const struct pollfd *watched, size_t n);
/* Between `out` and the transport. -1 with errno, EAGAIN included; 0: its end. */
int mux_read_from(struct mux *mux, int fd);
int mux_write_to(struct mux *mux, int fd);

/* Of mux.c, for mux_stream.c. */
bool mux_append(struct mux_buffer *buffer, const void *data, size_t size);
void mux_consume(struct mux_buffer *buffer, size_t size);
void mux_drop(struct mux_buffer *buffer);
/* Of mux_stream.c, for mux.c; false: malformed. */
bool stream_frame(struct mux *mux, uint16_t kind, uint16_t id, const uint8_t *payload, uint32_t size);
void streams_void(struct mux *mux);

#endif
