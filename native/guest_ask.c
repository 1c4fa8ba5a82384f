/* Requests to the guest, and the answers to the small ones. */
#define _GNU_SOURCE
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ANSWER_MAX = MUX_PAYLOAD - MUX_CONTROL_HEAD };

static void sync_path(uint32_t tag, const uint8_t *body, size_t size)
{
	char path[MUX_ARGUMENT + 1];
	if (size == 0 || size > MUX_ARGUMENT) {
		guest_answer(OP_SYNC, tag, EINVAL, NULL, 0);
		return;
	}
	memcpy(path, body, size);
	path[size] = '\0';
	pid_t pid = guest_fork(OP_SYNC, tag, -1);
	if (pid == 0) {
		int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
		_exit(fd < 0 || syncfs(fd) < 0 ? errno : 0);
	}
	if (pid < 0)
		guest_answer(OP_SYNC, tag, errno, NULL, 0);
}

/* Runs a program that does nothing: a restored machine has run nothing yet, and
 * what the first one takes is done here, before anybody waits for it. */
static void rehearse(uint32_t tag)
{
	pid_t pid = guest_fork(OP_REHEARSE, tag, guest.program_fd);
	if (pid == 0) {
		char name[] = "wf-init", face[] = "nothing", *argv[] = {name, face, NULL}, *envp[] = {NULL};
		(void)syscall(SYS_execveat, PLAN_AT, "", argv, envp, AT_EMPTY_PATH);
		_exit(errno);
	}
	if (pid < 0)
		guest_answer(OP_REHEARSE, tag, errno, NULL, 0);
}

/* Appends a file; 0 or an errno. */
static int add_file(char *into, size_t *used, const char *path)
{
	int error = 0, fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = 1;
	if (fd < 0)
		return errno;
	while (n > 0 && *used < ANSWER_MAX) {
		n = read(fd, into + *used, ANSWER_MAX - *used);
		if (n > 0)
			*used += (size_t)n;
	}
	if (n != 0)
		error = n < 0 ? errno : E2BIG;
	close(fd);
	return error;
}

static void tell_files(uint16_t op, uint32_t tag, const char *const *names, size_t n, pid_t pid)
{
	static char text[ANSWER_MAX];
	char path[64];
	size_t used = 0;
	int error = 0;
	for (size_t i = 0; i < n && !error; i++) {
		if (pid)
			snprintf(path, sizeof path, "/proc/%d/net/%s", pid, names[i]);
		else
			snprintf(path, sizeof path, "/proc/%s", names[i]);
		error = add_file(text, &used, path);
		if (pid && error == ENOENT) /* a kernel without this family */
			error = 0;
	}
	guest_answer(op, tag, error, text, error ? 0 : used);
}

static void tell_network(uint32_t tag)
{
	static const char *const names[] = {"tcp", "tcp6", "udp", "udp6"};
	pid_t sandbox = guest_sandbox();
	if (sandbox)
		tell_files(OP_NETWORK, tag, names, 4, sandbox);
	else
		guest_answer(OP_NETWORK, tag, ESRCH, NULL, 0);
}

static void close_outside(uint32_t tag)
{
	uint32_t closed = 0;
	int error = guest_close_outside(&closed);
	guest_answer(OP_CLOSE_OUTSIDE, tag, error, &closed, error ? 0 : sizeof closed);
}

static void prepare(uint32_t tag, const uint8_t *body, size_t size)
{
	static char text[MUX_PAYLOAD];
	const char *failed = "";
	memcpy(text, body, size);
	int error = guest_prepare(text, size, &failed);
	guest_answer(OP_PREPARE, tag, error, failed, error ? strlen(failed) : 0);
}

void guest_control(struct mux *mux, const uint8_t *payload, uint32_t size)
{
	static const char *const memory[] = {"meminfo"};
	const uint8_t *body = payload + MUX_CONTROL_HEAD;
	size_t left = size - MUX_CONTROL_HEAD;
	uint16_t op;
	uint32_t tag;
	(void)mux;
	memcpy(&op, payload, 2);
	memcpy(&tag, payload + 4, 4);
	switch (op) {
	case OP_PREPARE:
		prepare(tag, body, left);
		break;
	case OP_RESUME:
		guest_resume(tag, body, left);
		break;
	case OP_LOOK:
		guest_look(tag, body, left);
		break;
	case OP_REHEARSE:
		rehearse(tag);
		break;
	case OP_SYNC:
		sync_path(tag, body, left);
		break;
	case OP_STATS:
		tell_files(op, tag, memory, 1, 0);
		break;
	case OP_NETWORK:
		tell_network(tag);
		break;
	case OP_CLOSE_OUTSIDE:
		close_outside(tag);
		break;
	case OP_SHUTDOWN:
		guest_shut_down();
		break;
	default:
		guest_answer(op, tag, ENOSYS, NULL, 0);
	}
}
