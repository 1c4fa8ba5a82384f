/* PID 1 of a sandbox: puts its descriptors and signals in order, then runs
 * the event loop. It never blocks on a client or a command. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS_PER_ROUND = 64, PARKED_FD = 128, NOFILE_WANTED = 65536 };

struct server srv;

static struct source signal_source, owner_source;
static void **released;
static size_t n_released, cap_released;

static uint64_t clock_us(clockid_t clock)
{
	struct timespec t;
	clock_gettime(clock, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

uint64_t now_us(void)
{
	return clock_us(CLOCK_MONOTONIC);
}

uint64_t now_ms(void)
{
	return now_us() / 1000;
}

uint64_t unix_ms(void)
{
	return clock_us(CLOCK_REALTIME) / 1000;
}

void wake_at(uint64_t ms)
{
	if (ms && ms < srv.wake_ms)
		srv.wake_ms = ms;
}

bool watch(int fd, struct source *source, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = source};
	if (epoll_ctl(srv.epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0)
		return true;
	return errno == EEXIST && epoll_ctl(srv.epoll_fd, EPOLL_CTL_MOD, fd, &event) == 0;
}

void unwatch(int fd)
{
	struct epoll_event unused = {0};
	(void)epoll_ctl(srv.epoll_fd, EPOLL_CTL_DEL, fd, &unused);
}

void release_later(void *memory)
{
	if (n_released == cap_released) {
		size_t cap = cap_released ? cap_released * 2 : 64;
		void **more = realloc(released, cap * sizeof *more);
		if (!more)
			return; /* a leak is better than a use after free */
		released = more;
		cap_released = cap;
	}
	released[n_released++] = memory;
}

static void release_now(void)
{
	while (n_released)
		free(released[--n_released]);
}

void end_sandbox(int code)
{
	/* Frozen processes do not die; the rest goes with PID 1. */
	freeze_undo();
	(void)kill(-1, SIGKILL);
	_exit(code);
}

static void reap_all(void)
{
	int status;
	struct rusage used;
	for (;;) {
		pid_t pid = wait4(-1, &status, WNOHANG, &used);
		if (pid < 0 && errno == EINTR)
			continue;
		if (pid <= 0)
			return;
		srv.reaped_cpu_us +=
			(uint64_t)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000 +
			(uint64_t)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
		struct command *command = command_by_supervisor(pid);
		if (command)
			command_reaped(command, status);
		else if (!mapped_reaped(pid))
			strays_begin();
	}
}

static void on_signal(struct source *source, uint32_t events)
{
	(void)source;
	(void)events;
	struct signalfd_siginfo info[8];
	ssize_t n;
	do
		n = read(srv.signal_fd, info, sizeof info);
	while (n == (ssize_t)sizeof info || (n < 0 && errno == EINTR));
	reap_all();
}

static void on_owner_end(struct source *source, uint32_t events)
{
	(void)source;
	(void)events;
	if (srv.config->detached)
		unwatch(srv.owner_pidfd);
	else
		end_sandbox(WF_END_ASKED);
}

static void run_timers(void)
{
	uint64_t now = now_ms();
	if (now < srv.wake_ms)
		return;
	srv.wake_ms = UINT64_MAX;
	if (srv.ends_ms && now >= srv.ends_ms)
		end_sandbox(WF_END_TIME);
	wake_at(srv.ends_ms);
	command_time(now);
	strays_time(now);
	hold_time(now);
	freeze_time(now);
	shutdown_time(now);
	conns_time(now);
}

static int wait_ms(void)
{
	if (srv.wake_ms == UINT64_MAX)
		return -1;
	uint64_t now = now_ms();
	if (srv.wake_ms <= now)
		return 0;
	uint64_t ms = srv.wake_ms - now;
	return ms > 60000 ? 60000 : (int)ms;
}

static void run(void)
{
	struct epoll_event events[EVENTS_PER_ROUND];
	for (;;) {
		int n = epoll_wait(srv.epoll_fd, events, EVENTS_PER_ROUND, wait_ms());
		if (n < 0 && errno != EINTR)
			end_sandbox(WF_END_BROKEN);
		for (int i = 0; i < n; i++) {
			struct source *source = events[i].data.ptr;
			if (source->ready)
				source->ready(source, events[i].events);
		}
		run_timers();
		conns_flush();
		release_now();
	}
}

static int fail(const char *what)
{
	dprintf(STDERR_FILENO, "wf-init: %s: %s\n", what, strerror(errno));
	return -1;
}

static void nothing(int signo)
{
	(void)signo;
}

static int set_signals(void)
{
	sigset_t all, chld;
	struct sigaction action = {.sa_handler = SIG_DFL};
	for (int signo = 1; signo < NSIG; signo++)
		(void)sigaction(signo, &action, NULL); /* refused for KILL, STOP and libc's own */
	sigfillset(&all);
	if (sigprocmask(SIG_SETMASK, &all, NULL) < 0)
		return fail("sigprocmask");
	/* Supervisors inherit it: it only has to interrupt their ppoll. */
	action.sa_handler = nothing;
	if (sigaction(SIGCHLD, &action, NULL) < 0)
		return fail("sigaction");
	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	srv.signal_fd = signalfd(-1, &chld, SFD_CLOEXEC | SFD_NONBLOCK);
	return srv.signal_fd < 0 ? fail("signalfd") : 0;
}

