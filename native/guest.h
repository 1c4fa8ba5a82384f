/* PID 1 of a virtual machine, between guest.c's files. */
#ifndef WF_GUEST_H
#define WF_GUEST_H

#include "mux.h"

#include <sys/types.h>

enum { GUEST_WORKERS = 32, GUEST_PARKED = 64 };

enum { PLAN_AT = 3 /* the first descriptor of a face, and what guest_fork keeps */ };

struct worker {
	pid_t pid;    /* 0: a free place */
	uint16_t op;
	uint32_t tag; /* of the request that waits for it; 0 none */
};

struct guest {
	struct mux mux;
	int port_fd, signal_fd, proc_fd, program_fd, pid_fd, log_fd;
	int uts_fd, mount_fd, net_fd; /* PID 1's own namespaces */
	int leash_fd; /* the launched sandbox's connection 0; -1 none */
	int ahead_fd; /* connected to the sandbox's PID 1 for whoever comes next; -1 none */
	int random_fd; /* -1: not open yet */
	bool in_uts; /* uts_fd is the sandbox's, and PID 1 is in it */
	pid_t sandbox; /* see guest_sandbox; 0 not looked for */
	struct worker workers[GUEST_WORKERS];
	bool ended, told;
	int32_t status; /* of the sandbox's PID 1, once it has ended */
};

extern struct guest guest;

/* Into the kernel's log, which the host may show. */
void guest_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Modules, mounts and a root that can be pivoted away from. */
void guest_boot(void);
_Noreturn void guest_stop(void);
/* Writes everything out, and tells the host of the end. */
void guest_shut_down(void);

void guest_answer(uint16_t op, uint32_t tag, int error, const void *body, size_t size);
void guest_control(struct mux *mux, const uint8_t *payload, uint32_t size);
/* Does the items of PREPARE; 0 or an errno, with the item in `failed`. */
int guest_prepare(char *text, size_t size, const char **failed);
void guest_resume(uint32_t tag, const uint8_t *body, size_t size);
void guest_look(uint32_t tag, const uint8_t *body, size_t size);
/* What LOOK has found at a path. */
struct seen {
	char *path;
	int fd; /* -1: there was nothing */
	size_t size;
};
/* NULL where nobody has looked. */
struct seen *guest_seen(const char *path);
void guest_unsee(void);
/* guest.random_fd, or -1. */
int guest_open_random(void);
/* Both from within the sandbox's mount namespace; -1 with ENOENT if there is none. */
int guest_open_identity(const char *path);
bool guest_is_program(const char *path);
/* The next stream to the sandbox has its connection then, and a HELLO in it. */
void guest_connect_ahead(void);
/* An interface, and the way out by it; 0 or an errno. */
int guest_address(char *value);
/* Ends the sandbox's connections to elsewhere; 0 or an errno. */
int guest_close_outside(uint32_t *closed);

int guest_open(struct mux *mux, uint16_t target, const char *argument);
/* A child with nothing of PID 1's but descriptors 0 to 2; its pid, or -1. */
pid_t guest_fork(uint16_t op, uint32_t tag, int keep_fd);
void guest_reap(void);
/* PID 1 of the sandbox as seen from here, or 0. */
pid_t guest_sandbox(void);
/* Takes PID 1 into namespaces of the sandbox (CLONE_NEWUTS, _NEWNS, _NEWNET);
 * 0 or an errno. Then back, or the machine ends. */
int guest_enter(int types);
void guest_leave(int types);

/* Writes the records of the tree below `dir` to `fd`; 0 or an errno. */
int export_tree(int dir, int fd);

#endif
