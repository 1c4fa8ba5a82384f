/* The process between PID 1 and one command: a sub-reaper, so that whatever
 * the command leaves behind stays findable, and killable, as its tree. */
#ifndef WF_SUPERVISOR_H
#define WF_SUPERVISOR_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"
#include "users.h"

/* Descriptors with fixed numbers, in PID 1 and in supervisors alike. 0, 1 and
 * 2 are /dev/null in PID 1. */
enum { FD_NULL = 3, FD_CONTROL = 4, FD_PROC = 5, FD_JOIN = 6, MAX_JOIN = 8 };

struct kept {
	int n_join;
	uid_t uid; /* of a command that names no user */
	gid_t gid;
	uint64_t nofile_soft, nofile_hard;
};

struct usage {
	uint64_t user_us, sys_us, maxrss_kib, wall_us;
};

enum control_kind {
	/* to PID 1 */
	CONTROL_STARTED = 1, /* value: pid */
	CONTROL_FAILED,      /* value: errno, text: what could not be done; stage below */
	CONTROL_EXITED,      /* value: wait status */
	/* to the supervisor */
	CONTROL_SIGNAL, /* value: signal for the command's own process */
	CONTROL_SIGNAL_TREE,
	CONTROL_KILL, /* the tree, until nothing is left */
};

enum control_stage { STAGE_OTHER, STAGE_USER };

struct control_message {
	uint32_t kind;
	int32_t value;
	uint32_t stage;
	uint32_t unused;
	struct usage usage;
	char text[224];
};

struct supervisor_start {
	const struct exec_request *request;
	const struct kept *kept;
	int stdin_fd, stdout_fd, stderr_fd, control_fd;
};

/* Runs in the forked child of PID 1 and ends it. */
void supervisor_main(const struct supervisor_start *start) __attribute__((noreturn));

/* start.c: the rest of the way to a command, in its own process. Returns only
 * for a failure: an errno, with stage and text filled in. */
struct failure {
	int error;
	uint32_t stage;
	bool likely_victim; /* its oom_score_adj is set */
	char text[224];
};
bool raise_oom_score(const char *who); /* "self" or a pid */
void start_command(const struct supervisor_start *start, const struct user *user,
		   struct failure *failure);

#endif
