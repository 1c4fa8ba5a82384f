/* The first steps of a guest: from the kernel's initial root to one of its
 * own. The initial one is no mount that pivot_root(2) takes, and launch does
 * that. */
#define _GNU_SOURCE
#include "guest.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MODULES_MAX = 16 * 1024, PORT_TRIES = 1000, PORTS = 8 };

void guest_say(const char *format, ...)
{
	char line[512];
	va_list args;
	int n;
	va_start(args, format);
	n = vsnprintf(line, sizeof line, format, args);
	va_end(args);
	if (n > 0 && guest.log_fd > 0)
		dprintf(guest.log_fd, "wf-init: %.*s\n", n, line);
}

/* The host runs the machine so that a restart ends it. */
void guest_stop(void)
{
	sync();
	(void)reboot(RB_AUTOBOOT);
	_exit(1); /* the kernel's panic is an end too */
}

static _Noreturn void fail(const char *what)
{
	guest_say("%s: %s", what, strerror(errno));
	guest_stop();
}

static void mount_at(const char *target, const char *type, unsigned long flags, const char *data)
{
	if (mkdir(target, 0755) < 0 && errno != EEXIST)
		fail(target);
	if (mount(type, target, type, flags, data) < 0 && errno != EBUSY)
		fail(target);
}

static void load_module(const char *name)
{
	char path[256];
	snprintf(path, sizeof path, "/modules/%s", name);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST))
		guest_say("module %s: %s", path, strerror(errno));
	if (fd >= 0)
		close(fd);
	(void)unlink(path); /* its memory is the guest's */
}

static void load_modules(void)
{
	static char list[MODULES_MAX];
	int fd = open("/modules/order", O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, list, sizeof list - 1);
	char *rest = NULL;
	if (fd >= 0)
		close(fd);
	if (n < 0)
		fail("/modules/order");
	list[n] = '\0';
	for (char *name = strtok_r(list, "\n", &rest); name; name = strtok_r(NULL, "\n", &rest))
		load_module(name);
}

/* A sealed copy in memory: nothing inside can alter what PID 1 starts. */
static int copy_program(void)
{
	struct stat st;
	int from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	int to = memfd_create("wf-init", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	off_t at = 0;
	if (from < 0 || to < 0 || fstat(from, &st) < 0)
		fail("wf-init");
	while (at < st.st_size) {
		ssize_t n = sendfile(to, from, &at, (size_t)(st.st_size - at));
		if (n <= 0)
			fail("copying wf-init");
	}
	if (fchmod(to, 0555) < 0 ||
	    fcntl(to, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) < 0)
		fail("sealing wf-init");
	close(from);
	int high = fcntl(to, F_DUPFD_CLOEXEC, GUEST_PARKED);
	if (high < 0)
		fail("wf-init");
	close(to);
	return high;
}

static void change_root(void)
{
	static const char *const moved[] = {"/dev", "/proc", "/sys"};
	char target[32];
	mount_at("/root.new", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755");
	for (size_t i = 0; i < sizeof moved / sizeof *moved; i++) {
		snprintf(target, sizeof target, "/root.new%s", moved[i]);
		if (mkdir(target, 0755) < 0 || mount(moved[i], target, NULL, MS_MOVE, NULL) < 0)
			fail(target);
	}
	(void)unlink("/modules/order");
	(void)unlink("/init");
	if (chdir("/root.new") < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 ||
	    chdir("/") < 0)
		fail("changing the root");
}

/* A machine restored from memory does not answer the usual ways to restart: a
 * panic would hang in it for ever. This one needs no device. */
static void choose_restart(void)
{
	static const char type[] = "triple";
	int fd = open("/sys/kernel/reboot/type", O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, type, sizeof type - 1) < 0)
		guest_say("choosing how to restart: %s", strerror(errno));
	if (fd >= 0)
		close(fd);
}

/* Its number depends on the order of devices, which may still be appearing. */
static int open_port(void)
{
	const struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
	char path[32];
	for (int tries = 0; tries < PORT_TRIES; tries++) {
		for (int i = 0; i < PORTS; i++)
			for (int nr = 1; nr <= 2; nr++) {
				snprintf(path, sizeof path, "/dev/vport%dp%d", i, nr);
				/* Blocking: the driver then waits for room without a copy. */
				int fd = open(path, O_RDWR | O_CLOEXEC);
				if (fd >= 0)
					return fd;
			}
		nanosleep(&pause, NULL);
	}
	errno = ENODEV;
	fail("no virtio port");
}

/* Where each move into a group waits for all processors, a command that is the
 * first of its fork does so too. */
static void mount_groups(void)
{
	static const char place[] = "/sys/fs/cgroup";
	const unsigned long flags = MS_NOSUID | MS_NODEV | MS_NOEXEC;
	if (mount("cgroup2", place, "cgroup2", flags, "favordynmods") < 0) /* older than 6.0 */
		mount_at(place, "cgroup2", flags, NULL);
}

void guest_boot(void)
{
	umask(022);
	mount_at("/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	mount_at("/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	mount_at("/dev", "devtmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755");
	int null = open("/dev/null", O_RDWR);
	if (null < 0)
		fail("/dev/null");
	for (int fd = 0; fd < 3; fd++)
		if (dup2(null, fd) < 0)
			fail("dup2");
	if (syscall(SYS_close_range, 3, ~0U, 0) < 0)
		fail("close_range");
	guest.log_fd = open("/dev/kmsg", O_WRONLY | O_CLOEXEC);
	choose_restart();
	load_modules();
	guest.program_fd = copy_program();
	change_root();
	mount_groups();
	mount_at("/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755");
	if (mkdir("/run/wf", 0700) < 0)
		fail("/run/wf");
	guest.proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (guest.proc_fd < 0)
		fail("/proc");
	guest.port_fd = open_port();
}
