#define _GNU_SOURCE
#include "builtin.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static uint8_t pending[64 * 1024];
static size_t n_pending;

int builtin_fail(const char *what, const char *detail)
{
	int error = errno ? errno : EIO;
	dprintf(STDERR_FILENO, "%.*s: %s\n", PATH_MAX, what, detail ? detail : strerror(error));
	return error;
}

int builtin_write_all(int fd, const void *data, size_t n)
{
	const uint8_t *at = data;
	while (n) {
		ssize_t done = write(fd, at, n);
		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			return errno;
		at += done;
		n -= (size_t)done;
	}
	return 0;
}

int builtin_flush(void)
{
	size_t n = n_pending;
	n_pending = 0;
	return builtin_write_all(STDOUT_FILENO, pending, n);
}

int builtin_put(const void *data, size_t n)
{
	const uint8_t *at = data;
	while (n) {
		size_t room = sizeof pending - n_pending;
		size_t part = n < room ? n : room;
		memcpy(pending + n_pending, at, part);
		n_pending += part;
		at += part;
		n -= part;
		int error = n_pending == sizeof pending ? builtin_flush() : 0;
		if (error)
			return error;
	}
	return 0;
}

bool builtin_number(const char *word, int base, uint64_t max, uint64_t *value)
{
	char *end;
	if (*word < '0' || *word > '9')
		return false;
	errno = 0;
	unsigned long long number = strtoull(word, &end, base);
	*value = number;
	return errno == 0 && *end == 0 && number <= max;
}

static int make_one(const char *path, mode_t mode)
{
	struct stat st;
	if (mkdir(path, mode) == 0)
		return 0;
	int error = errno;
	/* Also where mkdir says EROFS or EACCES before it looks: /, a mount. */
	if (stat(path, &st) == 0)
		return S_ISDIR(st.st_mode) ? 0 : error == EEXIST ? ENOTDIR : error;
	return error;
}

int builtin_make_parents(const char *path)
{
	char dir[PATH_MAX];
	struct stat st;
	size_t len = strlen(path);
	if (len >= sizeof dir)
		return ENAMETOOLONG;
	memcpy(dir, path, len + 1);
	char *last = strrchr(dir, '/');
	if (!last || last == dir)
		return 0;
	*last = 0;
	if (stat(dir, &st) == 0 && S_ISDIR(st.st_mode))
		return 0;
	for (char *at = dir + 1;; at++) {
		if (*at && *at != '/')
			continue;
		bool end = *at == 0;
		*at = 0;
		int error = make_one(dir, 0755);
		if (error || end)
			return error;
		*at = '/';
	}
}

static int usage(const char *line)
{
	errno = EINVAL;
	return builtin_fail(line, "wrong arguments");
}

static int fail_with(int error, const char *path)
{
	errno = error;
	return error ? builtin_fail(path, NULL) : 0;
}

static int make_directory(int argc, char **argv)
{
	char path[PATH_MAX];
	uint64_t mode = 0755;
	struct stat st;
	if (argc < 2 || argc > 3 || (argc == 3 && !builtin_number(argv[2], 8, 07777, &mode)))
		return usage("mkdir PATH [MODE]");
	size_t len = strlen(argv[1]);
	if (len == 0 || len >= sizeof path)
		return fail_with(len ? ENAMETOOLONG : ENOENT, argv[1]);
	memcpy(path, argv[1], len + 1);
	while (len > 1 && path[len - 1] == '/')
		path[--len] = 0;
	bool there = stat(path, &st) == 0;
	int error = builtin_make_parents(path);
	if (!error)
		error = make_one(path, 0755);
	if (!error && !there && chmod(path, (mode_t)mode) < 0)
		error = errno;
	return fail_with(error, argv[1]);
}

static int make_link(int argc, char **argv)
{
	if (argc != 3)
		return usage("symlink TARGET PATH");
	return symlink(argv[1], argv[2]) < 0 ? builtin_fail(argv[2], NULL) : 0;
}

static int change_mode(int argc, char **argv)
{
	uint64_t mode;
	if (argc != 3 || !builtin_number(argv[1], 8, 07777, &mode))
		return usage("chmod MODE PATH");
	return chmod(argv[2], (mode_t)mode) < 0 ? builtin_fail(argv[2], NULL) : 0;
}

static int move(int argc, char **argv)
{
	if (argc != 3)
		return usage("rename FROM TO");
	return rename(argv[1], argv[2]) < 0 ? builtin_fail(argv[1], NULL) : 0;
}

int builtin_main(int argc, char **argv)
{
	static const struct {
		const char *name;
		int (*run)(int, char **);
	} operations[] = {
		{"read", builtin_read}, {"write", builtin_write},   {"list", builtin_list},
		{"stat", builtin_stat}, {"delete", builtin_delete}, {"mkdir", make_directory},
		{"symlink", make_link}, {"chmod", change_mode},     {"rename", move},
		{"lay", builtin_lay},
	};
	errno = 0;
	for (size_t i = 0; i < sizeof operations / sizeof *operations; i++)
		if (strcmp(argv[0], operations[i].name) == 0)
			return operations[i].run(argc, argv);
	errno = ENOSYS;
	return builtin_fail(argv[0], "no such file operation");
}
