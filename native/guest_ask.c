/* Requests to the guest: everything but PREPARE, which is in guest_prepare.c. */
#define _GNU_SOURCE
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { ANSWER_MAX = MUX_PAYLOAD - MUX_CONTROL_HEAD, NANO = 1000000000 };

static int reseed(const uint8_t *entropy, uint32_t size)
{
	struct {
		struct rand_pool_info head;
		uint8_t bytes[MUX_ENTROPY];
	} pool = {.head = {.entropy_count = (int)size * 8, .buf_size = (int)size}};
	int error = 0, fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return errno;
	memcpy(pool.bytes, entropy, size);
	if ((size && ioctl(fd, RNDADDENTROPY, &pool) < 0) || ioctl(fd, RNDRESEEDCRNG) < 0)
		error = errno;
	close(fd);
	return error;
}

/* The host name belongs to the sandbox's own namespace, not to PID 1's. */
static int name_sandbox(const char *name)
{
	char path[64];
	pid_t sandbox = guest_sandbox();
	int error = 0;
	if (!sandbox)
		return ESRCH;
	snprintf(path, sizeof path, "/proc/%d/ns/uts", sandbox);
	int own = open("/proc/self/ns/uts", O_RDONLY | O_CLOEXEC);
	int theirs = open(path, O_RDONLY | O_CLOEXEC);
	if (own < 0 || theirs < 0 || setns(theirs, CLONE_NEWUTS) < 0)
		error = errno;
	else if (sethostname(name, strlen(name)) < 0)
		error = errno;
	if (!error && setns(own, CLONE_NEWUTS) < 0)
		error = errno;
	if (own >= 0)
		close(own);
	if (theirs >= 0)
		close(theirs);
	return error;
}

static int resume_items(const char *text, size_t size)
{
	static const char key[] = "hostname=";
	if (size && text[size - 1] != '\0')
		return EINVAL;
	for (size_t at = 0; at < size; at += strlen(text + at) + 1) {
		if (strncmp(text + at, key, sizeof key - 1) != 0)
			return EINVAL;
		int error = name_sandbox(text + at + sizeof key - 1);
		if (error)
			return error;
	}
	return 0;
}

static int resume(const uint8_t *body, size_t size)
{
	uint32_t generation, entropy;
	uint64_t wall_ns;
	if (size < 16)
		return EINVAL;
	memcpy(&generation, body, 4);
	memcpy(&wall_ns, body + 4, 8);
	memcpy(&entropy, body + 12, 4);
	if (entropy > MUX_ENTROPY || entropy > size - 16)
		return EINVAL;
	if (generation != guest.mux.generation)
		return ESTALE;
	/* Randomness first: everything else may lead to a draw. */
	int error = reseed(body + 16, entropy);
	struct timespec wall = {.tv_sec = (time_t)(wall_ns / NANO), .tv_nsec = (long)(wall_ns % NANO)};
	if (!error && clock_settime(CLOCK_REALTIME, &wall) < 0)
		error = errno;
	return error ? error : resume_items((const char *)body + 16 + entropy, size - 16 - entropy);
}

static void sync_path(uint32_t tag, const uint8_t *body, size_t size)
{
	char path[MUX_ARGUMENT + 1];
	if (size == 0 || size > MUX_ARGUMENT) {
		guest_answer(OP_SYNC, tag, EINVAL, NULL, 0);
		return;
	}
	memcpy(path, body, size);
	path[size] = '\0';
	pid_t pid = guest_fork(tag, -1);
	if (pid == 0) {
		int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
		_exit(fd < 0 || syncfs(fd) < 0 ? errno : 0);
	}
	if (pid < 0)
		guest_answer(OP_SYNC, tag, errno, NULL, 0);
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
		guest_answer(op, tag, resume(body, left), NULL, 0);
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
	case OP_SHUTDOWN:
		guest_shut_down();
		break;
	default:
		guest_answer(op, tag, ENOSYS, NULL, 0);
	}
}
