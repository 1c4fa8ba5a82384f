/* Export: a tree as a stream of records, see mux.h. In a process of its own;
 * through no link and onto no other file system. */
#define _GNU_SOURCE
#include "builtin.h"
#include "export.h"
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum {
	NAME_MAX_BYTES = 64 * 1024,
	DEPTH_MAX = 1000,
	BLOCK = 128 * 1024,
};

struct export {
	int out;
	dev_t device;
	uint64_t *met; /* inodes with more than one name, open addressing, 0 free */
	size_t n_met, cap_met;
	size_t name_len;
	struct export_xattrs xattrs;
	char name[NAME_MAX_BYTES + 256];
	uint8_t block[BLOCK];
};

static int tree(struct export *e, int dir, unsigned depth);

static bool place_inode(uint64_t *table, size_t cap, uint64_t inode)
{
	size_t i = (size_t)(inode * 0x9e3779b97f4a7c15u) & (cap - 1);
	while (table[i] && table[i] != inode)
		i = (i + 1) & (cap - 1);
	bool met = table[i] == inode;
	table[i] = inode;
	return met;
}

/* 1: met before, 0: not, -1: no memory. */
static int meet(struct export *e, uint64_t inode)
{
	if (e->n_met * 2 >= e->cap_met) {
		size_t cap = e->cap_met ? e->cap_met * 2 : 1024;
		uint64_t *more = calloc(cap, sizeof *more);
		if (!more)
			return -1;
		for (size_t i = 0; i < e->cap_met; i++)
			if (e->met[i])
				(void)place_inode(more, cap, e->met[i]);
		free(e->met);
		e->met = more;
		e->cap_met = cap;
	}
	bool met = place_inode(e->met, e->cap_met, inode);
	e->n_met += !met;
	return met;
}

static int put(struct export *e, const void *data, size_t size)
{
	return size ? builtin_write_all(e->out, data, size) : 0;
}

static uint8_t kind_of(mode_t mode)
{
	switch (mode & S_IFMT) {
	case S_IFDIR: return 'd';
	case S_IFREG: return 'f';
	case S_IFLNK: return 'l';
	case S_IFIFO: return 'p';
	case S_IFSOCK: return 's';
	case S_IFCHR: return 'c';
	default: return 'b';
	}
}

static int put_head(struct export *e, const struct stat *st, size_t target_len, bool again)
{
	struct export_head head = {
		.kind = kind_of(st->st_mode), .again = again, .mode = st->st_mode & 07777,
		.uid = st->st_uid, .gid = st->st_gid,
		.name_len = (uint32_t)e->name_len, .xattrs_len = (uint32_t)e->xattrs.len,
		.target_len = (uint32_t)target_len,
		.links = st->st_nlink > UINT32_MAX ? UINT32_MAX : (uint32_t)st->st_nlink,
		.mtime_ns = (uint32_t)st->st_mtim.tv_nsec, .mtime_s = st->st_mtim.tv_sec,
		.inode = st->st_ino,
	};
	if (head.kind == 'c' || head.kind == 'b') {
		head.major = major(st->st_rdev);
		head.minor = minor(st->st_rdev);
	}
	if (head.kind == 'f')
		head.size = (uint64_t)st->st_size;
	int error = put(e, &head, sizeof head);
	if (!error)
		error = put(e, e->name, e->name_len);
	return error ? error : put(e, e->xattrs.bytes, e->xattrs.len);
}

static int put_stretch(struct export *e, int fd, off_t from, off_t to)
{
	uint64_t head[2] = {(uint64_t)from, (uint64_t)(to - from)};
	int error = put(e, head, sizeof head);
	while (!error && from < to) {
		size_t most = to - from < BLOCK ? (size_t)(to - from) : BLOCK;
		ssize_t n = pread(fd, e->block, most, from);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) /* it was cut meanwhile: the record cannot be kept */
			return n < 0 ? errno : ESTALE;
		error = put(e, e->block, (size_t)n);
		from += n;
	}
	return error;
}

