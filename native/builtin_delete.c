/* delete: never across a mount, never through a link, at any depth. */
#define _GNU_SOURCE
#include "builtin.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* One level of the way down. Directories are entered one at a time and left
 * by "..", so that depth costs neither stack nor descriptors. */
struct level {
	dev_t dev;
	ino_t ino;
	char name[NAME_MAX + 1];
};

struct descent {
	struct level *levels;
	size_t n, cap;
	int fd; /* the directory at the bottom */
};

int builtin_open_below(int dir, const char *name)
{
	struct open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC,
			       .resolve = RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH};
	long fd = syscall(SYS_openat2, dir, name, &how, sizeof how);
	if (fd >= 0 || errno != ENOSYS)
		return (int)fd;
	/* A filter that does not know the call. Devices tell most mounts apart. */
	struct stat above, below;
	int plain = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (plain < 0 ||
	    (fstat(dir, &above) == 0 && fstat(plain, &below) == 0 && above.st_dev == below.st_dev))
		return plain;
	close(plain);
	errno = EXDEV;
	return -1;
}

static int go_down(struct descent *d, int fd, const char *name)
{
	struct stat st;
	if (d->n == d->cap) {
		size_t cap = d->cap ? d->cap * 2 : 64;
		struct level *more = realloc(d->levels, cap * sizeof *more);
		if (!more) {
			close(fd);
			return ENOMEM;
		}
		d->levels = more;
		d->cap = cap;
	}
	struct level *level = &d->levels[d->n];
	if (fstat(d->fd, &st) < 0 || strlen(name) > NAME_MAX) {
		close(fd);
		return EIO;
	}
	level->dev = st.st_dev;
	level->ino = st.st_ino;
	memcpy(level->name, name, strlen(name) + 1);
	d->n++;
	close(d->fd);
	d->fd = fd;
	return 0;
}

/* Back to the directory above, if it still is that, and removes the one left. */
static int go_up(struct descent *d)
{
	struct stat st;
	struct level *level = &d->levels[--d->n];
	int fd = openat(d->fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return errno;
	close(d->fd);
	d->fd = fd;
	if (fstat(fd, &st) < 0)
		return errno;
	if (st.st_dev != level->dev || st.st_ino != level->ino)
		return ESTALE; /* moved meanwhile */
	return unlinkat(fd, level->name, AT_REMOVEDIR) < 0 && errno != ENOENT ? errno : 0;
}

/* Removes entries of the bottom directory until one has to be entered first:
 * *down is then its descriptor and `name` its name, else *down is -1. */
static int clear_level(struct descent *d, int *down, char *name)
{
	int copy = openat(d->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = copy < 0 ? NULL : fdopendir(copy);
	int error = dir ? 0 : errno;
	*down = -1;
	while (!error && *down < 0) {
		errno = 0;
		struct dirent *entry = readdir(dir);
		if (!entry) {
			error = errno;
			break;
		}
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if (unlinkat(d->fd, entry->d_name, 0) == 0 || errno == ENOENT)
			continue;
		if (errno != EISDIR && errno != EPERM) {
			error = errno;
			break;
		}
		int refused = errno;
		*down = builtin_open_below(d->fd, entry->d_name);
		if (*down < 0)
			error = errno == ENOTDIR ? refused : errno;
		else
			memcpy(name, entry->d_name, strlen(entry->d_name) + 1);
	}
	if (dir)
		closedir(dir);
	else if (copy >= 0)
		close(copy);
	return error;
}

/* Empties and removes the directory `name`, open as fd, in `parent`. */
static int delete_tree(int parent, int fd, const char *name)
{
	struct descent d = {.fd = parent};
	char next[NAME_MAX + 1];
	int error = go_down(&d, fd, name);
	while (!error && d.n > 0) {
		int down;
		error = clear_level(&d, &down, next);
		if (!error)
			error = down >= 0 ? go_down(&d, down, next) : go_up(&d);
	}
	close(d.fd);
	free(d.levels);
	return error;
}

/* Cuts path into the open directory above and the last name. */
static int open_parent(const char *path, char *name, int *fd)
{
	char dir[PATH_MAX];
	size_t len = strlen(path);
	while (len > 1 && path[len - 1] == '/')
		len--;
	if (len == 0 || len >= sizeof dir)
		return len ? ENAMETOOLONG : ENOENT;
	memcpy(dir, path, len);
	dir[len] = 0;
	char *slash = strrchr(dir, '/');
	const char *last = slash ? slash + 1 : dir;
	if (!*last || strcmp(last, ".") == 0 || strcmp(last, "..") == 0)
		return EINVAL;
	if (strlen(last) > NAME_MAX)
		return ENAMETOOLONG;
	memcpy(name, last, strlen(last) + 1);
	if (slash)
		slash[slash == dir] = 0;
	*fd = open(slash ? dir : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return *fd < 0 ? errno : 0;
}

int builtin_delete_at(int parent, const char *name, bool recursive)
{
	if (unlinkat(parent, name, 0) == 0)
		return close(parent), 0;
	int error = errno;
	if ((error == EISDIR || error == EPERM) && !recursive) {
		error = unlinkat(parent, name, AT_REMOVEDIR) == 0 ? 0
			: errno == ENOTDIR                        ? error
								  : errno;
	} else if (error == EISDIR || error == EPERM) {
		int fd = builtin_open_below(parent, name);
		if (fd >= 0)
			return delete_tree(parent, fd, name);
		error = errno == ENOTDIR ? error : errno;
	}
	close(parent);
	return error;
}

int builtin_delete(int argc, char **argv)
{
	char name[NAME_MAX + 1];
	int parent = -1;
	bool recursive = argc == 3 && strcmp(argv[2], "recursive") == 0;
	if (argc < 2 || (argc > 2 && !recursive)) {
		errno = EINVAL;
		return builtin_fail("delete PATH [recursive]", "wrong arguments");
	}
	int error = open_parent(argv[1], name, &parent);
	if (!error)
		error = builtin_delete_at(parent, name, recursive);
	errno = error;
	return error ? builtin_fail(argv[1], NULL) : 0;
}
