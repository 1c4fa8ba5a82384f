/* Names and extended attributes, in an order of their own: that of a file
 * system would make two exports of one tree differ. */
#define _GNU_SOURCE
#include "export.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { XATTR_VALUE_MAX = 64 * 1024 };

static int by_bytes(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

void export_forget(struct export_names *names)
{
	for (size_t i = 0; i < names->len; i++)
		free(names->at[i]);
	free(names->at);
}

static int add_name(struct export_names *names, const char *name)
{
	if (names->len == names->cap) {
		size_t cap = names->cap ? names->cap * 2 : 64;
		char **more = realloc(names->at, cap * sizeof *more);
		if (!more)
			return ENOMEM;
		names->at = more;
		names->cap = cap;
	}
	names->at[names->len] = strdup(name);
	return names->at[names->len] ? (names->len++, 0) : ENOMEM;
}

int export_list(int dir, struct export_names *names)
{
	int copy = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), error = 0;
	DIR *stream = copy < 0 ? NULL : fdopendir(copy);
	struct dirent *entry;
	if (!stream) {
		error = errno;
		if (copy >= 0)
			close(copy);
		return error;
	}
	while (!error && (errno = 0, entry = readdir(stream)))
		if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
			error = add_name(names, entry->d_name);
	if (!error)
		error = errno;
	closedir(stream);
	if (!error && names->len)
		qsort(names->at, names->len, sizeof *names->at, by_bytes);
	return error;
}

static int add_xattr(struct export_xattrs *to, const char *path, const char *name, bool through_fd)
{
	static uint8_t value[XATTR_VALUE_MAX];
	ssize_t n = through_fd ? getxattr(path, name, value, sizeof value) :
				 lgetxattr(path, name, value, sizeof value);
	uint16_t name_len = (uint16_t)strlen(name);
	if (n < 0)
		return errno;
	uint32_t value_len = (uint32_t)n;
	if (to->len + 6 + name_len + value_len > sizeof to->bytes)
		return E2BIG;
	uint8_t *at = to->bytes + to->len;
	memcpy(at, &name_len, 2);
	memcpy(at + 2, &value_len, 4);
	memcpy(at + 6, name, name_len);
	memcpy(at + 6 + name_len, value, value_len);
	to->len += 6u + name_len + value_len;
	return 0;
}

/* Reached through /proc/self/fd: links and special files cannot be opened. */
int export_xattrs(struct export_xattrs *to, int fd, const char *name, bool itself)
{
	static char listed[64 * 1024];
	char path[64 + 256];
	struct export_names names = {0};
	int error = 0;
	to->len = 0;
	if (itself)
		snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	else
		snprintf(path, sizeof path, "/proc/self/fd/%d/%s", fd, name);
	ssize_t n = itself ? listxattr(path, listed, sizeof listed) : llistxattr(path, listed, sizeof listed);
	if (n < 0)
		return errno == ENOTSUP ? 0 : errno;
	for (ssize_t at = 0; at < n && !error; at += (ssize_t)strlen(listed + at) + 1)
		error = add_name(&names, listed + at);
	if (!error && names.len)
		qsort(names.at, names.len, sizeof *names.at, by_bytes);
	for (size_t i = 0; i < names.len && !error; i++)
		error = add_xattr(to, path, names.at[i], itself);
	export_forget(&names);
	return error;
}
