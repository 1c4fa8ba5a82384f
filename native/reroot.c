/* Moves a live sandbox onto a new root: the upper that it wrote has become a
 * layer, and a fresh upper lies over it. Nothing but PID 1 runs inside, and
 * pivot_root(2) moves its root and working directory along. */
#define _GNU_SOURCE
#include "faces.h"
#include "overlay.h"
#include "plan.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FRAME_REPLY 107
#define USER_FD 4
#define MOUNT_FD 5
#define MAX_SPECIAL 64
#define MOUNTINFO_MAX (1u << 20)
#define POINT_MAX 4096 /* a policy may move what mounts lie in */

struct special {
	char path[POINT_MAX];
	int fd;
};

struct specials {
	struct special at[MAX_SPECIAL];
	size_t count;
};

static char *read_all(int fd)
{
	char *text = malloc(MOUNTINFO_MAX);
	size_t used = 0;

	if (!text)
		die("reroot: memory for mountinfo");
	for (;;) {
		ssize_t got = read(fd, text + used, MOUNTINFO_MAX - 1 - used);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			die("reroot: reading mountinfo");
		if (got == 0)
			break;
		used += (size_t)got;
	}
	/* An open mountinfo keeps the root that it was opened under busy. */
	close(fd);
	text[used] = '\0';
	return text;
}

/* mountinfo writes space, tab, newline and backslash as \ooo. */
static void unescape(char *text)
{
	char *to = text;

	for (char *at = text; *at; at++) {
		if (at[0] == '\\' && at[1] && at[2] && at[3]) {
			*to++ = (char)((at[1] - '0') << 6 | (at[2] - '0') << 3 |
				       (at[3] - '0'));
			at += 3;
		} else {
			*to++ = *at;
		}
	}
	*to = '\0';
}

static int parse_line(const char *line, int *id, int *parent, char path[POINT_MAX])
{
	if (sscanf(line, "%d %d %*s %*s %4095s", id, parent, path) != 3)
		return -1;
	unescape(path);
	return 0;
}

static int root_mount_id(char *text)
{
	char path[POINT_MAX], *line = text;
	int id, parent, found = -1;

	while (line && *line) {
		if (parse_line(line, &id, &parent, path) == 0 &&
		    strcmp(path, "/") == 0)
			found = id;
		line = strchr(line, '\n');
		line = line ? line + 1 : NULL;
	}
	if (found < 0) {
		errno = EINVAL;
		die("reroot: no root mount");
	}
	return found;
}

/* Every mount that sits directly on the root goes along with its subtree. */
static void collect(struct specials *list, int mountinfo)
{
	char *text = read_all(mountinfo), *line = text;
	int root = root_mount_id(text), id, parent;
	char path[POINT_MAX];

	list->count = 0;
	while (line && *line) {
		if (parse_line(line, &id, &parent, path) == 0 &&
		    parent == root && id != root) {
			struct special *one = &list->at[list->count];

			if (list->count == MAX_SPECIAL) {
				errno = E2BIG;
				die("reroot: more than %d mounts", MAX_SPECIAL);
			}
			memcpy(one->path, path, sizeof(one->path));
			one->fd = wf_open_tree(AT_FDCWD, path, OPEN_TREE_CLOEXEC);
			if (one->fd < 0) {
				errno = EBUSY; /* then it is copied instead */
				die("reroot: a mount at %.200s...", path);
			}
			list->count++;
		}
		line = strchr(line, '\n');
		line = line ? line + 1 : NULL;
	}
	free(text);
}

/* Shortens the list to those that were moved when one cannot be. */
static int move_specials(struct specials *list, int root_fd, char *failed,
			 size_t size)
{
	for (size_t i = 0; i < list->count; i++) {
		const struct special *one = &list->at[i];
		int target = wf_open_beneath(root_fd, one->path), moved;

		moved = target < 0 ? -1 :
				     wf_move_mount(one->fd, "", target, "",
						   MOVE_MOUNT_F_EMPTY_PATH |
							   MOVE_MOUNT_T_EMPTY_PATH);
		if (moved < 0) {
			int error = errno;

			snprintf(failed, size, "moving %s", one->path);
			if (target >= 0)
				close(target);
			list->count = i;
			errno = error;
			return -1;
		}
		close(target);
	}
	return 0;
}

