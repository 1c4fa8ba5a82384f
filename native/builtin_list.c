/* list and stat: packed records of what lies at a path. */
#define _GNU_SOURCE
#include "builtin.h"
#include "frame.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RECORD_BYTES = 64 + 2 * PATH_MAX };

static char kind_of(mode_t mode)
{
	switch (mode & S_IFMT) {
	case S_IFREG:
		return 'f';
	case S_IFDIR:
		return 'd';
	case S_IFLNK:
		return 'l';
	case S_IFIFO:
		return 'p';
	case S_IFSOCK:
		return 's';
	case S_IFCHR:
		return 'c';
	default:
		return 'b';
	}
}

/* `at` and `path` say where a link's target is read from. */
static int put_record(const struct stat *st, const char *name, int at, const char *path)
{
	static uint8_t record[RECORD_BYTES];
	static char target[PATH_MAX];
	struct writer w = {.at = record, .left = sizeof record};
	ssize_t target_len = 0;
	if (S_ISLNK(st->st_mode)) {
		target_len = readlinkat(at, path, target, sizeof target);
		if (target_len < 0)
			return errno;
	}
	write_u8(&w, (uint8_t)kind_of(st->st_mode));
	write_u32(&w, st->st_mode & 07777);
	write_u32(&w, st->st_uid);
	write_u32(&w, st->st_gid);
	write_u64(&w, (uint64_t)st->st_size);
	write_u64(&w, (uint64_t)((int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec));
	write_u64(&w, st->st_ino);
	write_u32(&w, (uint32_t)st->st_nlink);
	write_str(&w, name, strnlen(name, PATH_MAX));
	write_str(&w, target, (size_t)target_len);
	return builtin_put(record, sizeof record - w.left);
}

static int put_entries(DIR *dir)
{
	struct stat st;
	for (;;) {
		errno = 0;
		struct dirent *entry = readdir(dir);
		if (!entry)
			return errno;
		const char *name = entry->d_name;
		if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
			continue;
		int error = fstatat(dirfd(dir), name, &st, AT_SYMLINK_NOFOLLOW) < 0 ? errno : 0;
		if (!error)
			error = put_record(&st, name, dirfd(dir), name);
		/* One that went away meanwhile is not an entry. */
		if (error && error != ENOENT)
			return error;
	}
}

int builtin_list(int argc, char **argv)
{
	if (argc != 2) {
		errno = EINVAL;
		return builtin_fail("list PATH", "wrong arguments");
	}
	int fd = open(argv[1], O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	if (!dir)
		return builtin_fail(argv[1], NULL);
	errno = put_entries(dir);
	if (errno)
		return builtin_fail(argv[1], NULL);
	closedir(dir);
	return builtin_flush();
}

int builtin_stat(int argc, char **argv)
{
	struct stat st;
	bool nofollow = argc == 3 && strcmp(argv[2], "nofollow") == 0;
	if (argc < 2 || (argc > 2 && !nofollow)) {
		errno = EINVAL;
		return builtin_fail("stat PATH [nofollow]", "wrong arguments");
	}
	if (fstatat(AT_FDCWD, argv[1], &st, nofollow ? AT_SYMLINK_NOFOLLOW : 0) < 0)
		return builtin_fail(argv[1], NULL);
	errno = put_record(&st, argv[1], AT_FDCWD, argv[1]);
	if (errno)
		return builtin_fail(argv[1], NULL);
	return builtin_flush();
}
