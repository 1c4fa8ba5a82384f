/* PID 1 of a virtual machine: serves the multiplexer on the virtio port and
 * reaps. What may take long happens in children. */
#define _GNU_SOURCE
#include "guest.h"
#include "faces.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { AT_PORT, AT_SIGNAL, AT_STREAMS, ALL = AT_STREAMS + MUX_STREAMS, NOFILE_WANTED = 65536 };

struct guest guest;

void guest_answer(uint16_t op, uint32_t tag, int error, const void *body, size_t size)
{
	static uint8_t payload[MUX_PAYLOAD];
	uint16_t zero = 0;
	int32_t number = error;
	if (size > sizeof payload - MUX_CONTROL_HEAD) {
		size = 0;
		number = E2BIG;
	}
	memcpy(payload, &op, 2);
	memcpy(payload + 2, &zero, 2);
	memcpy(payload + 4, &tag, 4);
	memcpy(payload + 8, &number, 4);
	if (size)
		memcpy(payload + MUX_CONTROL_HEAD, body, size);
	mux_send(&guest.mux, MUX_CONTROL, 0, payload, MUX_CONTROL_HEAD + size);
}

/* The host ends the machine at once; a restart takes the kernel a while. */
void guest_shut_down(void)
{
	sync();
	guest.status = 0;
	guest.ended = true;
}

static void on_event(struct mux *mux, enum mux_kind kind)
{
	(void)mux;
	(void)kind;
	/* Answers that children owe belong to the former generation. */
	for (size_t i = 0; i < GUEST_WORKERS; i++)
		guest.workers[i].tag = 0;
}

static void on_signal(void)
{
	struct signalfd_siginfo info[8];
	while (read(guest.signal_fd, info, sizeof info) > 0)
		;
	guest_reap();
}

static void pause_for(long ms)
{
	const struct timespec t = {.tv_nsec = ms * 1000 * 1000};
	nanosleep(&t, NULL);
}

static void on_port(short found)
{
	if (found & POLLIN) {
		int got = mux_read_from(&guest.mux, guest.port_fd);
		if (got < 0 && errno == EPROTO) {
			guest_say("the host sent what is no frame");
			guest_stop();
		}
	} else if (found & (POLLHUP | POLLERR)) {
		pause_for(10); /* no host for the moment: a restore has not connected it yet */
		return;
	}
	/* The host always reads, so that this may block. */
	while (guest.mux.out.len && mux_write_to(&guest.mux, guest.port_fd) > 0)
		;
}

/* The last word, once nothing of the sandbox is left to be passed on. */
static void tell_end(bool busy)
{
	if (!guest.ended || guest.told || busy)
		return;
	guest.told = true;
	guest_answer(OP_ENDED, 0, 0, &guest.status, sizeof guest.status);
}

static void serve(void)
{
	struct pollfd watched[ALL];
	for (;;) {
		bool busy = false;
		watched[AT_PORT] = (struct pollfd){.fd = guest.port_fd, .events = POLLIN};
		if (guest.mux.out.len)
			watched[AT_PORT].events |= POLLOUT;
		watched[AT_SIGNAL] = (struct pollfd){.fd = guest.signal_fd, .events = POLLIN};
		size_t n = mux_watch(&guest.mux, watched + AT_STREAMS);
		if (poll(watched, AT_STREAMS + n, guest.ended && !guest.told ? 0 : -1) < 0 && errno != EINTR) {
			guest_say("poll: %s", strerror(errno));
			guest_stop();
		}
		for (size_t i = AT_STREAMS; i < AT_STREAMS + n; i++)
			busy = busy || watched[i].revents;
		if (watched[AT_SIGNAL].revents)
			on_signal();
		else
			tell_end(busy);
		mux_serve(&guest.mux, watched + AT_STREAMS, n);
		on_port(watched[AT_PORT].revents);
		if (guest.mux.broken) {
			guest_say("what is to be sent has no room");
			guest_stop();
		}
	}
}

static int own_namespace(const char *name)
{
	char path[32];
	snprintf(path, sizeof path, "self/ns/%s", name);
	int fd = openat(guest.proc_fd, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) {
		guest_say("namespace %s: %s", name, strerror(errno));
		guest_stop();
	}
	return fd;
}

static void set_signals(void)
{
	sigset_t all, chld;
	struct rlimit files = {NOFILE_WANTED, NOFILE_WANTED};
	sigfillset(&all);
	sigemptyset(&chld);
	sigaddset(&chld, SIGCHLD);
	guest.signal_fd = signalfd(-1, &chld, SFD_CLOEXEC | SFD_NONBLOCK);
	guest.pid_fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
	if (sigprocmask(SIG_SETMASK, &all, NULL) < 0 || guest.signal_fd < 0 || guest.pid_fd < 0 ||
	    signal(SIGPIPE, SIG_IGN) == SIG_ERR || setrlimit(RLIMIT_NOFILE, &files) < 0) {
		guest_say("signals: %s", strerror(errno));
		guest_stop();
	}
}

int guest_main(void)
{
	static const struct mux_calls calls = {
		.open = guest_open, .control = guest_control, .event = on_event};
	guest.leash_fd = guest.ahead_fd = guest.random_fd = -1;
	guest_boot();
	/* The kernel's threads share the first process's root, and one that is
	 * shared cannot be taken to another namespace and back. */
	if (unshare(CLONE_FS) < 0)
		guest_stop();
	guest.uts_fd = own_namespace("uts");
	guest.mount_fd = own_namespace("mnt");
	guest.net_fd = own_namespace("net");
	set_signals();
	/* A page that is not there costs each fork more than all the memory costs. */
	if (mlockall(MCL_CURRENT) < 0)
		guest_say("memory: %s", strerror(errno));
	mux_init(&guest.mux, &calls, false);
	serve();
	return 1;
}
