/* Where a sandbox is put: its cgroups and its sockets. */
#define _GNU_SOURCE
#include "place.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

void place_write(int dir, const char *path, const char *text)
{
	int fd = openat(dir, path, O_WRONLY | O_CLOEXEC);
	ssize_t size = (ssize_t)strlen(text);

	if (fd < 0)
		die("opening %s", path);
	if (write(fd, text, (size_t)size) != size)
		die("writing '%s' to %s", text, path);
	close(fd);
}

static int open_in(const char *dir, const char *name, int flags)
{
	char path[4096];
	int fd;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	fd = open(path, flags | O_CLOEXEC);
	if (fd < 0)
		die("opening %s", path);
	return fd;
}

/* Splits "name\tvalue" at the tab. */
static const char *split(const char *item, char *name, size_t size)
{
	const char *tab = strchr(item, '\t');

	if (!tab || (size_t)(tab - item) >= size) {
		errno = EINVAL;
		die("a plan value without a name: %.64s", item);
	}
	memcpy(name, item, (size_t)(tab - item));
	name[tab - item] = '\0';
	return tab + 1;
}

static void set_knob(const char *dir, const char *item)
{
	char name[128], path[4096];

	item = split(item, name, sizeof(name));
	snprintf(path, sizeof(path), "%s/%s", dir, name);
	place_write(AT_FDCWD, path, item);
}

void place_cgroups(const struct plan *plan, struct wf_init_config *c)
{
	const char *dir = NULL;

	for (size_t i = 0; i < plan->n_items; i++) {
		const char *key = plan->items[i].key;
		const char *value = plan->items[i].value;

		if (strcmp(key, "cgdir") == 0) {
			dir = value;
			if (mkdir(dir, 0755) < 0)
				die("making the cgroup %s", dir);
		} else if (strncmp(key, "cg", 2) == 0 && !dir) {
			errno = EINVAL;
			die("%s before any cgdir", key);
		} else if (strcmp(key, "cgset") == 0) {
			set_knob(dir, value);
		} else if (strcmp(key, "cgjoin") == 0) {
			if (c->n_join == 8) {
				errno = E2BIG;
				die("more than 8 cgroups");
			}
			c->join_fds[c->n_join++] = open_in(dir, value, O_WRONLY);
		} else if (strcmp(key, "cgfreeze") == 0) {
			c->freeze_kind = 1;
			c->freeze_fd = open_in(dir, value, O_RDWR);
			c->freeze_state_fd = c->freeze_fd;
		} else if (strcmp(key, "cgfreeze2") == 0) {
			c->freeze_kind = 2;
			c->freeze_fd = open_in(dir, "cgroup.freeze", O_RDWR);
			c->freeze_state_fd =
				open_in(dir, "cgroup.events", O_RDONLY);
		} else if (strcmp(key, "cgoom") == 0) {
			c->oom_fd = open_in(dir, value, O_RDONLY);
		}
	}
}

int place_listen(const char *name)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (fd < 0)
		die("making the socket");
	snprintf(address.sun_path, sizeof(address.sun_path), "%s", name);
	if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
		die("binding %s", name);
	if (listen(fd, 64) < 0)
		die("listening on %s", name);
	return fd;
}
