/* Keeps a virtual machine: starts it from a plan, holds its sockets and its
 * lock, and ends it with its owner. Items of the plan, besides cgdir= and the
 * like (see place.h):
 *  id, run, lock, detached, lifetime_ms  as launch has them
 *  arg=TEXT ... env=K=V ...  the machine's; arg 0 is its program, an absolute
 *                  path
 *  agent=N, qmp=N  numbers that it gets the two sockets as (16 to 63)
 *  pass=N ...      descriptors of this process that it keeps (16 to 63)
 *  uid=N, gid=N    whom it runs as
 *  file_bytes=N    no file grows beyond that by it
 *  walls=1         all that is mounted it sees read-only; it shares no IPC, and
 *                  with net=none no network, with this process
 *  generation=N    what the guest is told by RESET
 * FRAME_LAUNCHED, then FRAME_READY or an ERROR frame go to PLAN_FD, whose end
 * is the owner's end. Listens on `sock`, `control` and, for the machine, on
 * `qmp` in the run directory. */
#define _GNU_SOURCE
#include "keep.h"
#include "faces.h"
#include "overlay.h"
#include "place.h"
#include "wf.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC (1U << 2)
#endif

#define OWNER_PIDFD 4
enum { PASS_FIRST = 16, PASS_LAST = 63, PARKED = 128, ARGS_MAX = 250, TURN_NS = 100000000 };

struct keep keep;

uint64_t keep_now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

void keep_end(int code)
{
	if (keep.machine > 0) {
		(void)kill(keep.machine, SIGKILL);
		while (waitpid(keep.machine, NULL, 0) < 0 && errno == EINTR)
			;
	}
	_exit(code);
}

/* Above the numbers that the machine is given. */
static int parked(int fd, const char *what)
{
	int high = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, PARKED);

	if (high < 0)
		die("%s", what);
	close(fd);
	return high;
}

static int pass_number(const struct plan *plan, const char *key)
{
	uint64_t number = plan_number(plan, key, 0);

	if (number < PASS_FIRST || number > PASS_LAST) {
		errno = EINVAL;
		die("keep: %s is no number from %d to %d", key, PASS_FIRST, PASS_LAST);
	}
	return (int)number;
}

static void give(int fd, int number)
{
	if (dup2(fd, number) < 0)
		die("keep: descriptor %d", number);
}

/* dup2 has cleared close-on-exec of what is given; the rest is closed. */
static void pass_descriptors(const struct plan *plan, int agent, int qmp, int words)
{
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	if (null < 0)
		die("keep: /dev/null");
	if (syscall(SYS_close_range, 3, ~0U, CLOSE_RANGE_CLOEXEC) < 0)
		die("keep: close_range");
	for (size_t i = 0; i < plan->n_items; i++) {
		if (strcmp(plan->items[i].key, "pass") == 0) {
			int fd = atoi(plan->items[i].value);

			if (fd < PASS_FIRST || fd > PASS_LAST)
				errno = EINVAL;
			if (fd < PASS_FIRST || fd > PASS_LAST || fcntl(fd, F_SETFD, 0) < 0)
				die("keep: passing descriptor %d", fd);
		}
	}
	give(null, 0);
	give(null, 1);
	give(words, 2);
	give(agent, pass_number(plan, "agent"));
	give(qmp, pass_number(plan, "qmp"));
}

static void take_user(const struct plan *plan)
{
	uid_t uid = (uid_t)plan_number(plan, "uid", (uint64_t)geteuid());
	gid_t gid = (gid_t)plan_number(plan, "gid", (uint64_t)getegid());

	if (!plan_get(plan, "uid", NULL))
		return;
	if (setgroups(0, NULL) < 0 && errno != EPERM)
		die("keep: dropping groups");
	if (setresgid(gid, gid, gid) < 0 || setresuid(uid, uid, uid) < 0)
		die("keep: becoming user %u, group %u", uid, gid);
}

