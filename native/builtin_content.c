/* read and write: the content of regular files, and of nothing else. */
#define _GNU_SOURCE
#include "builtin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NS_PER_S = 1000000000 };

static uint8_t block[128 * 1024];

static int usage(const char *line)
{
	errno = EINVAL;
	return builtin_fail(line, "wrong arguments");
}

static int refuse(const char *path, mode_t mode)
{
	const char *kind = S_ISDIR(mode)    ? "is a directory"
			   : S_ISFIFO(mode) ? "is a FIFO, not a regular file"
			   : S_ISSOCK(mode) ? "is a socket, not a regular file"
					    : "is a device, not a regular file";
	errno = S_ISDIR(mode) ? EISDIR : EINVAL;
	return builtin_fail(path, kind);
}

static ssize_t read_some(int fd, void *into, size_t n)
{
	ssize_t got;
	do
		got = read(fd, into, n);
	while (got < 0 && errno == EINTR);
	return got;
}

static int copy_out(int fd, const char *path, uint64_t limit)
{
	while (limit) {
		ssize_t got =
			read_some(fd, block, limit < sizeof block ? (size_t)limit : sizeof block);
		if (got < 0)
			return builtin_fail(path, NULL);
		if (got == 0)
			return 0;
		int error = builtin_write_all(STDOUT_FILENO, block, (size_t)got);
		if (error)
			return error;
		limit -= (uint64_t)got;
	}
	return 0;
}

int builtin_read(int argc, char **argv)
{
	uint64_t offset = 0, limit = UINT64_MAX;
	struct stat st;
	if (argc < 2 || argc > 4 ||
	    (argc > 2 && !builtin_number(argv[2], 10, INT64_MAX, &offset)) ||
	    (argc > 3 && !builtin_number(argv[3], 10, UINT64_MAX, &limit)))
		return usage("read PATH [OFFSET [LIMIT]]");
	/* Not waiting for a FIFO's other end, nor taking a terminal. */
	int fd = open(argv[1], O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0 && errno == ENXIO) { /* a socket, or a device with nothing behind it */
		errno = EINVAL;
		return builtin_fail(argv[1], "is not a regular file");
	}
	if (fd < 0)
		return builtin_fail(argv[1], NULL);
	if (fstat(fd, &st) < 0)
		return builtin_fail(argv[1], NULL);
	if (!S_ISREG(st.st_mode))
		return refuse(argv[1], st.st_mode);
	uint8_t head[8];
	for (int i = 0; i < 8; i++)
		head[i] = (uint8_t)((uint64_t)st.st_size >> (8 * i));
	int error = builtin_write_all(STDOUT_FILENO, head, sizeof head);
	if (error)
		return error;
	if (offset && lseek(fd, (off_t)offset, SEEK_SET) < 0)
		return builtin_fail(argv[1], NULL);
	return copy_out(fd, argv[1], limit);
}

struct write_request {
	const char *path;
	bool set_mode, append, exclusive, set_mtime;
	mode_t mode;
	uint64_t mtime_ns;
};

static bool parse_write(int argc, char **argv, struct write_request *request)
{
	uint64_t mode = 0;
	memset(request, 0, sizeof *request);
	if (argc < 3 || argc > 5)
		return false;
	request->path = argv[1];
	request->set_mode = strcmp(argv[2], "-") != 0;
	if (request->set_mode && !builtin_number(argv[2], 8, 07777, &mode))
		return false;
	request->mode = (mode_t)mode;
	if (argc > 3) {
		request->append = strcmp(argv[3], "append") == 0;
		request->exclusive = strcmp(argv[3], "excl") == 0;
		if (!request->append && !request->exclusive && strcmp(argv[3], "-") != 0)
			return false;
	}
	request->set_mtime = argc > 4;
	return argc < 5 || builtin_number(argv[4], 10, INT64_MAX, &request->mtime_ns);
}

/* Opens without truncating: what turns out not to be a file is left alone. */
static int open_target(const struct write_request *request, int *fd)
{
	int flags = O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
	struct stat st;
	flags |= (request->append ? O_APPEND : 0) | (request->exclusive ? O_EXCL : 0);
	*fd = open(request->path, flags, 0644);
	if (*fd < 0 && errno == ENOENT) {
		int error = builtin_make_parents(request->path);
		if (error) {
			errno = error;
			return builtin_fail(request->path, NULL);
		}
		*fd = open(request->path, flags, 0644);
	}
	if (*fd < 0 && errno == ENXIO && stat(request->path, &st) == 0)
		return refuse(request->path, st.st_mode);
	if (*fd < 0 || fstat(*fd, &st) < 0)
		return builtin_fail(request->path, NULL);
	if (!S_ISREG(st.st_mode))
		return refuse(request->path, st.st_mode);
	if (!request->append && st.st_size && ftruncate(*fd, 0) < 0)
		return builtin_fail(request->path, NULL);
	return 0;
}

int builtin_write(int argc, char **argv)
{
	struct write_request request;
	int fd;
	if (!parse_write(argc, argv, &request))
		return usage("write PATH MODE|- [append|excl|- [MTIME_NS]]");
	int error = open_target(&request, &fd);
	if (error)
		return error;
	for (ssize_t got; (got = read_some(STDIN_FILENO, block, sizeof block)) != 0;) {
		if (got < 0)
			return builtin_fail("stdin", NULL);
		errno = builtin_write_all(fd, block, (size_t)got);
		if (errno)
			return builtin_fail(request.path, NULL);
	}
	/* After the content: a write would drop set-user-id, and change the time. */
	if (request.set_mode && fchmod(fd, request.mode) < 0)
		return builtin_fail(request.path, NULL);
	if (request.set_mtime) {
		struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}};
		times[1].tv_sec = (time_t)(request.mtime_ns / NS_PER_S);
		times[1].tv_nsec = (long)(request.mtime_ns % NS_PER_S);
		if (futimens(fd, times) < 0)
			return builtin_fail(request.path, NULL);
	}
	return close(fd) < 0 ? builtin_fail(request.path, NULL) : 0;
}
