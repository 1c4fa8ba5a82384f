#define _GNU_SOURCE
#include "supervisor.h"
#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CHILD_STACK = 128 * 1024, KILL_PAUSE_MS = 2 };

static const struct supervisor_start *start;
static struct user user;
/* Written by the child before its exec, in memory shared with it. */
static volatile int failed_errno;
static struct failure failure;
static pid_t child;               /* 0 once reaped */
static struct timespec begun;

static void tell(const struct control_message *message)
{
	ssize_t n;
	do
		n = send(FD_CONTROL, message, sizeof *message, MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	/* PID 1 not listening means that the sandbox is ending. */
}

static void tell_failure(int error, uint32_t stage, const char *text)
{
	struct control_message message = {.kind = CONTROL_FAILED, .value = error, .stage = stage};
	snprintf(message.text, sizeof message.text, "%s", text);
	tell(&message);
}

static int child_main(void *unused)
{
	(void)unused;
	start_command(start, &user, &failure);
	/* FD_CONTROL is still open here: exec failed, or nothing was closed yet. */
	tell_failure(failure.error, failure.stage, failure.text);
	failed_errno = failure.error;
	_exit(127);
}

static pid_t start_child(void)
{
	static char stack[CHILD_STACK] __attribute__((aligned(64)));
	if (start->request->flags & WF_EXEC_BUILTIN) {
		/* A file operation goes on in this program: it needs its own memory. */
		pid_t pid = fork();
		if (pid == 0)
			child_main(NULL);
		return pid;
	}
	return clone(child_main, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
}

static uint64_t micros(struct timeval time)
{
	return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_usec;
}

static void tell_exit(int status, const struct rusage *used)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	int64_t wall = (int64_t)(now.tv_sec - begun.tv_sec) * 1000000 +
		       (now.tv_nsec - begun.tv_nsec) / 1000;
	struct control_message message = {.kind = CONTROL_EXITED, .value = status};
	message.usage.user_us = micros(used->ru_utime);
	message.usage.sys_us = micros(used->ru_stime);
	message.usage.maxrss_kib = (uint64_t)used->ru_maxrss;
	message.usage.wall_us = wall > 0 ? (uint64_t)wall : 0;
	tell(&message);
}

/* Reaps what has ended; false once there is no child left at all. */
static bool reap(void)
{
	int status;
	struct rusage used;
	for (;;) {
		pid_t pid = wait4(-1, &status, WNOHANG, &used);
		if (pid == 0)
			return true;
		if (pid < 0 && errno == EINTR)
			continue;
		if (pid < 0)
			return false;
		if (pid == child) {
			child = 0;
			tell_exit(status, &used);
		}
	}
}

/* Waits for a child's end or, when asked to, a message; at most `ms`. */
static bool pause_for(bool messages, int ms)
{
	sigset_t mask;
	struct pollfd poll_fd = {.fd = FD_CONTROL, .events = POLLIN};
	struct timespec limit = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
	sigfillset(&mask);
	sigdelset(&mask, SIGCHLD);
	return ppoll(&poll_fd, messages ? 1 : 0, ms < 0 ? NULL : &limit, &mask) > 0;
}

/* Until nothing of the tree is left. Its group goes at one stroke; the rest
 * is found through parents, and everything is stopped first when it keeps
 * growing, so that a fork bomb cannot outrun this. */
static void kill_tree(void) __attribute__((noreturn));
static void kill_tree(void)
{
	pid_t self = getpid();
	for (unsigned pass = 0; reap(); pass++) {
		if (child)
			(void)kill(-child, SIGKILL);
		if (pass >= 2) {
			(void)tree_signal(FD_PROC, self, SIGSTOP, NULL);
			(void)tree_signal(FD_PROC, self, SIGSTOP, NULL);
		}
		(void)tree_signal(FD_PROC, self, SIGKILL, NULL);
		if (pass >= 1)
			pause_for(false, KILL_PAUSE_MS);
	}
	_exit(0);
}

static void obey(void)
{
	struct control_message message;
	ssize_t n = recv(FD_CONTROL, &message, sizeof message, MSG_DONTWAIT);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n != sizeof message)
		kill_tree(); /* PID 1 is gone, or cannot be understood */
	if (message.kind == CONTROL_KILL)
		kill_tree();
	if (message.kind == CONTROL_SIGNAL && child)
		(void)kill(child, message.value);
	if (message.kind == CONTROL_SIGNAL_TREE)
		(void)tree_signal(FD_PROC, getpid(), message.value, NULL);
}

/* Lets go of the command's pipes, and of all that came along in the fork. */
static void settle_fds(bool before)
{
	if (before) {
		if (dup2(start->stdin_fd, 0) < 0 || dup2(start->stdout_fd, 1) < 0 ||
		    dup2(start->stderr_fd, 2) < 0 ||
		    dup3(start->control_fd, FD_CONTROL, O_CLOEXEC) < 0)
			_exit(126);
		(void)syscall(SYS_close_range, FD_JOIN + start->kept->n_join, ~0U, 0);
		return;
	}
	for (int fd = 0; fd < 3; fd++)
		if (dup2(FD_NULL, fd) < 0)
			close(fd);
	(void)syscall(SYS_close_range, FD_JOIN, ~0U, 0);
}

static bool prepare_user(void)
{
	char why[160];
	user.uid = start->kept->uid;
	user.gid = start->kept->gid;
	if (!start->request->user[0])
		return true;
	int error = user_resolve(start->request->user, &user, why, sizeof why);
	if (error)
		tell_failure(error, STAGE_USER, why);
	return error == 0;
}

void supervisor_main(const struct supervisor_start *given)
{
	start = given;
	clock_gettime(CLOCK_MONOTONIC, &begun);
	settle_fds(true);
	if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) < 0) {
		tell_failure(errno, STAGE_OTHER, "cannot become a sub-reaper");
		_exit(0);
	}
	if (!prepare_user())
		_exit(0);
	child = start_child();
	if (child < 0) {
		tell_failure(errno, STAGE_OTHER, "cannot make a process");
		_exit(0);
	}
	settle_fds(false);
	if (!(start->request->flags & WF_EXEC_BUILTIN) && failed_errno == 0) {
		struct control_message message = {.kind = CONTROL_STARTED, .value = child};
		char pid[16];
		tell(&message);
		snprintf(pid, sizeof pid, "%d", (int)child);
		if (!failure.likely_victim)
			(void)raise_oom_score(pid);
	}
	while (reap())
		if (pause_for(true, -1))
			obey();
	_exit(0);
}
