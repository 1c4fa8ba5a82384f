/* keep's loop: who ends the machine, and what goes through. */
#define _GNU_SOURCE
#include "keep.h"
#include "wf.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
	AT_AGENT, AT_MACHINE, AT_OWNER, AT_LEASH, AT_WORDS, AT_SOCK, AT_CONTROL, AT_MONITOR, AT_CLIENTS,
	AT_STREAMS = AT_CLIENTS + KEEP_CLIENTS,
	ALL = AT_STREAMS + MUX_STREAMS,
	FRAME_ERROR_TYPE = 106,
	LAST_BYTES_MS = 500,
	REFUSED_PAUSE_MS = 20,
	WORDS_TURNS = 64, /* what a pipe holds */
};

static uint64_t accept_ms; /* no new connection before: out of descriptors */

static void tell_owner(int32_t error, const char *what, const char *detail, size_t size)
{
	char payload[8 + 2048];
	int n = snprintf(payload + 8, sizeof payload - 8, "%s%.*s", what, (int)size, detail);
	uint32_t length = n < 0 ? 0 : (uint32_t)n;
	if (length > sizeof payload - 9)
		length = sizeof payload - 9;
	memcpy(payload, &error, 4);
	memcpy(payload + 4, &length, 4);
	report(FRAME_ERROR_TYPE, payload, 8 + length);
}

/* Keeps the last of what the machine's program said. Not for as long as there
 * is something: one that never stops talking would have this hear nobody else. */
static void hear_words(void)
{
	char block[1024];
	ssize_t n = 1;
	for (int turn = 0; turn < WORDS_TURNS && (n = read(keep.stderr_fd, block, sizeof block)) > 0; turn++) {
		size_t got = (size_t)n, room = sizeof keep.last_words - keep.n_last_words;
		if (got > room) {
			size_t drop = got - room;
			memmove(keep.last_words, keep.last_words + drop, keep.n_last_words - drop);
			keep.n_last_words -= drop;
		}
		memcpy(keep.last_words + keep.n_last_words, block, got);
		keep.n_last_words += got;
	}
	if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
		close(keep.stderr_fd);
		keep.stderr_fd = -1;
	}
}

static _Noreturn void machine_ended(void)
{
	if (keep.stderr_fd >= 0)
		hear_words();
	tell_owner(0, "keep: the machine ended: ", keep.last_words, keep.n_last_words);
	keep_end(WF_END_MACHINE);
}

static _Noreturn void guest_broke(void)
{
	tell_owner(EPROTO, "keep: the guest sent what is no frame", "", 0);
	keep_end(WF_END_GUEST);
}

static void on_ended(const uint8_t *body, size_t size)
{
	int32_t status = WF_END_BROKEN;
	if (size == sizeof status)
		memcpy(&status, body, sizeof status);
	if (status >= 256)
		keep.end_code = WF_END_INIT;
	else if (status == WF_END_ASKED || status == WF_END_TIME)
		keep.end_code = status;
	else
		keep.end_code = WF_END_BROKEN;
	keep.last_ms = keep_now_ms() + LAST_BYTES_MS;
}

static void on_control(struct mux *mux, const uint8_t *payload, uint32_t size)
{
	uint16_t op;
	(void)mux;
	memcpy(&op, payload, 2);
	if (op == OP_ENDED)
		on_ended(payload + MUX_CONTROL_HEAD, size - MUX_CONTROL_HEAD);
	else
		clients_answer(payload, size);
}

static void on_event(struct mux *mux, enum mux_kind kind)
{
	if (kind == MUX_QUIET) {
		clients_quiet();
		return;
	}
	keep.ready = true;
	report(FRAME_READY, &mux->generation, sizeof mux->generation);
}

void keep_mux(void)
{
	static const struct mux_calls calls = {.control = on_control, .event = on_event};
	keep.end_code = -1;
	mux_init(&keep.mux, &calls, true);
}

int keep_accept(int listen_fd)
{
	struct ucred peer;
	socklen_t size = sizeof peer;
	int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd < 0) {
		/* The peer stays in the queue, and so would this event. */
		if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
			accept_ms = keep_now_ms() + REFUSED_PAUSE_MS;
		return -1;
	}
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && size == sizeof peer &&
	    (peer.uid == 0 || peer.uid == keep.peer_uid))
		return fd;
	close(fd);
	return -1;
}

