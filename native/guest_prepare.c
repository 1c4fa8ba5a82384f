/* PREPARE: the file systems of a guest, as the host tells them. */
#define _GNU_SOURCE
#include "guest.h"
#include "guest_body.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

enum { DEVICE_TRIES = 500, MOUNT_FIELDS = 5 };

static int await_device(const char *path)
{
	const struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
	struct stat st;
	for (int tries = 0; strncmp(path, "/dev/", 5) == 0 && stat(path, &st) < 0; tries++) {
		if (errno != ENOENT || tries == DEVICE_TRIES)
			return errno;
		nanosleep(&pause, NULL);
	}
	return 0;
}

static int mount_flags(char *words, unsigned long *flags)
{
	static const struct {
		const char *word;
		unsigned long flag;
	} known[] = {{"ro", MS_RDONLY},	  {"nosuid", MS_NOSUID},   {"nodev", MS_NODEV},
		     {"noexec", MS_NOEXEC}, {"noatime", MS_NOATIME}};
	char *rest = NULL;
	*flags = 0;
	for (char *word = strtok_r(words, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
		size_t i = 0, n = sizeof known / sizeof *known;
		while (i < n && strcmp(known[i].word, word) != 0)
			i++;
		if (i == n)
			return EINVAL;
		*flags |= known[i].flag;
	}
	return 0;
}

/* SOURCE\tTARGET\tTYPE\tWORDS\tDATA */
static int do_mount(char *value)
{
	char *field[MOUNT_FIELDS];
	unsigned long flags;
	if (!body_fields(value, field, MOUNT_FIELDS))
		return EINVAL;
	int error = mount_flags(field[3], &flags);
	if (!error)
		error = await_device(field[0]);
	if (error)
		return error;
	return mount(field[0], field[1], field[2], flags, *field[4] ? field[4] : NULL) < 0 ? errno : 0;
}

static int do_write(const char *path, const char *text)
{
	size_t size = strlen(text);
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	if (fd < 0)
		return errno;
	errno = EIO;
	int error = write(fd, text, size) == (ssize_t)size ? 0 : errno;
	if (close(fd) < 0 && !error)
		error = errno;
	return error;
}

static bool is_own(const char *name)
{
	static const char *const others[] = {"trusted.overlay.", "user.overlay.", "security."};
	for (size_t i = 0; i < sizeof others / sizeof *others; i++)
		if (strncmp(name, others[i], strlen(others[i])) == 0)
			return false;
	return true;
}

static int copy_attributes(int from, int to)
{
	static char names[64 * 1024], value[64 * 1024];
	ssize_t n = flistxattr(from, names, sizeof names);
	if (n < 0)
		return errno == ENOTSUP ? 0 : errno;
	for (ssize_t at = 0; at < n; at += (ssize_t)strlen(names + at) + 1) {
		ssize_t size = is_own(names + at) ? fgetxattr(from, names + at, value, sizeof value) : -1;
		if (size < 0 && is_own(names + at))
			return errno;
		if (size >= 0 && fsetxattr(to, names + at, value, (size_t)size, 0) < 0)
			return errno;
	}
	return 0;
}

/* What a directory looks like from outside, without what a mount of overlayfs
 * or the kernel itself has noted on it. */
static int do_like(const char *source, const char *target)
{
	const int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
	struct stat st;
	int from = open(source, flags), to = from < 0 ? -1 : open(target, flags);
	int error = to < 0 || fstat(from, &st) < 0 || fchown(to, st.st_uid, st.st_gid) < 0 ||
				    fchmod(to, st.st_mode & 07777) < 0 ?
			    errno :
			    copy_attributes(from, to);
	const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, error ? (struct timespec){0} : st.st_mtim};
	if (!error && futimens(to, times) < 0)
		error = errno;
	if (from >= 0)
		close(from);
	if (to >= 0)
		close(to);
	return error;
}

static int do_item(const char *key, char *value)
{
	char *field[2];
	if (strcmp(key, "mkdir") == 0)
		return mkdir(value, 0755) < 0 && errno != EEXIST ? errno : 0;
	if (strcmp(key, "mount") == 0)
		return do_mount(value);
	if (strcmp(key, "umount") == 0)
		return umount2(value, UMOUNT_NOFOLLOW) < 0 ? errno : 0;
	if (strcmp(key, "drop") == 0)
		return do_write("/proc/sys/vm/drop_caches", "3");
	if (strcmp(key, "address") == 0)
		return guest_address(value);
	if (strcmp(key, "like") == 0)
		return body_fields(value, field, 2) ? do_like(field[0], field[1]) : EINVAL;
	if (strcmp(key, "write") == 0)
		return body_fields(value, field, 2) ? do_write(field[0], field[1]) : EINVAL;
	return EINVAL;
}

int guest_prepare(char *text, size_t size, const char **failed)
{
	char *key, *value;
	int error = 0;
	if (!size || !body_are_items(text, size))
		return EINVAL;
	for (size_t at = 0; !error && body_next(text, size, &at, &key, &value);) {
		error = do_item(key, value);
		body_join(value); /* what an error names, up to its first tab */
		*failed = key;
	}
	return error;
}