static int park(int *fd)
{
	if (*fd < 0)
		return 0;
	*fd = fcntl(*fd, F_DUPFD_CLOEXEC, PARKED_FD);
	return *fd < 0 ? fail("moving a descriptor") : 0;
}

static int place(int *fd, int at)
{
	if (dup3(*fd, at, O_CLOEXEC) < 0)
		return fail("placing a descriptor");
	*fd = at;
	return 0;
}

/* Moves every descriptor that the configuration names to a low, fixed or
 * consecutive number, and closes all others. */
static int arrange_fds(const struct wf_init_config *config)
{
	int proc = config->proc_fd, join[MAX_JOIN], null;
	int *rest[] = {&srv.listen_fd, &srv.lock_fd,         &srv.owner_pidfd,
		       &srv.freeze_fd, &srv.freeze_state_fd, &srv.oom_fd};
	int owner = config->owner_fd;
	if (config->n_join < 0 || config->n_join > MAX_JOIN || proc < 0)
		return errno = EINVAL, fail("configuration");
	null = open("/dev/null", O_RDWR | O_CLOEXEC | O_NOCTTY);
	if (null < 0)
		return fail("/dev/null");
	if (park(&null) < 0 || park(&proc) < 0 || park(&owner) < 0)
		return -1;
	for (int i = 0; i < config->n_join; i++) {
		join[i] = config->join_fds[i];
		if (park(&join[i]) < 0)
			return -1;
	}
	for (size_t i = 0; i < sizeof rest / sizeof *rest; i++)
		if (park(rest[i]) < 0)
			return -1;
	int next = FD_JOIN;
	int control = null;
	for (int fd = 0; fd < 3; fd++)
		if (fd != STDERR_FILENO && dup2(null, fd) < 0)
			return fail("dup2");
	if (place(&control, FD_CONTROL) < 0 || place(&null, FD_NULL) < 0 ||
	    place(&proc, FD_PROC) < 0)
		return -1;
	for (int i = 0; i < config->n_join; i++)
		if (place(&join[i], next++) < 0)
			return -1;
	for (size_t i = 0; i < sizeof rest / sizeof *rest; i++)
		if (*rest[i] >= 0 && place(rest[i], next++) < 0)
			return -1;
	if (owner >= 0 && place(&owner, next++) < 0)
		return -1;
	if (syscall(SYS_close_range, next, ~0U, 0) < 0)
		return fail("close_range");
	srv.kept.n_join = config->n_join;
	return owner >= 0 ? owner : 0;
}

static int take_lock(void)
{
	struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
	if (srv.lock_fd < 0)
		return 0;
	return fcntl(srv.lock_fd, F_SETLK, &lock) < 0 ? fail("the sandbox's lock is taken") : 0;
}

static int raise_nofile(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return fail("getrlimit");
	srv.kept.nofile_soft = limit.rlim_cur;
	srv.kept.nofile_hard = limit.rlim_max;
	if (limit.rlim_cur < NOFILE_WANTED) {
		limit.rlim_cur = limit.rlim_max < NOFILE_WANTED ? limit.rlim_max : NOFILE_WANTED;
		if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
			return fail("setrlimit");
	}
	return 0;
}

static int start_watching(int owner)
{
	srv.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (srv.epoll_fd < 0)
		return fail("epoll_create1");
	signal_source.ready = on_signal;
	if (!watch(srv.signal_fd, &signal_source, EPOLLIN))
		return fail("watching signals");
	if (srv.owner_pidfd >= 0) {
		owner_source.ready = on_owner_end;
		if (!watch(srv.owner_pidfd, &owner_source, EPOLLIN))
			return fail("watching the owner");
	}
	if (conns_listen() < 0)
		return fail("listening");
	if (owner > 0)
		conn_open(owner, true);
	return 0;
}

int wf_init_main(const struct wf_init_config *config)
{
	if (getpid() != 1) {
		/* Its end kills every process that it can see. */
		errno = EPERM;
		fail("not PID 1");
		return 1;
	}
	srv.config = config;
	srv.started_ms = now_ms();
	srv.wake_ms = UINT64_MAX;
	srv.kept.uid = config->default_uid;
	srv.kept.gid = config->default_gid;
	srv.owner_pidfd = config->owner_pidfd;
	srv.listen_fd = config->listen_fd;
	srv.lock_fd = config->lock_fd;
	srv.oom_fd = config->oom_fd;
	srv.freeze_fd = config->freeze_kind ? config->freeze_fd : -1;
	srv.freeze_state_fd = config->freeze_kind ? config->freeze_state_fd : -1;
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0) {
		fail("PR_SET_DUMPABLE");
		return 1;
	}
	umask(022);
	int owner = raise_nofile() < 0 ? -1 : arrange_fds(config);
	if (owner < 0 || set_signals() < 0 || take_lock() < 0 || start_watching(owner) < 0)
		return 1;
	if (dup2(FD_NULL, STDERR_FILENO) < 0)
		return 1;
	if (config->lifetime_ms && config->lifetime_ms < UINT64_MAX / 4) {
		srv.ends_ms = srv.started_ms + config->lifetime_ms;
		wake_at(srv.ends_ms);
	}
	conns_flush();
	run();
	return 0;
}