static int put_content(struct export *e, int fd, off_t size)
{
	uint64_t last[2] = {(uint64_t)size, 0};
	int error = 0;
	for (off_t at = 0; at < size && !error;) {
		off_t from = lseek(fd, at, SEEK_DATA);
		if (from < 0 && errno == ENXIO)
			break;
		off_t to = from < 0 ? -1 : lseek(fd, from, SEEK_HOLE);
		if (to < 0)
			return errno;
		if (from >= size)
			break;
		to = to > size ? size : to;
		error = put_stretch(e, fd, from, to);
		at = to;
	}
	return error ? error : put(e, last, sizeof last);
}

static int file(struct export *e, int dir, const char *name, const struct stat *seen)
{
	struct stat st;
	int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOATIME);
	if (fd < 0)
		return errno;
	int error = fstat(fd, &st) < 0 ? errno : 0, met = 0;
	if (!error && (st.st_ino != seen->st_ino || !S_ISREG(st.st_mode)))
		error = ESTALE;
	if (!error)
		error = export_xattrs(&e->xattrs, fd, "", true);
	if (!error && st.st_nlink > 1)
		met = meet(e, st.st_ino);
	if (met < 0)
		error = ENOMEM;
	if (!error)
		error = put_head(e, &st, 0, met == 1);
	if (!error && met == 0)
		error = put_content(e, fd, st.st_size);
	close(fd);
	return error;
}

static int other(struct export *e, int dir, const char *name, const struct stat *st)
{
	static char target[64 * 1024];
	ssize_t n = S_ISLNK(st->st_mode) ? readlinkat(dir, name, target, sizeof target) : 0;
	if (n < 0)
		return errno;
	int error = export_xattrs(&e->xattrs, dir, name, false);
	if (!error)
		error = put_head(e, st, (size_t)n, false);
	return error ? error : put(e, target, (size_t)n);
}

static int entry(struct export *e, int dir, const char *name, unsigned depth)
{
	struct stat st;
	if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
		return errno;
	if (st.st_dev != e->device)
		return EXDEV;
	if (S_ISREG(st.st_mode))
		return file(e, dir, name, &st);
	if (!S_ISDIR(st.st_mode))
		return other(e, dir, name, &st);
	int below = builtin_open_below(dir, name);
	if (below < 0)
		return errno;
	int error = tree(e, below, depth + 1);
	close(below);
	return error;
}

/* The directory, then what it holds. A failure leaves `name` where it was. */
static int tree(struct export *e, int dir, unsigned depth)
{
	struct stat st;
	struct export_names names = {0};
	size_t own = e->name_len;
	if (depth > DEPTH_MAX)
		return ENAMETOOLONG;
	int error = fstat(dir, &st) < 0 ? errno : export_xattrs(&e->xattrs, dir, "", true);
	if (!error)
		error = put_head(e, &st, 0, false);
	if (!error)
		error = export_list(dir, &names);
	for (size_t i = 0; i < names.len && !error; i++) {
		size_t len = strlen(names.at[i]);
		if (own + 1 + len > NAME_MAX_BYTES) {
			error = ENAMETOOLONG;
			break;
		}
		if (own)
			e->name[own] = '/';
		memcpy(e->name + own + (own > 0), names.at[i], len);
		e->name_len = own + (own > 0) + len;
		error = entry(e, dir, names.at[i], depth);
		if (!error)
			e->name_len = own;
	}
	export_forget(&names);
	return error;
}

int export_tree(int dir, int fd)
{
	struct export_head last = {.kind = 'e'};
	struct stat st;
	struct export *e = calloc(1, sizeof *e);
	int error = dir < 0 ? errno : 0;
	if (!e)
		return ENOMEM;
	e->out = fd;
	if (!error && fstat(dir, &st) < 0)
		error = errno;
	if (!error) {
		e->device = st.st_dev;
		error = tree(e, dir, 0);
	}
	last.size = (uint64_t)error;
	last.name_len = (uint32_t)(error ? e->name_len : 0);
	int told = put(e, &last, sizeof last);
	if (!told)
		told = put(e, e->name, last.name_len);
	free(e->met);
	free(e);
	return error ? error : told;
}
