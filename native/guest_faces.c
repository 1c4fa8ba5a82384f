/* What streams of a guest lead to, and its children. */
#define _GNU_SOURCE
#include "guest.h"
#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define SANDBOX_SOCKET "/run/wf/sock"

static struct worker *find_worker(pid_t pid)
{
	for (size_t i = 0; i < GUEST_WORKERS; i++)
		if (guest.workers[i].pid == pid)
			return &guest.workers[i];
	return NULL;
}

pid_t guest_fork(uint16_t op, uint32_t tag, int keep_fd)
{
	struct worker *worker = find_worker(0);
	sigset_t none;
	if (!worker) {
		errno = EAGAIN;
		return -1;
	}
	pid_t pid = fork();
	if (pid > 0)
		*worker = (struct worker){.pid = pid, .op = op, .tag = tag};
	if (pid != 0)
		return pid;
	/* A copy of a stream would hide its end. */
	if (keep_fd >= 0 && keep_fd != PLAN_AT && dup2(keep_fd, PLAN_AT) < 0)
		_exit(errno);
	if (syscall(SYS_close_range, keep_fd >= 0 ? PLAN_AT + 1 : PLAN_AT, ~0U, 0) < 0)
		_exit(errno);
	sigemptyset(&none);
	(void)signal(SIGPIPE, SIG_DFL);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
	return 0;
}

pid_t guest_sandbox(void)
{
	struct process *list;
	if (guest.ended || guest.leash_fd < 0)
		return 0;
	ssize_t n = guest.sandbox ? 0 : tree_scan(guest.proc_fd, &list);
	for (ssize_t i = 0; i < n && !guest.sandbox; i++)
		if (list[i].ppid == 1 && !find_worker(list[i].pid))
			guest.sandbox = list[i].pid;
	return guest.sandbox;
}

int guest_enter(int types)
{
	pid_t sandbox = guest_sandbox();
	int error = 0, fd = sandbox ? (int)syscall(SYS_pidfd_open, sandbox, 0) : -1;
	if (fd < 0)
		return sandbox ? errno : ESRCH;
	if (setns(fd, types) < 0)
		error = errno;
	close(fd);
	return error;
}

void guest_leave(int types)
{
	if (((types & CLONE_NEWUTS) && setns(guest.uts_fd, CLONE_NEWUTS) < 0) ||
	    ((types & CLONE_NEWNET) && setns(guest.net_fd, CLONE_NEWNET) < 0) ||
	    ((types & CLONE_NEWNS) && setns(guest.mount_fd, CLONE_NEWNS) < 0)) {
		guest_say("leaving the sandbox: %s", strerror(errno));
		guest_stop();
	}
}

void guest_reap(void)
{
	int status;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		struct worker *worker = find_worker(pid);
		if (worker) {
			if (worker->tag)
				guest_answer(worker->op, worker->tag, WIFEXITED(status) ? WEXITSTATUS(status) : EINTR,
					     NULL, 0);
			worker->pid = 0;
			/* Looked for here, while nobody waits for it: a restored
			 * machine then has it. */
			(void)guest_sandbox();
		} else if (guest.leash_fd >= 0 && !guest.ended) {
			/* Launch gives its PID 1 this process as parent. */
			guest.ended = true;
			guest.status = WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
		}
	}
}

static int pair(int ends[2])
{
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0)
		return -1;
	if (fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0)
		return 0;
	close(ends[0]);
	close(ends[1]);
	return -1;
}

/* Descriptors 3, 4 and 5 of the face; those from here are above 64. */
static int start_face(char *face, int first, int second)
{
	int ends[2], given[3] = {-1, first, second};
	char name[] = "wf-init", *argv[] = {name, face, NULL}, *envp[] = {NULL};
	if (pair(ends) < 0)
		return -1;
	given[0] = fcntl(ends[1], F_DUPFD_CLOEXEC, GUEST_PARKED);
	close(ends[1]);
	struct worker *worker = find_worker(0);
	pid_t pid = given[0] < 0 || !worker ? -1 : fork();
	if (pid == 0) {
		sigset_t none;
		for (int i = 0; i < 3; i++)
			if (given[i] >= 0 && dup2(given[i], PLAN_AT + i) < 0)
				_exit(126);
		sigemptyset(&none);
		(void)signal(SIGPIPE, SIG_DFL);
		(void)sigprocmask(SIG_SETMASK, &none, NULL);
		(void)setsid();
		/* All others are closed by exec. */
		(void)syscall(SYS_execveat, guest.program_fd, "", argv, envp, AT_EMPTY_PATH);
		_exit(127);
	}
	if (given[0] >= 0)
		close(given[0]);
	if (pid < 0) {
		close(ends[0]);
		return -1;
	}
	*worker = (struct worker){.pid = pid};
	return ends[0];
}

static int start_launch(void)
{
	char face[] = "launch";
	if (guest.leash_fd >= 0)
		return -1; /* one machine, one sandbox */
	int owner = fcntl(guest.pid_fd, F_DUPFD_CLOEXEC, GUEST_PARKED);
	int fd = owner < 0 ? -1 : start_face(face, owner, -1);
	if (owner >= 0)
		close(owner);
	if (fd >= 0)
		guest.leash_fd = fcntl(fd, F_DUPFD_CLOEXEC, GUEST_PARKED);
	return fd;
}

static int namespace_of(pid_t pid, const char *name)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, name);
	int low = open(path, O_RDONLY | O_CLOEXEC);
	int high = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, GUEST_PARKED);
	if (low >= 0)
		close(low);
	return high;
}

static int start_reroot(void)
{
	char face[] = "reroot";
	pid_t sandbox = guest_sandbox();
	int user = sandbox ? namespace_of(sandbox, "user") : -1;
	int mounts = sandbox ? namespace_of(sandbox, "mnt") : -1;
	int fd = user < 0 || mounts < 0 ? -1 : start_face(face, user, mounts);
	if (user >= 0)
		close(user);
	if (mounts >= 0)
		close(mounts);
	return fd;
}

static int start_export(const char *path)
{
	int ends[2];
	if (pair(ends) < 0)
		return -1;
	pid_t pid = guest_fork(0, 0, ends[1]);
	if (pid == 0) {
		int dir = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		_exit(export_tree(dir, PLAN_AT) ? 1 : 0);
	}
	close(ends[1]);
	if (pid < 0) {
		close(ends[0]);
		return -1;
	}
	return ends[0];
}

static int connect_sandbox(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SANDBOX_SOCKET};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
		close(fd);
		return -1;
	}
	return fd;
}

void guest_connect_ahead(void)
{
	int low = guest.ahead_fd < 0 && guest.leash_fd >= 0 ? connect_sandbox() : -1;
	if (low < 0)
		return;
	guest.ahead_fd = fcntl(low, F_DUPFD_CLOEXEC, GUEST_PARKED);
	close(low);
}

int guest_open(struct mux *mux, uint16_t target, const char *argument)
{
	(void)mux;
	int ahead = guest.ahead_fd;
	switch (target) {
	case TO_SANDBOX:
		guest.ahead_fd = -1;
		return ahead >= 0 ? ahead : connect_sandbox();
	case TO_LAUNCH:
		return start_launch();
	case TO_REROOT:
		return start_reroot();
	case TO_EXPORT:
		return start_export(argument);
	default:
		return -1;
	}
}
