/* HOLD and RELEASE: no new command starts while somebody holds. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <string.h>

enum { MAX_HOLDS = 64 };

struct hold {
	struct conn *conn;
	uint32_t channel, ttl_ms;
};

/* The first one holds, until until_ms; the others wait for their turn. */
static struct hold holds[MAX_HOLDS];
static unsigned n_holds;
static uint64_t until_ms;

bool hold_active(void)
{
	return n_holds > 0 || freeze_state() != FREEZE_NONE;
}

unsigned hold_count(void)
{
	return n_holds;
}

static void grant(void)
{
	uint8_t payload[8];
	struct writer w = {.at = payload, .left = sizeof payload};
	unsigned running = commands_running();
	unsigned inside = processes_inside();
	until_ms = now_ms() + holds[0].ttl_ms;
	wake_at(until_ms);
	write_u32(&w, running);
	write_u32(&w, inside > running ? inside - running : 0);
	conn_send(holds[0].conn, WF_REPLY, holds[0].channel, payload, sizeof payload);
}

static void drop(unsigned at)
{
	memmove(&holds[at], &holds[at + 1], (n_holds - at - 1) * sizeof *holds);
	n_holds--;
	if (at == 0 && n_holds)
		grant();
	else if (!n_holds)
		until_ms = 0;
	command_start_queued();
}

void hold_request(struct conn *conn, uint32_t channel, uint32_t ttl_ms)
{
	if (n_holds == MAX_HOLDS) {
		conn_error(conn, channel, EAGAIN, "too many requests to hold");
		return;
	}
	holds[n_holds++] = (struct hold){.conn = conn, .channel = channel, .ttl_ms = ttl_ms};
	if (n_holds == 1)
		grant();
}

void hold_release(struct conn *conn, uint32_t channel)
{
	if (n_holds == 0 || holds[0].conn != conn) {
		conn_error(conn, channel, ESTALE,
			   "this connection does not hold the sandbox (any more)");
		return;
	}
	conn_send(conn, WF_REPLY, channel, NULL, 0);
	drop(0);
}

void hold_forget(struct conn *conn)
{
	for (unsigned i = n_holds; i-- > 0;)
		if (holds[i].conn == conn)
			drop(i);
}

void hold_time(uint64_t now)
{
	while (n_holds && now >= until_ms)
		drop(0);
	wake_at(until_ms);
}
