#define _GNU_SOURCE
#include "furnish.h"
#include "overlay.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define IDENTITY_DIR "/dev/.worldfork"

static const struct {
	const char *name;
	unsigned int major, minor;
} devices[] = {
	{ "null", 1, 3 },   { "zero", 1, 5 },	 { "full", 1, 7 },
	{ "random", 1, 8 }, { "urandom", 1, 9 }, { "tty", 5, 0 },
};
#define N_DEVICES (sizeof(devices) / sizeof(devices[0]))

/* bind=SOURCE\tTARGET: read-only, with what is mounted below it. */
static int clone_source(const char *item)
{
	char source[PATH_MAX];
	const char *tab = strchr(item, '\t');
	int fd;

	if (!tab || (size_t)(tab - item) >= sizeof(source)) {
		errno = EINVAL;
		die("a bind without a target: %.64s", item);
	}
	memcpy(source, item, (size_t)(tab - item));
	source[tab - item] = '\0';
	fd = wf_open_tree(AT_FDCWD, source,
			  OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
	if (fd < 0)
		die("bind: %s", source);
	if (wf_mount_setattr(fd, "", AT_EMPTY_PATH | AT_RECURSIVE,
			     MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV |
				     MOUNT_ATTR_NOSUID, 0) < 0)
		die("bind: making %s read-only", source);
	return fd;
}

/* A detached copy of a directory of a snapshot. Only what is attached can be
 * copied from on every kernel, so its whole is attached for a moment. */
static int clone_shown(const struct plan *plan, const struct plan_mount *mount)
{
	const char *point = plan_get(plan, "root", ""), *path;
	int top = overlay_show(plan, mount), inside, fd;

	path = strchr(mount->value, '\t');
	if (!path) {
		errno = EINVAL;
		die("a mount without a path: %.64s", mount->value);
	}
	path += strspn(path, "\t/");
	if (!*path)
		return top;
	if (wf_move_mount(top, "", AT_FDCWD, point, MOVE_MOUNT_F_EMPTY_PATH) < 0)
		die("show: attaching at %s", point);
	inside = wf_open_beneath(top, path);
	if (inside < 0)
		die("show: /%s in the snapshot", path);
	fd = wf_open_tree(inside, "",
			  OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH);
	if (fd < 0)
		die("show: copying /%s", path);
	close(inside);
	close(top);
	if (umount2(point, 0) < 0)
		die("show: detaching from %s", point);
	return fd;
}

void furniture_open(const struct plan *plan, struct furniture *furniture)
{
	int user = plan_is(plan, "form", "user");

	for (size_t i = 0; i < plan->n_mounts; i++)
		furniture->shown[i] = clone_shown(plan, &plan->mounts[i]);
	for (size_t i = 0; i < plan->n_items; i++) {
		furniture->fds[i] = -1;
		if (strcmp(plan->items[i].key, "bind") == 0)
			furniture->fds[i] = clone_source(plan->items[i].value);
	}
	for (size_t i = 0; i < N_DEVICES; i++) {
		char path[32];

		furniture->devices[i] = -1;
		if (!user)
			continue;
		snprintf(path, sizeof(path), "/dev/%s", devices[i].name);
		furniture->devices[i] = wf_open_tree(
			AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
		if (furniture->devices[i] < 0)
			die("bind: %s", path);
		/* Devices can be written to on a read-only mount, but their mode
		 * and times, which are the host's, cannot be changed. */
		if (wf_mount_setattr(furniture->devices[i], "", AT_EMPTY_PATH,
				     MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID |
					     MOUNT_ATTR_NOEXEC, 0) < 0)
			die("bind: making %s read-only", path);
	}
}

/* Makes what is missing of a directory's path, and opens it. */
static int make_beneath(int root, const char *path)
{
	char name[NAME_MAX + 1];
	int dir = wf_open_beneath(root, "."), below = -1, error;
	size_t length;

	while (dir >= 0) {
		path += strspn(path, "/");
		length = strcspn(path, "/");
		if (length == 0)
			return dir;
		if (length > NAME_MAX) {
			close(dir);
			errno = ENAMETOOLONG;
			return -1;
		}
		memcpy(name, path, length);
		name[length] = '\0';
		path += length;
		below = mkdirat(dir, name, 0755) < 0 && errno != EEXIST ?
				-1 : wf_open_beneath(dir, name);
		error = errno;
		close(dir);
		errno = error;
		dir = below;
	}
	return -1;
}

/* Mounts on a path of the world, which must be no link; `need` tells whether
 * its absence is a failure. */
static int enter_point(const char *path, int need)
{
	int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC), fd;

	if (root < 0)
		die("opening the root");
	fd = wf_open_beneath(root, path);
	if (fd < 0 && errno == ENOENT && need)
		fd = make_beneath(root, path);
	close(root);
	if (fd < 0 && need)
		die("mount point: %s", path);
	return fd;
}

static void mount_at(const char *path, const char *fs, unsigned long flags,
		     const char *options)
{
	int fd = enter_point(path, 1);

	if (fchdir(fd) < 0)
		die("mount point: %s", path);
	if (mount(fs, ".", fs, flags, options) < 0)
		die("mounting %s on %s", fs, path);
	if (chdir("/") < 0)
		die("chdir /");
	close(fd);
}

static void put_file(const char *path, const char *text, mode_t mode)
{
	size_t size = strlen(text);
	int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
		      mode);

	if (fd < 0)
		die("creating %s", path);
	if (size && write(fd, text, size) != (ssize_t)size)
		die("writing %s", path);
	if (fchmod(fd, mode) < 0)
		die("chmod %s", path);
	close(fd);
}