static void on_sock(void)
{
	int fd = keep_accept(keep.sock_fd);
	if (fd >= 0 && !mux_open(&keep.mux, fd, TO_SANDBOX, NULL, 0))
		close(fd);
}

static void on_agent(short found)
{
	if (found & (POLLIN | POLLHUP | POLLERR)) {
		int got = mux_read_from(&keep.mux, keep.agent_fd);
		if (got < 0 && errno == EPROTO)
			guest_broke();
		if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
			machine_ended();
	}
	if (found & POLLOUT && keep.mux.out.len && mux_write_to(&keep.mux, keep.agent_fd) < 0 &&
	    errno != EAGAIN && errno != EINTR)
		machine_ended();
}

/* Readable only at its end: after the plan an owner says nothing more here. */
static void on_leash(void)
{
	char block[256];
	ssize_t got = read(PLAN_FD, block, sizeof block);
	if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR)))
		return;
	keep.leash = false;
	if (!keep.detached)
		keep_end(WF_END_ASKED);
}

/* How many streams there may be. */
static size_t watch_all(struct pollfd *watched)
{
	bool open = keep.ready && keep.end_code < 0 && keep_now_ms() >= accept_ms;
	for (int i = 0; i < AT_CLIENTS; i++)
		watched[i] = (struct pollfd){.fd = -1, .events = POLLIN};
	watched[AT_AGENT].fd = keep.agent_fd;
	if (keep.mux.out.len)
		watched[AT_AGENT].events |= POLLOUT;
	watched[AT_MACHINE].fd = keep.machine_pidfd;
	watched[AT_OWNER].fd = keep.owner_pidfd;
	watched[AT_LEASH].fd = keep.leash ? PLAN_FD : -1;
	watched[AT_WORDS].fd = keep.stderr_fd;
	watched[AT_SOCK].fd = open ? keep.sock_fd : -1;
	watched[AT_CONTROL].fd = open ? keep.control_fd : -1;
	watched[AT_MONITOR] = monitor_watch();
	(void)clients_watch(watched + AT_CLIENTS);
	return mux_watch(&keep.mux, watched + AT_STREAMS);
}

static int wait_ms(void)
{
	uint64_t now = keep_now_ms(), until = now + 60000;
	if (keep.ends_ms && keep.ends_ms < until)
		until = keep.ends_ms;
	if (keep.end_code >= 0 && keep.last_ms < until)
		until = keep.last_ms;
	if (accept_ms > now && accept_ms < until)
		until = accept_ms;
	if (monitor_due_ms() < until)
		until = monitor_due_ms();
	return until <= now ? 0 : (int)(until - now);
}

static bool still_to_pass_on(void)
{
	for (size_t i = 0; i < MUX_STREAMS; i++)
		if (keep.mux.streams[i].used && keep.mux.streams[i].fd >= 0 && keep.mux.streams[i].in.len)
			return true;
	return false;
}

static void check_ends(const struct pollfd *watched)
{
	uint64_t now = keep_now_ms();
	if (watched[AT_OWNER].revents) {
		if (!keep.detached)
			keep_end(WF_END_ASKED);
		keep.owner_pidfd = -1;
	}
	if (watched[AT_LEASH].revents)
		on_leash();
	if (keep.ends_ms && now >= keep.ends_ms)
		keep_end(WF_END_TIME);
	if (keep.end_code >= 0 && (now >= keep.last_ms || !still_to_pass_on()))
		keep_end(keep.end_code);
	if (watched[AT_WORDS].revents)
		hear_words();
}

void keep_serve(void)
{
	struct pollfd watched[ALL];
	for (;;) {
		size_t n = watch_all(watched);
		if (poll(watched, AT_STREAMS + n, wait_ms()) < 0) {
			if (errno == EINTR)
				continue;
			keep_end(WF_END_BROKEN);
		}
		/* What the guest said last comes before that its machine is gone. */
		on_agent(watched[AT_AGENT].revents);
		check_ends(watched);
		if (watched[AT_MACHINE].revents)
			machine_ended();
		mux_serve(&keep.mux, watched + AT_STREAMS, n);
		monitor_serve(&watched[AT_MONITOR]);
		clients_serve(watched + AT_CLIENTS);
		if (watched[AT_SOCK].revents)
			on_sock();
		if (watched[AT_CONTROL].revents)
			clients_accept();
		if (keep.mux.broken)
			guest_broke();
	}
}
