/* keep: the host's process of a virtual machine, between keep.c's files. */
#ifndef WF_KEEP_H
#define WF_KEEP_H

#include "mux.h"
#include "plan.h"

#include <sys/types.h>

enum {
	KEEP_CLIENTS = 16,
	FRAME_LAUNCHED = 110, /* u32 pid of the machine's process */
	FRAME_READY = 111,    /* u32 generation: the guest has answered RESET */
};

struct keep {
	struct mux mux;
	int agent_fd, sock_fd, control_fd;
	int owner_pidfd, machine_pidfd, stderr_fd;
	pid_t machine;
	uid_t peer_uid;
	bool ready, detached, leash;
	uint64_t ends_ms; /* 0 never */
	int end_code;	  /* once the sandbox has ended inside: -1 before */
	uint64_t last_ms; /* then: until when what it said is still passed on */
	char last_words[2048]; /* of the machine's stderr */
	size_t n_last_words;
};

extern struct keep keep;

/* Ends the machine, then this process. */
_Noreturn void keep_end(int code);
uint64_t keep_now_ms(void);
void keep_mux(void);
/* The loop; it never returns. */
_Noreturn void keep_serve(void);
/* Starts the machine; its pid, pidfd and stderr go into `keep`. */
void keep_start_machine(const struct plan *plan, const int *join_fds, int n_join, int qmp_fd);

/* Clients of `control`: at most KEEP_CLIENTS places to poll. */
size_t clients_watch(struct pollfd *watched);
void clients_serve(const struct pollfd *watched);
void clients_accept(void);
void clients_answer(const uint8_t *payload, uint32_t size);
void clients_quiet(void);
/* Of keep_monitor.c: lets the machine run again, and takes its time for it. */
void monitor_continue(void);
bool monitor_busy(void);
/* What it waits for, and until when; UINT64_MAX: no time. */
struct pollfd monitor_watch(void);
uint64_t monitor_due_ms(void);
void monitor_serve(const struct pollfd *watched);
/* A connection that may talk, or -1. */
int keep_accept(int listen_fd);

#endif