static void put_device(size_t which, int source)
{
	char path[32];

	snprintf(path, sizeof(path), "/dev/%s", devices[which].name);
	if (source < 0) {
		if (mknod(path, S_IFCHR | 0666,
			  makedev(devices[which].major,
				  devices[which].minor)) < 0)
			die("mknod %s", path);
		if (chmod(path, 0666) < 0)
			die("chmod %s", path);
		return;
	}
	put_file(path, "", 0666);
	if (wf_move_mount(source, "", AT_FDCWD, path,
			  MOVE_MOUNT_F_EMPTY_PATH) < 0)
		die("mounting %s", path);
	close(source);
}

static void link_in_dev(const char *target, const char *path)
{
	if (symlink(target, path) < 0)
		die("symlink %s", path);
}

static void furnish_dev(const struct plan *plan, struct furniture *furniture)
{
	char options[128];
	int single = plan_is(plan, "form", "user") &&
		     !plan_is(plan, "ids", "range");

	mount_at("/dev", "tmpfs", MS_NOSUID | MS_NOEXEC,
		 "mode=755,size=16m,nr_inodes=4096");
	for (size_t i = 0; i < N_DEVICES; i++)
		put_device(i, furniture->devices[i]);
	if (mkdir("/dev/pts", 0755) < 0 || mkdir("/dev/shm", 01777) < 0 ||
	    mkdir(IDENTITY_DIR, 0755) < 0 || chmod("/dev/shm", 01777) < 0)
		die("directories of /dev");
	/* The kernel has 4096 terminals for all. */
	mount_at("/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC,
		 single ? "newinstance,ptmxmode=0666,mode=0620,max=256" :
			  "newinstance,ptmxmode=0666,mode=0620,max=256,gid=5");
	snprintf(options, sizeof(options), "mode=1777,size=%llu",
		 (unsigned long long)plan_number(plan, "shm_bytes", 64u << 20));
	mount_at("/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, options);
	link_in_dev("/proc/self/fd", "/dev/fd");
	link_in_dev("/proc/self/fd/0", "/dev/stdin");
	link_in_dev("/proc/self/fd/1", "/dev/stdout");
	link_in_dev("/proc/self/fd/2", "/dev/stderr");
	link_in_dev("pts/ptmx", "/dev/ptmx");
}

/* sysfs needs the network namespace to be ours and the host's own sysfs to be
 * unmasked: inside another sandbox neither holds, and an empty /sys is what
 * programs must then live with. */
static void furnish_sys(const struct plan *plan)
{
	const unsigned long flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC;
	int fd = enter_point("/sys", 1);
	int host_network = plan_is(plan, "net", "host");

	if (fchdir(fd) < 0)
		die("mount point: /sys");
	if ((host_network && plan_is(plan, "form", "user")) ||
	    mount("sysfs", ".", "sysfs", flags, NULL) < 0) {
		if (mount("tmpfs", ".", "tmpfs", flags, "size=4k") < 0)
			die("mounting an empty /sys");
	} else {
		if (chdir("/") < 0)
			die("chdir /");
		if (mount("tmpfs", "/sys/firmware", "tmpfs", flags,
			  "size=4k") < 0 && errno != ENOENT)
			die("masking /sys/firmware");
	}
	if (chdir("/") < 0)
		die("chdir /");
	close(fd);
}

/* The target of a bind; a file of /dev is made for a file. */
static int bind_point(const char *target, int source)
{
	struct stat info;

	if (fstat(source, &info) < 0)
		die("bind: stat for %s", target);
	if (!S_ISDIR(info.st_mode) && strncmp(target, "/dev/", 5) == 0)
		put_file(target, "", 0644);
	return enter_point(target, 1);
}

static void put_mount(int source, const char *target)
{
	int point = bind_point(target, source);

	if (wf_move_mount(source, "", point, "",
			  MOVE_MOUNT_F_EMPTY_PATH |
				  MOVE_MOUNT_T_EMPTY_PATH) < 0)
		die("bind: mounting %s", target);
	close(point);
	close(source);
}

static void furnish_binds(const struct plan *plan, struct furniture *furniture)
{
	for (size_t i = 0; i < plan->n_items; i++)
		if (furniture->fds[i] >= 0)
			put_mount(furniture->fds[i],
				  strchr(plan->items[i].value, '\t') + 1);
}

static void furnish_shown(const struct plan *plan, struct furniture *furniture)
{
	for (size_t i = 0; i < plan->n_mounts; i++) {
		const char *value = plan->mounts[i].value;
		char target[PATH_MAX];
		size_t length = strcspn(value, "\t");

		if (length >= sizeof(target)) {
			errno = ENAMETOOLONG;
			die("mount point: %.64s...", value);
		}
		memcpy(target, value, length);
		target[length] = '\0';
		put_mount(furniture->shown[i], target);
	}
}

/* idfile=TARGET\tTEXT: a file of the sandbox's own tmpfs over the world's, so
 * that what siblings must not share never enters a layer. A world without the
 * file goes without. devfile=NAME\tTEXT stays in /dev. */
static void furnish_identity(const struct plan *plan)
{
	int number = 0;

	for (size_t i = 0; i < plan->n_items; i++) {
		int identity = strcmp(plan->items[i].key, "idfile") == 0;
		char target[256], path[320];
		const char *tab = strchr(plan->items[i].value, '\t');
		int point;

		if (!identity && strcmp(plan->items[i].key, "devfile") != 0)
			continue;
		if (!tab || tab - plan->items[i].value >= (long)sizeof(target)) {
			errno = EINVAL;
			die("a file without a name");
		}
		snprintf(target, sizeof(target), "%.*s",
			 (int)(tab - plan->items[i].value),
			 plan->items[i].value);
		if (!identity) {
			snprintf(path, sizeof(path), IDENTITY_DIR "/%s", target);
			put_file(path, tab + 1, 0644);
			continue;
		}
		point = enter_point(target, 0);
		if (point < 0)
			continue;
		snprintf(path, sizeof(path), IDENTITY_DIR "/%d", number++);
		put_file(path, tab + 1, 0644);
		close(point);
		if (mount(path, target, NULL, MS_BIND, NULL) < 0 &&
		    errno != ENOENT && errno != ENOTDIR)
			die("mounting %s", target);
	}
}

void furnish(const struct plan *plan, struct furniture *furniture)
{
	furnish_dev(plan, furniture);
	furnish_sys(plan);
	furnish_binds(plan, furniture);
	furnish_shown(plan, furniture);
	furnish_identity(plan);
}

static void mask(const char *path)
{
	struct stat info;

	if (lstat(path, &info) < 0) {
		if (errno == ENOENT || errno == EACCES)
			return;
		die("masking %s", path);
	}
	if (S_ISDIR(info.st_mode)) {
		if (mount("tmpfs", path, "tmpfs",
			  MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC,
			  "size=4k") < 0)
			die("masking %s", path);
	} else if (mount("/dev/null", path, NULL, MS_BIND, NULL) < 0) {
		die("masking %s", path);
	}
}

static void make_read_only(const char *path)
{
	if (mount(path, path, NULL, MS_BIND | MS_REC, NULL) < 0) {
		if (errno == ENOENT)
			return;
		die("binding %s", path);
	}
	if (wf_mount_setattr(AT_FDCWD, path, AT_RECURSIVE, MOUNT_ATTR_RDONLY,
			     0) < 0)
		die("making %s read-only", path);
}

void furnish_proc(int *proc_fd)
{
	static const char *const masked[] = {
		"/proc/kcore",	     "/proc/keys",	  "/proc/timer_list",
		"/proc/latency_stats", "/proc/sched_debug", "/proc/acpi",
		"/proc/asound",	     "/proc/scsi",	  "/proc/kallsyms",
		"/proc/interrupts",  "/proc/kmsg",	  "/proc/kpagecount",
		"/proc/kpageflags",  "/proc/kpagecgroup",
	};
	static const char *const read_only[] = {
		"/proc/sys", "/proc/bus", "/proc/fs", "/proc/irq",
		"/proc/sysrq-trigger",
	};

	mount_at("/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	for (size_t i = 0; i < sizeof(masked) / sizeof(masked[0]); i++)
		mask(masked[i]);
	for (size_t i = 0; i < sizeof(read_only) / sizeof(read_only[0]); i++)
		make_read_only(read_only[i]);
	*proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (*proc_fd < 0)
		die("opening /proc");
}
