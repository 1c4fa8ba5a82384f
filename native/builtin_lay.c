/* lay: removals and files below one directory, in one request; through no link and across no mount. */
#define _GNU_SOURCE
#include "builtin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* On stdin, one after the other: this head, the path, the content of a file. */
struct head {
	uint8_t what; /* 'r' removes, 'f' writes a file */
	uint8_t unused;
	uint16_t mode;
	uint32_t path_len;
	uint64_t size;
};

enum { LONGEST_PATH = 64 * 1024 };

static uint8_t block[128 * 1024];

/* 0, an errno, or -1 where the input ends before the first byte. */
static int take(void *into, size_t n)
{
	uint8_t *at = into;
	size_t left = n;
	while (left) {
		ssize_t got = read(STDIN_FILENO, at, left);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return errno;
		if (got == 0)
			return left == n ? -1 : EPIPE;
		at += got;
		left -= (size_t)got;
	}
	return 0;
}

static bool is_name(const char *name)
{
	return *name && strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
}

/* Opens a directory in another. With `make`, one that is missing is made, and
 * what is none gives way to it. */
static int enter(int dir, const char *name, bool make)
{
	int fd = builtin_open_below(dir, name);
	if (fd >= 0 || !make || (errno != ENOENT && errno != ENOTDIR && errno != ELOOP))
		return fd;
	if (errno != ENOENT && unlinkat(dir, name, 0) < 0 && errno != ENOENT)
		return -1;
	if (mkdirat(dir, name, 0755) < 0 && errno != EEXIST)
		return -1;
	return builtin_open_below(dir, name);
}

/* The open directory above the last name of path, or -1 with errno. */
static int open_above(int base, char *path, bool make, const char **last)
{
	int at = fcntl(base, F_DUPFD_CLOEXEC, 0);
	char *name = path;
	for (char *slash; at >= 0 && (slash = strchr(name, '/')); name = slash + 1) {
		*slash = 0;
		errno = EINVAL;
		int below = is_name(name) ? enter(at, name, make) : -1;
		int error = errno;
		*slash = '/'; /* an error names the whole path */
		close(at);
		at = below;
		errno = error;
	}
	*last = name;
	if (at < 0 || is_name(name))
		return at;
	close(at);
	errno = EINVAL;
	return -1;
}

static int remove_at(int above, const char *name)
{
	int copy = fcntl(above, F_DUPFD_CLOEXEC, 0);
	int error = copy < 0 ? errno : builtin_delete_at(copy, name, true);
	return error == ENOENT ? 0 : error;
}

static int remove_path(int base, char *path)
{
	const char *name;
	int above = open_above(base, path, false, &name);
	if (above < 0) /* nothing is there, or something else than what was meant */
		return errno == ENOENT || errno == ENOTDIR || errno == ELOOP ? 0 : errno;
	int error = remove_at(above, name);
	close(above);
	return error;
}

static int fill(int fd, const struct head *head)
{
	for (uint64_t left = head->size; left;) {
		size_t n = left < sizeof block ? (size_t)left : sizeof block;
		int error = take(block, n);
		if (!error)
			error = builtin_write_all(fd, block, n);
		if (error)
			return error < 0 ? EPIPE : error;
		left -= n;
	}
	return fchmod(fd, head->mode & 07777) < 0 ? errno : 0;
}

static int lay_file(int base, char *path, const struct head *head)
{
	const char *name;
	int above = open_above(base, path, true, &name);
	if (above < 0)
		return errno;
	int error = remove_at(above, name);
	int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
	int fd = error ? -1 : openat(above, name, flags, 0600);
	if (!error)
		error = fd < 0 ? errno : fill(fd, head);
	if (fd >= 0 && close(fd) < 0 && !error)
		error = errno;
	close(above);
	return error;
}

/* One record; -1 at the end of all. */
static int lay_next(int base, char *path)
{
	struct head head;
	int error = take(&head, sizeof head);
	if (error)
		return error;
	bool known = (head.what == 'f' || head.what == 'r') && head.path_len < LONGEST_PATH;
	error = known ? take(path, head.path_len) : EINVAL;
	path[error ? 0 : head.path_len] = 0;
	if (!error && strlen(path) != head.path_len)
		error = EINVAL;
	if (!error)
		error = head.what == 'r' ? remove_path(base, path) : lay_file(base, path, &head);
	return error < 0 ? EPIPE : error;
}

int builtin_lay(int argc, char **argv)
{
	static char path[LONGEST_PATH];
	if (argc != 2) {
		errno = EINVAL;
		return builtin_fail("lay DIRECTORY", "wrong arguments");
	}
	int base = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (base < 0)
		return builtin_fail(argv[1], NULL);
	int error;
	do
		error = lay_next(base, path);
	while (!error);
	errno = error < 0 ? 0 : error;
	return error < 0 ? 0 : builtin_fail(*path ? path : argv[1], NULL);
}
