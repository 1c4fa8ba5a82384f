#define _GNU_SOURCE
#include "overlay.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define OPTIONS_MAX 4096 /* mount(2) takes one page of options */

int wf_fsopen(const char *fs, unsigned int flags)
{
	return (int)syscall(SYS_fsopen, fs, flags);
}

int wf_fsmount(int fs_fd, unsigned int flags, unsigned int attributes)
{
	return (int)syscall(SYS_fsmount, fs_fd, flags, attributes);
}

int wf_open_tree(int dir, const char *path, unsigned int flags)
{
	return (int)syscall(SYS_open_tree, dir, path, flags);
}

int wf_move_mount(int from_dir, const char *from, int to_dir, const char *to,
		  unsigned int flags)
{
	return (int)syscall(SYS_move_mount, from_dir, from, to_dir, to, flags);
}

int wf_mount_setattr(int dir, const char *path, unsigned int flags,
		     uint64_t set, uint64_t clear)
{
	struct mount_attr attributes = { .attr_set = set, .attr_clr = clear };

	return (int)syscall(SYS_mount_setattr, dir, path, flags, &attributes,
			    sizeof(attributes));
}

int wf_open_beneath(int dir, const char *path)
{
	struct open_how how = {
		.flags = O_PATH | O_CLOEXEC,
		.resolve = RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH,
	};

	while (*path == '/')
		path++;
	return (int)syscall(SYS_openat2, dir, *path ? path : ".", &how,
			    sizeof(how));
}

/* The kernel explains a refused option on the file system's descriptor. */
static void die_with_log(int fs_fd, const char *what)
{
	char text[512];
	int error = errno;
	ssize_t size = read(fs_fd, text, sizeof(text) - 1);

	text[size > 0 ? size : 0] = '\0';
	for (char *at = text; *at; at++)
		if (*at == '\n')
			*at = ' ';
	errno = error;
	die("overlay: %s%s%s", what, size > 0 ? ": " : "", text);
}

static void set_option(int fs_fd, const char *key, const char *value)
{
	unsigned int command = value ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG;

	if (syscall(SYS_fsconfig, fs_fd, command, key, value, 0) < 0)
		die_with_log(fs_fd, key);
}

static int mount_new_way(const struct plan *plan)
{
	int fs_fd = wf_fsopen("overlay", FSOPEN_CLOEXEC), mount_fd;
	int trusted = plan_is(plan, "form", "trusted");

	if (fs_fd < 0)
		die("overlay: fsopen");
	for (size_t i = 0; i < plan->n_layers; i++)
		set_option(fs_fd, "lowerdir+", plan->layers[i]);
	set_option(fs_fd, "upperdir", plan_get(plan, "upper", ""));
	set_option(fs_fd, "workdir", plan_get(plan, "work", ""));
	set_option(fs_fd, "index", "off");
	set_option(fs_fd, "metacopy", "off");
	set_option(fs_fd, "volatile", NULL);
	if (trusted)
		set_option(fs_fd, "redirect_dir", "on");
	else
		set_option(fs_fd, "userxattr", NULL);
	if (syscall(SYS_fsconfig, fs_fd, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
		die_with_log(fs_fd, "mounting");
	mount_fd = wf_fsmount(fs_fd, FSMOUNT_CLOEXEC, MOUNT_ATTR_NODEV);
	if (mount_fd < 0)
		die("overlay: fsmount");
	close(fs_fd);
	return mount_fd;
}

/* Lower directories get short relative names, so that many fit in one page of
 * options: links "0", "1", ... in scratch/lower. */
static void link_layers(const struct plan *plan, const char *scratch)
{
	if (chdir(scratch) < 0)
		die("overlay: chdir %s", scratch);
	if (mkdir("lower", 0700) < 0 && errno != EEXIST)
		die("overlay: mkdir %s/lower", scratch);
	if (chdir("lower") < 0)
		die("overlay: chdir %s/lower", scratch);
	for (size_t i = 0; i < plan->n_layers; i++) {
		char name[16];

		snprintf(name, sizeof(name), "%zu", i);
		if (unlink(name) < 0 && errno != ENOENT)
			die("overlay: unlink %s/lower/%s", scratch, name);
		if (symlink(plan->layers[i], name) < 0)
			die("overlay: symlink %s/lower/%s", scratch, name);
	}
}

static int mount_legacy_way(const struct plan *plan)
{
	const char *scratch = plan_get(plan, "scratch", "");
	char options[OPTIONS_MAX];
	size_t used = 0;
	int mount_fd;

	link_layers(plan, scratch);
	for (size_t i = 0; i < plan->n_layers; i++) {
		if (used > sizeof(options) - 32) {
			errno = E2BIG;
			die("overlay: %zu layers do not fit in one page of "
			    "mount options", plan->n_layers);
		}
		used += (size_t)snprintf(options + used, sizeof(options) - used,
					 "%s%zu", i ? ":" : "lowerdir=", i);
	}
	used += (size_t)snprintf(
		options + used, sizeof(options) - used,
		",upperdir=%s,workdir=%s,index=off,metacopy=off,volatile,%s",
		plan_get(plan, "upper", ""), plan_get(plan, "work", ""),
		plan_is(plan, "form", "trusted") ? "redirect_dir=on" :
						   "userxattr");
	if (used >= sizeof(options)) {
		errno = E2BIG;
		die("overlay: the mount options take more than one page");
	}
	if (mount("overlay", scratch, "overlay", MS_NODEV, options) < 0)
		die("overlay: mount(2) on %s", scratch);
	mount_fd = wf_open_tree(AT_FDCWD, scratch,
				OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
	if (mount_fd < 0)
		die("overlay: open_tree %s", scratch);
	if (chdir("/") < 0 || umount2(scratch, 0) < 0)
		die("overlay: umount %s", scratch);
	return mount_fd;
}

int overlay_mount(const struct plan *plan)
{
	if (plan->n_layers == 0) {
		errno = EINVAL;
		die("overlay: no layer");
	}
	return plan_is(plan, "overlay", "legacy") ? mount_legacy_way(plan) :
						    mount_new_way(plan);
}