static int pivot_onto(int root_fd)
{
	if (fchdir(root_fd) < 0 || syscall(SYS_pivot_root, ".", ".") < 0)
		return -1;
	return 0;
}

/* Puts everything back onto the old root after a failure at `step`. */
static void undo(struct specials *list, int old_fd, int new_fd,
		 int pivoted, const char *step)
{
	int error = errno;
	char failed[300] = "";

	if (move_specials(list, old_fd, failed, sizeof(failed)) < 0)
		die("reroot: lost: %s, after %s", failed, step);
	if (pivoted && pivot_onto(old_fd) < 0)
		die("reroot: lost: pivoting back, after %s", step);
	if (!pivoted && fchdir(old_fd) < 0)
		die("reroot: lost: chdir, after %s", step);
	close(new_fd);
	if (umount2(".", 0) < 0)
		die("reroot: lost: unmounting the new root, after %s", step);
	errno = error;
	die("reroot: %s", step);
}

static void swap_roots(int new_fd, int mountinfo)
{
	static struct specials list;
	char failed[300] = "";
	int old_fd = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);

	if (old_fd < 0)
		die("reroot: opening the root");
	collect(&list, mountinfo);
	if (wf_move_mount(new_fd, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) < 0)
		die("reroot: attaching the new root");
	if (move_specials(&list, new_fd, failed, sizeof(failed)) < 0) {
		errno = EBUSY; /* a file that was removed inside: copied then */
		undo(&list, old_fd, new_fd, 0, failed);
	}
	if (pivot_onto(new_fd) < 0)
		undo(&list, old_fd, new_fd, 0, "pivot_root");
	close(old_fd);
	/* Never lazily: that it can be unmounted proves that no writer is
	 * left on the upper that is now a layer. */
	if (umount2(".", 0) < 0) {
		int error = errno;

		/* "/.." climbs onto what is stacked on the root. */
		old_fd = open("/..", O_PATH | O_DIRECTORY | O_CLOEXEC);
		errno = error;
		undo(&list, old_fd, new_fd, 1, "unmounting the old root");
	}
}

/* Says which upper the sandbox stands on: the last part of its path, which
 * holds no character that mountinfo would write otherwise. */
static void tell_upper(int mountinfo)
{
	char *text = read_all(mountinfo), *line = text, *upper = NULL;
	char path[POINT_MAX];
	int id, parent;

	while (line && *line) {
		char *end = strchr(line, '\n');

		if (end)
			*end = '\0';
		if (parse_line(line, &id, &parent, path) == 0 &&
		    strcmp(path, "/") == 0)
			upper = strstr(line, ",upperdir=");
		line = end ? end + 1 : NULL;
	}
	if (!upper) {
		errno = EINVAL;
		die("reroot: the root is no overlay");
	}
	upper += strlen(",upperdir=");
	upper[strcspn(upper, ", ")] = '\0';
	if (strrchr(upper, '/'))
		upper = strrchr(upper, '/') + 1;
	report(FRAME_REPLY, upper, strlen(upper));
	free(text);
}

int reroot_main(void)
{
	struct plan plan;
	int new_fd, old_clone, process, mountinfo, look;

	plan_read(&plan);
	process = open("/proc/self", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (process < 0)
		die("reroot: /proc/self");
	if (plan_is(&plan, "form", "user") && setns(USER_FD, CLONE_NEWUSER) < 0)
		die("reroot: joining the user namespace");
	if (unshare(CLONE_NEWNS) < 0)
		die("reroot: a mount namespace of its own");
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		die("reroot: making mounts private");
	look = plan_is(&plan, "look", "1");
	new_fd = look ? -1 : overlay_mount(&plan);
	if (setns(MOUNT_FD, CLONE_NEWNS) < 0)
		die("reroot: joining the mount namespace");
	mountinfo = openat(process, "mountinfo", O_RDONLY | O_CLOEXEC);
	if (mountinfo < 0)
		die("reroot: opening mountinfo");
	if (look) {
		tell_upper(mountinfo);
		return 0;
	}
	old_clone = wf_open_tree(AT_FDCWD, "/",
				 OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
	if (old_clone < 0)
		die("reroot: keeping the old root");
	swap_roots(new_fd, mountinfo);
	report(FRAME_REPLY, NULL, 0);
	/* The last reference to the old overlay goes with this process, after
	 * the caller has had its answer: dropping its caches takes time. */
	return 0;
}
