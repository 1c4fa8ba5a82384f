/* LOOK: what a later RESUME needs of the sandbox is looked for while there is
 * time. Every fork begins with nothing translated or cached, and would have to
 * find it anew. */
#define _GNU_SOURCE
#include "guest.h"
#include "guest_body.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SEEN_MAX = 16 };

static struct seen seen[SEEN_MAX];
static size_t n_seen;

struct seen *guest_seen(const char *path)
{
	for (size_t i = 0; i < n_seen; i++)
		if (strcmp(seen[i].path, path) == 0)
			return &seen[i];
	return NULL;
}

void guest_unsee(void)
{
	while (n_seen) {
		struct seen *last = &seen[--n_seen];
		if (last->fd >= 0)
			close(last->fd);
		free(last->path);
	}
}

/* An `fd` of -1: there is no such thing. */
static int remember(const char *path, int fd)
{
	struct stat st = {0};
	int high = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, GUEST_PARKED);
	int error = fd >= 0 && (high < 0 || fstat(high, &st) < 0) ? errno : 0;
	char *copy = error ? NULL : strdup(path);
	if (!copy || n_seen == SEEN_MAX) {
		free(copy);
		if (high >= 0)
			close(high);
		return error ? error : ENOMEM;
	}
	seen[n_seen++] = (struct seen){.path = copy, .fd = high, .size = (size_t)st.st_size};
	return 0;
}

static int do_item(const char *key, const char *value)
{
	int error, fd = -1;
	if (guest_seen(value))
		return 0;
	if (strcmp(key, "idfile") == 0)
		fd = guest_open_identity(value);
	else if (strcmp(key, "program") != 0)
		return EINVAL;
	else if (guest_is_program(value))
		return 0; /* there may be another one by then */
	if (fd < 0 && errno != ENOENT && strcmp(key, "idfile") == 0)
		return errno;
	error = remember(value, fd);
	if (fd >= 0)
		close(fd);
	return error;
}

/* For good: PID 1 needs no name of its own. */
static int stay_in_uts(void)
{
	int low = guest.in_uts ? -1 : openat(guest.proc_fd, "self/ns/uts", O_RDONLY | O_CLOEXEC);
	int high = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, GUEST_PARKED);
	int error = guest.in_uts || high >= 0 ? 0 : errno;
	if (low >= 0)
		close(low);
	if (high >= 0) {
		close(guest.uts_fd);
		guest.uts_fd = high;
		guest.in_uts = true;
	}
	return error;
}

static int look(char *text, size_t size, const char **failed)
{
	char *key, *value;
	guest_unsee();
	int error = guest_open_random() < 0 ? errno : guest_enter(CLONE_NEWUTS | CLONE_NEWNS);
	if (error)
		return error;
	error = stay_in_uts();
	for (size_t at = 0; !error && body_next(text, size, &at, &key, &value);) {
		error = do_item(key, value);
		body_join(value);
		*failed = key;
	}
	guest_leave(CLONE_NEWUTS | CLONE_NEWNS);
	if (error)
		guest_unsee();
	else
		guest_connect_ahead();
	return error;
}

void guest_look(uint32_t tag, const uint8_t *body, size_t size)
{
	static char text[MUX_PAYLOAD];
	const char *failed = "";
	memcpy(text, body, size);
	int error = body_are_items(text, size) ? look(text, size, &failed) : EINVAL;
	guest_answer(OP_LOOK, tag, error, failed, error ? strlen(failed) : 0);
}
