/* Makes a sandbox from a plan and becomes its PID 1. Everything that needs
 * the host is opened first; then the namespaces, the overlay and the pivot;
 * every path of the world is resolved after the pivot, inside it. */
#define _GNU_SOURCE
#include "faces.h"
#include "furnish.h"
#include "guard.h"
#include "ids.h"
#include "overlay.h"
#include "place.h"
#include "plan.h"
#include "wf.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/sched.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FRAME_LAUNCHED 110
#define OWNER_PIDFD 4
#define IDS_FD 5 /* a user namespace of the owner's that maps a range of ids */

static void map_single_id(uid_t uid, gid_t gid)
{
	char text[64];

	place_write(AT_FDCWD, "/proc/self/setgroups", "deny");
	snprintf(text, sizeof(text), "0 %u 1", uid);
	place_write(AT_FDCWD, "/proc/self/uid_map", text);
	snprintf(text, sizeof(text), "0 %u 1", gid);
	place_write(AT_FDCWD, "/proc/self/gid_map", text);
}

/* All but the cgroup namespace, whose root is the group that one is in. */
static void unshare_early(const struct plan *plan)
{
	int flags = CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID;
	uid_t uid = geteuid();
	gid_t gid = getegid();

	if (!plan_is(plan, "net", "host"))
		flags |= CLONE_NEWNET;
	if (plan_is(plan, "ids", "range")) {
		ids_unshare(IDS_FD);
	} else if (plan_is(plan, "form", "user")) {
		if (unshare(CLONE_NEWUSER) < 0)
			die("userns: a user namespace of its own");
		map_single_id(uid, gid);
	}
	if (unshare(flags) < 0)
		die("namespaces of its own");
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		die("making mounts private");
}

static void raise_loopback(void)
{
	struct ifreq request = { .ifr_name = "lo" };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		die("a socket for the loopback interface");
	request.ifr_flags = IFF_UP | IFF_RUNNING;
	if (ioctl(fd, SIOCSIFFLAGS, &request) < 0)
		die("raising the loopback interface");
	close(fd);
}

/* The plan may come much later; an owner that ends meanwhile may have left a
 * copy of the socket in a child of its own, so its end is watched itself. */
static void await_plan(void)
{
	struct pollfd watched[2] = {
		{ .fd = PLAN_FD, .events = POLLIN },
		{ .fd = OWNER_PIDFD, .events = POLLIN },
	};

	while (poll(watched, 2, -1) < 0)
		if (errno != EINTR)
			die("waiting for the plan");
	if (watched[1].revents)
		_exit(1);
}

static void enter_root(const struct plan *plan, int root_fd)
{
	const char *point = plan_get(plan, "root", "");

	if (wf_move_mount(root_fd, "", AT_FDCWD, point,
			  MOVE_MOUNT_F_EMPTY_PATH) < 0)
		die("attaching the root at %s", point);
	if (fchdir(root_fd) < 0)
		die("entering the root");
	if (syscall(SYS_pivot_root, ".", ".") < 0)
		die("pivot_root");
	if (chdir("/") < 0)
		die("chdir /");
	close(root_fd);
}

/* The host's mounts lie stacked on the root until /proc and /sys are there:
 * the kernel lets a user namespace mount these only where it already sees
 * whole ones. They hold no upper, so they may go lazily. */
static void leave_host(void)
{
	if (chdir("/") < 0 || umount2(".", MNT_DETACH) < 0)
		die("leaving the host's mounts");
	if (chdir("/") < 0)
		die("chdir /");
}

/* PID 1 speaks only after the launcher has told its pid and, where the
 * launcher does that, left the host's mounts. */
static void wait_for_go(int go)
{
	char word;
	ssize_t got;

	do
		got = read(go, &word, 1);
	while (got < 0 && errno == EINTR);
	close(go);
	if (got != 1)
		_exit(1); /* the launcher has told the owner why */
}

static void give_go(int go)
{
	if (write(go, "g", 1) != 1)
		die("letting PID 1 go on");
	close(go);
}

static void become_init(const struct plan *plan, struct wf_init_config *c,
			int go)
{
	const char *name = plan_get(plan, "hostname", "sandbox");

	if (setsid() < 0 && errno != EPERM)
		die("a session of its own");
	furnish_proc(&c->proc_fd);
	if (plan_is(plan, "form", "user"))
		leave_host();
	if (sethostname(name, strlen(name)) < 0)
		die("setting the host name");
	umask(0022);
	if (plan_is(plan, "form", "trusted") && setgroups(0, NULL) < 0)
		die("dropping groups");
	guard_install(plan_is(plan, "net", "host"));
	wait_for_go(go);
	_exit(wf_init_main(c));
}

static void start_init(const struct plan *plan, struct wf_init_config *c)
{
	/* The caller's parent, the owner, becomes the parent of PID 1 too, so
	 * that it can wait for it, and no orphan is left to a PID 1 of the
	 * host that may not reap. */
	uint32_t reported;
	int go[2];
	long pid;

	if (pipe2(go, O_CLOEXEC) < 0)
		die("a pipe");
	pid = syscall(SYS_clone, CLONE_PARENT | SIGCHLD, NULL, NULL, NULL,
		      NULL);
	if (pid < 0)
		die("starting PID 1");
	if (pid == 0) {
		close(go[1]);
		become_init(plan, c, go[0]);
	}
	reported = (uint32_t)pid;
	report(FRAME_LAUNCHED, &reported, sizeof(reported));
	/* Unmounting waits for all processors; here it overlaps with what
	 * PID 1 prepares. In a user namespace PID 1 must do it, after /proc. */
	if (plan_is(plan, "form", "trusted"))
		leave_host();
	give_go(go[1]);
}

int launch_main(void)
{
	struct plan beginning, plan;
	struct furniture furniture;
	struct wf_init_config c = {
		.owner_fd = PLAN_FD, .owner_pidfd = OWNER_PIDFD,
		.listen_fd = -1, .lock_fd = -1, .proc_fd = -1,
		.freeze_fd = -1, .freeze_state_fd = -1, .oom_fd = -1,
	};
	const char *run, *lock;
	int root_fd;

	/* Form and network come first: the namespaces are made while the
	 * owner still takes leases and makes directories. */
	plan_read(&beginning);
	c.peer_uid = geteuid();
	unshare_early(&beginning);
	if (!plan_is(&beginning, "net", "host"))
		raise_loopback();
	await_plan();
	plan_read(&plan);
	run = plan_get(&plan, "run", "");
	lock = plan_get(&plan, "lock", "");
	c.sandbox_id = plan_get(&plan, "id", "");
	if (plan_is(&plan, "form", "user"))
		c.peer_uid = 0; /* the kernel tells peers as seen from inside */
	c.detached = plan_is(&plan, "detached", "1");
	c.lifetime_ms = plan_number(&plan, "lifetime_ms", 0);
	c.lock_fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (c.lock_fd < 0)
		die("opening the lock %s", lock);
	if (chdir(run) < 0)
		die("chdir %s", run);
	c.listen_fd = place_listen("sock");
	place_cgroups(&plan, &c);
	if (unshare(CLONE_NEWCGROUP) < 0)
		die("namespaces of its own");
	furniture_open(&plan, &furniture);
	root_fd = overlay_mount(&plan);
	enter_root(&plan, root_fd);
	furnish(&plan, &furniture);
	start_init(&plan, &c);
	return 0;
}
