/* SHUTDOWN: SIGTERM, a grace, SIGKILL, an answer, the end. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { POLL_MS = 2, KILL_MS = 5000 };

static struct conn *asker;
static uint32_t asked_on;
static uint64_t kill_ms, end_ms, next_ms;

bool shutdown_active(void)
{
	return kill_ms != 0;
}

void shutdown_request(struct conn *conn, uint32_t channel, uint32_t grace_ms)
{
	if (shutdown_active()) {
		conn_error(conn, channel, EALREADY, "the sandbox is shutting down");
		return;
	}
	freeze_undo();
	asker = conn;
	asked_on = channel;
	kill_ms = now_ms() + grace_ms;
	end_ms = kill_ms + KILL_MS;
	next_ms = now_ms();
	/* Supervisors keep every signal blocked and live on to see their commands out. */
	if (grace_ms) {
		(void)kill(-1, SIGTERM);
		(void)kill(-1, SIGCONT);
	}
	wake_at(next_ms);
}

void shutdown_forget(struct conn *conn)
{
	if (asker == conn)
		asker = NULL;
}

static void finish(void)
{
	if (asker)
		conn_send(asker, WF_REPLY, asked_on, NULL, 0);
	asker = NULL;
	conns_flush();
	end_sandbox(WF_END_ASKED);
}

void shutdown_time(uint64_t now)
{
	siginfo_t info;
	if (!shutdown_active())
		return;
	if (now >= next_ms) {
		if (now >= kill_ms)
			(void)kill(-1, SIGKILL);
		bool empty =
			waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0 && errno == ECHILD;
		if (empty || now >= end_ms)
			finish();
		next_ms = now + POLL_MS;
	}
	wake_at(next_ms);
}
