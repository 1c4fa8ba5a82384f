/* What the faces of wf-init share: the configuration that launch hands to
 * init, and the few calls that more than one face needs. */
#ifndef WF_H
#define WF_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* What PID 1, or keep, exits with once it serves; lineage/deaths.py has the
 * same. */
enum wf_end {
	WF_END_ASKED = 0, /* by a client, or because the owner ended */
	WF_END_BROKEN = 1,
	WF_END_TIME = 2,  /* its lifetime is over */
	/* Of keep alone: */
	WF_END_MACHINE = 3, /* the machine's process ended */
	WF_END_GUEST = 4,   /* the guest broke the rules of the wire */
	WF_END_INIT = 5,    /* a signal ended PID 1 of the sandbox in the guest */
};

struct wf_init_config {
	const char *sandbox_id;
	int owner_fd;	 /* connection 0, the owner's leash; -1 none */
	int owner_pidfd; /* readable when the owner process ended; -1 none */
	int listen_fd;	 /* listening unix socket; -1 none */
	uid_t peer_uid;	 /* who may connect, besides uid 0 */
	int lock_fd;	 /* PID 1 takes a POSIX write lock on it; -1 none */
	int proc_fd;	 /* directory of the sandbox's own /proc */
	int join_fds[8]; /* a command writes "0" to each before exec */
	int n_join;
	int freeze_fd, freeze_state_fd;
	int freeze_kind; /* 0 none, 1 v1 freezer.state, 2 v2 cgroup.freeze */
	int oom_fd;	 /* has a line "oom_kill N"; -1 none */
	int detached;
	uint64_t lifetime_ms; /* 0 none */
	uid_t default_uid;
	gid_t default_gid;
};

/* Runs as PID 1 and never returns except with the exit code. Capabilities are
 * dropped, no_new_privs and the system call filter are on, cwd is /. */
int wf_init_main(const struct wf_init_config *config);

#endif
