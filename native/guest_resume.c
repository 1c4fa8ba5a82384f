/* RESUME: what siblings of one memory must not share. */
#define _GNU_SOURCE
#include "guest.h"
#include "guest_body.h"
#include "overlay.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#ifndef STATX_ATTR_MOUNT_ROOT
#define STATX_ATTR_MOUNT_ROOT 0x2000
#endif

enum { NANO = 1000000000 };

/* Whether PID 1 has gone into the sandbox, for what nobody has looked for. */
static bool inside;

int guest_open_random(void)
{
	int low = guest.random_fd >= 0 ? -1 : open("/dev/urandom", O_RDWR | O_CLOEXEC);
	if (low >= 0) {
		guest.random_fd = fcntl(low, F_DUPFD_CLOEXEC, GUEST_PARKED);
		close(low);
	}
	return guest.random_fd;
}

static int reseed(const struct resume *asked)
{
	struct {
		struct rand_pool_info head;
		uint8_t bytes[MUX_ENTROPY];
	} pool = {.head = {.entropy_count = (int)asked->entropy_size * 8, .buf_size = (int)asked->entropy_size}};
	int fd = guest_open_random();
	if (fd < 0)
		return errno;
	memcpy(pool.bytes, asked->entropy, asked->entropy_size);
	if ((asked->entropy_size && ioctl(fd, RNDADDENTROPY, &pool) < 0) || ioctl(fd, RNDRESEEDCRNG) < 0)
		return errno;
	return 0;
}

static int set_clock(uint64_t wall_ns)
{
	struct timespec wall = {.tv_sec = (time_t)(wall_ns / NANO), .tv_nsec = (long)(wall_ns % NANO)};
	return clock_settime(CLOCK_REALTIME, &wall) < 0 ? errno : 0;
}

/* The file of the sandbox's own /dev that lies mounted over a path of its
 * world, as launch has put it there (see furnish.c); -1 with ENOENT if there is
 * none. What runs inside can move and link whatever it likes, but it cannot
 * mount: so the thing that the path leads to is held first, and then looked at. */
static int open_identity(int root, const char *path)
{
	struct stat dev;
	struct statx seen;
	char name[32];
	int fd = -1, mounts = wf_open_beneath(root, "dev"), point = wf_open_beneath(root, path);
	if (mounts >= 0 && point >= 0 && fstat(mounts, &dev) == 0 &&
	    statx(point, "", AT_EMPTY_PATH, STATX_TYPE, &seen) == 0 &&
	    (seen.stx_attributes & STATX_ATTR_MOUNT_ROOT) && S_ISREG(seen.stx_mode) &&
	    makedev(seen.stx_dev_major, seen.stx_dev_minor) == dev.st_dev) {
		snprintf(name, sizeof name, "self/fd/%d", point);
		fd = openat(guest.proc_fd, name, O_WRONLY | O_CLOEXEC);
	} else {
		errno = ENOENT;
	}
	int error = errno;
	if (mounts >= 0)
		close(mounts);
	if (point >= 0)
		close(point);
	errno = error;
	return fd;
}

int guest_open_identity(const char *path)
{
	int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
	int fd = root < 0 ? -1 : open_identity(root, path), error = errno;
	if (root >= 0)
		close(root);
	errno = error;
	return fd;
}

bool guest_is_program(const char *path)
{
	struct stat st;
	int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC), fd = wf_open_beneath(root, path);
	bool found = fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (st.st_mode & 0111);
	if (root >= 0)
		close(root);
	if (fd >= 0)
		close(fd);
	return found;
}

static int enter_once(void)
{
	int error = inside ? 0 : guest_enter(CLONE_NEWUTS | CLONE_NEWNS);
	inside = inside || !error;
	return error;
}

/* In place: a reader may for a moment see the new beginning of the old text.
 * A mount over it instead would add one with every generation. */
static int rewrite(const char *path, const char *text)
{
	size_t size = strlen(text);
	struct seen *known = guest_seen(path);
	int error = known ? 0 : enter_once();
	if (error)
		return error;
	int fd = known ? known->fd : guest_open_identity(path);
	if (fd < 0)
		return known ? ENOENT : errno;
	errno = EIO;
	if (pwrite(fd, text, size, 0) != (ssize_t)size ||
	    (!(known && known->size <= size) && ftruncate(fd, (off_t)size) < 0))
		error = errno;
	if (known)
		known->size = size;
	else
		close(fd);
	return error;
}

static int name_host(const char *name)
{
	int error = guest.in_uts ? 0 : enter_once();
	return !error && sethostname(name, strlen(name)) < 0 ? errno : error;
}

static int ask_program(const char *path)
{
	int error = guest_seen(path) ? ENOENT : enter_once();
	return error || guest_is_program(path) ? error : ENOENT;
}

static int do_item(const char *key, char *value, char *missing, size_t *used)
{
	char *field[2];
	int error = EINVAL;
	if (strcmp(key, "hostname") == 0)
		return name_host(value);
	if (strcmp(key, "idfile") == 0 && body_fields(value, field, 2))
		error = rewrite(field[0], field[1]);
	else if (strcmp(key, "program") == 0)
		error = ask_program(value);
	if (error != ENOENT)
		return error;
	size_t length = strlen(value) + 1;
	memcpy(missing + *used, value, length);
	*used += length;
	return 0;
}

static int resume(uint8_t *body, size_t size, char *missing, size_t *used, const char **failed)
{
	struct resume asked;
	char *key, *value;
	if (!body_resume(body, size, &asked))
		return EINVAL;
	if (asked.generation != guest.mux.generation)
		return ESTALE;
	/* Randomness first: everything else may lead to a draw. */
	int error = reseed(&asked);
	if (!error)
		error = set_clock(asked.wall_ns);
	char *text = (char *)body + asked.items_at;
	for (size_t at = 0; !error && body_next(text, size - asked.items_at, &at, &key, &value);) {
		error = do_item(key, value, missing, used);
		body_join(value); /* what an error names, up to its first tab */
		*failed = key;
	}
	if (inside)
		guest_leave(CLONE_NEWUTS | CLONE_NEWNS);
	inside = false;
	return error;
}

void guest_resume(uint32_t tag, const uint8_t *body, size_t size)
{
	static uint8_t copy[MUX_PAYLOAD];
	static char missing[MUX_PAYLOAD];
	const char *failed = "";
	size_t used = 0;
	memcpy(copy, body, size);
	int error = resume(copy, size, missing, &used, &failed);
	guest_answer(OP_RESUME, tag, error, error ? failed : missing, error ? strlen(failed) : used);
}