/* Whoever takes the machine's program over has its descriptors, and should have
 * nothing else to write to or to speak to. */
static void take_walls(const struct plan *plan)
{
	struct rlimit files;
	int spaces = CLONE_NEWNS | CLONE_NEWIPC;

	files.rlim_cur = files.rlim_max = plan_number(plan, "file_bytes", RLIM_INFINITY);
	if (files.rlim_max != RLIM_INFINITY && setrlimit(RLIMIT_FSIZE, &files) < 0)
		die("keep: the limit of a file");
	/* A core has the guest's memory in it. */
	if (setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0}) < 0)
		die("keep: no cores");
	if (!plan_is(plan, "walls", "1"))
		return;
	if (plan_is(plan, "net", "none"))
		spaces |= CLONE_NEWNET;
	if (unshare(spaces) < 0)
		die("keep: namespaces of the machine's own");
	/* What is unmounted elsewhere is unmounted here too. */
	if (mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) < 0 ||
	    wf_mount_setattr(AT_FDCWD, "/", AT_RECURSIVE, MOUNT_ATTR_RDONLY, 0) < 0)
		die("keep: mounts that the machine cannot write to");
}

/* Many machines that come up at once take turns of this length where the kernel
 * lets each have a length of its own (6.12 and newer, sched(7)): an interpreter
 * that is put aside every few milliseconds finds its caches full of the others'. */
static void take_long_turns(void)
{
	struct {
		uint32_t size, policy;
		uint64_t flags;
		int32_t nice;
		uint32_t priority;
		uint64_t runtime_ns, deadline_ns, period_ns;
	} wish = {.size = 48};

	if (syscall(SYS_sched_getattr, 0, &wish, (unsigned)sizeof wish, 0) < 0 || wish.policy != 0)
		return;
	wish.runtime_ns = TURN_NS;
	(void)syscall(SYS_sched_setattr, 0, &wish, 0);
}

/* In the child. Errors go to the owner as the parent's would. */
static _Noreturn void become_machine(const struct plan *plan, const int *join_fds, int n_join,
				     int agent, int qmp, int words, pid_t parent)
{
	char *argv[ARGS_MAX + 1], *envp[ARGS_MAX + 1];
	size_t n_args = 0, n_envs = 0;
	sigset_t none;

	for (int i = 0; i < n_join; i++)
		if (write(join_fds[i], "0", 1) != 1)
			die("keep: joining a cgroup");
	for (size_t i = 0; i < plan->n_items && n_args < ARGS_MAX && n_envs < ARGS_MAX; i++) {
		if (strcmp(plan->items[i].key, "arg") == 0)
			argv[n_args++] = (char *)(uintptr_t)plan->items[i].value;
		else if (strcmp(plan->items[i].key, "env") == 0)
			envp[n_envs++] = (char *)(uintptr_t)plan->items[i].value;
	}
	argv[n_args] = envp[n_envs] = NULL;
	if (!n_args) {
		errno = EINVAL;
		die("keep: no program");
	}
	if (argv[0][0] != '/') {
		errno = EINVAL;
		die("keep: the machine's program is no absolute path: %.200s", argv[0]);
	}
	if (setsid() < 0)
		die("keep: a session of its own");
	pass_descriptors(plan, agent, qmp, words);
	take_long_turns();
	take_walls(plan);
	take_user(plan);
	/* Only behind the change of user, which undoes it. */
	if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0)
		die("keep: PR_SET_PDEATHSIG");
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		die("keep: no_new_privs");
	if (getppid() != parent)
		_exit(1);
	sigemptyset(&none);
	(void)signal(SIGPIPE, SIG_DFL);
	if (sigprocmask(SIG_SETMASK, &none, NULL) < 0)
		die("keep: the signal mask");
	execve(argv[0], argv, envp);
	die("keep: running %.200s", argv[0]);
}

