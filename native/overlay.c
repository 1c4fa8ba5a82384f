#define _GNU_SOURCE
#include "overlay.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define OPTIONS_MAX 4096 /* mount(2) takes one page of options */

struct stack {
	const char *const *layers;
	size_t count;
	const char *upper, *work; /* NULL: read-only */
};

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

/* A guest's sandbox has the form of root, and reads and writes the marks of
 * the user whose layers it stands on: marks=user. */
static int marks_are_trusted(const struct plan *plan)
{
	return plan_is(plan, "form", "trusted") && !plan_is(plan, "marks", "user");
}

static int mount_new_way(const struct plan *plan, const struct stack *stack)
{
	int fs_fd = wf_fsopen("overlay", FSOPEN_CLOEXEC), mount_fd;
	unsigned int attributes = MOUNT_ATTR_NODEV;

	if (fs_fd < 0)
		die("overlay: fsopen");
	for (size_t i = 0; i < stack->count; i++)
		set_option(fs_fd, "lowerdir+", stack->layers[i]);
	if (stack->upper) {
		set_option(fs_fd, "upperdir", stack->upper);
		set_option(fs_fd, "workdir", stack->work);
		set_option(fs_fd, "volatile", NULL);
	} else {
		attributes |= MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID;
	}
	set_option(fs_fd, "index", "off");
	set_option(fs_fd, "metacopy", "off");
	if (marks_are_trusted(plan))
		set_option(fs_fd, "redirect_dir", stack->upper ? "on" : "follow");
	else
		set_option(fs_fd, "userxattr", NULL);
	if (syscall(SYS_fsconfig, fs_fd, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
		die_with_log(fs_fd, "mounting");
	mount_fd = wf_fsmount(fs_fd, FSMOUNT_CLOEXEC, attributes);
	if (mount_fd < 0)
		die("overlay: fsmount");
	close(fs_fd);
	return mount_fd;
}

/* Lower directories get short relative names, so that many fit in one page of
 * options: links "0", "1", ... in scratch/lower. */
static void link_layers(const struct stack *stack, const char *scratch)
{
	if (chdir(scratch) < 0)
		die("overlay: chdir %s", scratch);
	if (mkdir("lower", 0700) < 0 && errno != EEXIST)
		die("overlay: mkdir %s/lower", scratch);
	if (chdir("lower") < 0)
		die("overlay: chdir %s/lower", scratch);
	for (size_t i = 0; i < stack->count; i++) {
		char name[24];

		snprintf(name, sizeof(name), "%zu", i);
		if (unlink(name) < 0 && errno != ENOENT)
			die("overlay: unlink %s/lower/%s", scratch, name);
		if (symlink(stack->layers[i], name) < 0)
			die("overlay: symlink %s/lower/%s", scratch, name);
	}
}

/* Appends to the options; dies where they would take more than a page. */
static size_t append(char *options, size_t used, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

static size_t append(char *options, size_t used, const char *format, ...)
{
	va_list args;
	int written;

	va_start(args, format);
	written = vsnprintf(options + used, OPTIONS_MAX - used, format, args);
	va_end(args);
	if (written < 0 || (size_t)written >= OPTIONS_MAX - used) {
		errno = E2BIG;
		die("overlay: layers and directories do not fit in one page of "
		    "mount options");
	}
	return used + (size_t)written;
}

static int mount_legacy_way(const struct plan *plan, const struct stack *stack)
{
	const char *scratch = plan_get(plan, "scratch", "");
	int trusted = marks_are_trusted(plan);
	unsigned long flags = MS_NODEV;
	char options[OPTIONS_MAX];
	size_t used = 0;
	int mount_fd;

	link_layers(stack, scratch);
	for (size_t i = 0; i < stack->count; i++)
		used = append(options, used, "%s%zu", i ? ":" : "lowerdir=", i);
	if (stack->upper)
		used = append(options, used, ",upperdir=%s,workdir=%s,volatile",
			      stack->upper, stack->work);
	else
		flags |= MS_RDONLY | MS_NOSUID;
	append(options, used, ",index=off,metacopy=off,%s",
	       !trusted	      ? "userxattr" :
	       stack->upper ? "redirect_dir=on" :
				"redirect_dir=follow");
	if (mount("overlay", scratch, "overlay", flags, options) < 0)
		die("overlay: mount(2) on %s", scratch);
	mount_fd = wf_open_tree(AT_FDCWD, scratch,
				OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
	if (mount_fd < 0)
		die("overlay: open_tree %s", scratch);
	if (chdir("/") < 0 || umount2(scratch, 0) < 0)
		die("overlay: umount %s", scratch);
	return mount_fd;
}

static int mount_stack(const struct plan *plan, const struct stack *stack)
{
	if (stack->count == 0) {
		errno = EINVAL;
		die("overlay: no layer");
	}
	return plan_is(plan, "overlay", "legacy") ?
		       mount_legacy_way(plan, stack) :
		       mount_new_way(plan, stack);
}

int overlay_mount(const struct plan *plan)
{
	const struct stack stack = {
		.layers = plan->layers, .count = plan->n_layers,
		.upper = plan_get(plan, "upper", ""),
		.work = plan_get(plan, "work", ""),
	};

	return mount_stack(plan, &stack);
}

int overlay_show(const struct plan *plan, const struct plan_mount *mount)
{
	const struct stack stack = {
		.layers = plan->shown + mount->first, .count = mount->count,
	};

	return mount_stack(plan, &stack);
}