void keep_start_machine(const struct plan *plan, const int *join_fds, int n_join, int qmp_fd)
{
	int agent[2], words[2];
	pid_t parent = getpid();

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, agent) < 0 || pipe2(words, O_CLOEXEC) < 0)
		die("keep: sockets for the machine");
	keep.agent_fd = parked(agent[0], "keep: the agent's socket");
	agent[1] = parked(agent[1], "keep: the machine's socket");
	keep.stderr_fd = parked(words[0], "keep: the machine's messages");
	words[1] = parked(words[1], "keep: the machine's messages");
	if (fcntl(keep.agent_fd, F_SETFL, O_NONBLOCK) < 0 || fcntl(keep.stderr_fd, F_SETFL, O_NONBLOCK) < 0)
		die("keep: descriptors that do not block");
	keep.machine = fork();
	if (keep.machine < 0)
		die("keep: starting the machine");
	if (keep.machine == 0)
		become_machine(plan, join_fds, n_join, agent[1], qmp_fd, words[1], parent);
	close(agent[1]);
	close(words[1]);
	close(qmp_fd);
	keep.machine_pidfd = (int)syscall(SYS_pidfd_open, keep.machine, 0);
	if (keep.machine_pidfd < 0) {
		int error = errno;

		(void)kill(keep.machine, SIGKILL);
		errno = error;
		die("keep: a pidfd of the machine");
	}
}

static void take_lock(const char *path)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET };
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	if (fd < 0)
		die("opening the lock %s", path);
	/* Moved before it is taken: closing any copy gives a POSIX lock back. */
	fd = parked(fd, "keep: the lock");
	if (fcntl(fd, F_SETLK, &lock) < 0)
		die("the sandbox's lock is taken");
}

int keep_main(void)
{
	struct plan plan;
	struct wf_init_config c = { .freeze_fd = -1, .freeze_state_fd = -1, .oom_fd = -1 };
	uint64_t lifetime_ms;
	uint32_t pid;
	int qmp;

	keep.owner_pidfd = OWNER_PIDFD;
	/* What a caller happened to have open would be held as long as this lives. */
	if (syscall(SYS_close_range, OWNER_PIDFD + 1, PASS_FIRST - 1, 0) < 0 ||
	    syscall(SYS_close_range, PASS_LAST + 1, ~0U, 0) < 0)
		die("keep: close_range");
	plan_read(&plan);
	keep.peer_uid = geteuid();
	keep.detached = plan_is(&plan, "detached", "1");
	keep.leash = true;
	umask(0077); /* the sockets, before they are bound */
	if (chdir(plan_get(&plan, "run", "")) < 0)
		die("chdir %s", plan_get(&plan, "run", ""));
	take_lock(plan_get(&plan, "lock", ""));
	keep.sock_fd = parked(place_listen("sock"), "keep: sock");
	keep.control_fd = parked(place_listen("control"), "keep: control");
	qmp = parked(place_listen("qmp"), "keep: qmp");
	place_cgroups(&plan, &c);
	for (int i = 0; i < c.n_join; i++)
		c.join_fds[i] = parked(c.join_fds[i], "keep: a cgroup");
	if (signal(SIGPIPE, SIG_IGN) == SIG_ERR || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		die("keep: getting ready");
	keep_start_machine(&plan, c.join_fds, c.n_join, qmp);
	pid = (uint32_t)keep.machine;
	report(FRAME_LAUNCHED, &pid, sizeof(pid));
	/* What only the machine was to have is not kept open here. */
	for (unsigned fd = PASS_FIRST; fd <= PASS_LAST; fd++)
		(void)close((int)fd);
	lifetime_ms = plan_number(&plan, "lifetime_ms", 0);
	if (lifetime_ms && lifetime_ms < UINT64_MAX / 4)
		keep.ends_ms = keep_now_ms() + lifetime_ms;
	if (fcntl(PLAN_FD, F_SETFL, O_NONBLOCK) < 0)
		die("keep: the owner's socket");
	keep_mux();
	mux_reset(&keep.mux, (uint32_t)plan_number(&plan, "generation", 0));
	keep_serve();
}
