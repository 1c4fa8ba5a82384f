/* Clients of keep's `control`: requests to the guest, one at a time each, and
 * streams to more than the sandbox. */
#define _GNU_SOURCE
#include "keep.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct client {
	bool used, waits; /* waits: for an answer, or to become quiet */
	bool quiet;	  /* has asked for QUIESCE */
	int fd;
	uint32_t tag, theirs;
	struct mux_buffer in, out;
};

static struct client clients[KEEP_CLIENTS];
static uint32_t last_tag;

static void forget(struct client *client, bool close_it)
{
	if (client->quiet) {
		/* It may have stopped the machine, and cannot undo that any more. */
		monitor_continue();
		mux_go(&keep.mux);
	}
	if (close_it)
		close(client->fd);
	mux_drop(&client->in);
	mux_drop(&client->out);
	*client = (struct client){0};
}

void clients_accept(void)
{
	int fd = keep_accept(keep.control_fd);
	if (fd < 0)
		return;
	for (size_t i = 0; i < KEEP_CLIENTS; i++)
		if (!clients[i].used) {
			clients[i] = (struct client){.used = true, .fd = fd};
			return;
		}
	close(fd);
}

static void answer(struct client *client, enum mux_kind kind, const void *payload, uint32_t size)
{
	uint16_t head[2] = {(uint16_t)kind, 0};
	client->waits = false;
	if (!mux_append(&client->out, &size, 4) || !mux_append(&client->out, head, 4) ||
	    !mux_append(&client->out, payload, size))
		forget(client, true);
}

void clients_answer(const uint8_t *payload, uint32_t size)
{
	static uint8_t copy[MUX_PAYLOAD];
	uint32_t tag;
	memcpy(&tag, payload + 4, 4);
	for (size_t i = 0; i < KEEP_CLIENTS; i++)
		if (clients[i].used && clients[i].waits && clients[i].tag == tag) {
			memcpy(copy, payload, size);
			memcpy(copy + 4, &clients[i].theirs, 4);
			answer(&clients[i], MUX_CONTROL, copy, size);
			return;
		}
	/* Its client is gone. */
}

void clients_quiet(void)
{
	for (size_t i = 0; i < KEEP_CLIENTS; i++)
		if (clients[i].used && clients[i].waits && clients[i].quiet)
			answer(&clients[i], MUX_QUIET, NULL, 0);
}

static bool ask(struct client *client, uint8_t *payload, uint32_t size)
{
	if (size < MUX_CONTROL_HEAD)
		return false;
	memcpy(&client->theirs, payload + 4, 4);
	client->tag = ++last_tag ? last_tag : ++last_tag; /* 0 is the guest's own */
	memcpy(payload + 4, &client->tag, 4);
	client->waits = true;
	mux_send(&keep.mux, MUX_CONTROL, 0, payload, size);
	return true;
}

static bool become_stream(struct client *client, const uint8_t *payload, uint32_t size)
{
	uint16_t target;
	if (size < 2)
		return false;
	memcpy(&target, payload, 2);
	if (client->quiet || !mux_open(&keep.mux, client->fd, target, payload + 2, size - 2))
		return false;
	forget(client, false);
	return true;
}

/* False: the client broke a rule. */
static bool request(struct client *client, uint16_t kind, uint8_t *payload, uint32_t size)
{
	switch (kind) {
	case MUX_CONTROL:
		return ask(client, payload, size);
	case MUX_OPEN:
		return become_stream(client, payload, size);
	case MUX_QUIESCE:
		if (size || keep.mux.held) /* one at a time rests the machine */
			return false;
		mux_quiesce(&keep.mux);
		client->quiet = client->waits = true;
		return true;
	case MUX_GO:
		if (size || !client->quiet)
			return false;
		mux_go(&keep.mux);
		client->quiet = false;
		answer(client, MUX_GO, NULL, 0);
		return true;
	default:
		return false;
	}
}

/* Never reads past the frame: what is behind an OPEN is the stream's. */
static void hear(struct client *client)
{
	static uint8_t block[MUX_HEADER + MUX_PAYLOAD];
	uint32_t size = 0;
	uint16_t kind;
	size_t want = MUX_HEADER;
	if (client->in.len >= MUX_HEADER) {
		memcpy(&size, client->in.data + client->in.at, 4);
		want = MUX_HEADER + (size_t)size;
	}
	if (want > client->in.len) {
		ssize_t got = read(client->fd, block, want - client->in.len);
		if (got < 0 && (errno == EAGAIN || errno == EINTR))
			return;
		if (got <= 0 || !mux_append(&client->in, block, (size_t)got)) {
			forget(client, true);
			return;
		}
		if (client->in.len < MUX_HEADER)
			return;
		memcpy(&size, client->in.data + client->in.at, 4);
	}
	if (size > MUX_PAYLOAD) {
		forget(client, true);
		return;
	}
	if (client->in.len < MUX_HEADER + (size_t)size)
		return;
	memcpy(block, client->in.data + client->in.at, client->in.len);
	mux_drop(&client->in);
	memcpy(&kind, block + 4, 2);
	if (!request(client, kind, block + MUX_HEADER, size))
		forget(client, true);
}

static void speak(struct client *client)
{
	ssize_t sent = send(client->fd, client->out.data + client->out.at, client->out.len,
			    MSG_NOSIGNAL | MSG_DONTWAIT);
	if (sent >= 0)
		mux_consume(&client->out, (size_t)sent);
	else if (errno != EAGAIN && errno != EINTR)
		forget(client, true);
}

/* Who rests the machine is heard alone, and nobody before it runs again. */
static bool may_speak(const struct client *client)
{
	return !monitor_busy() && (!keep.mux.held || client->quiet);
}

size_t clients_watch(struct pollfd *watched)
{
	for (size_t i = 0; i < KEEP_CLIENTS; i++) {
		const struct client *client = &clients[i];
		short events = POLLRDHUP;
		if (client->out.len)
			events |= POLLOUT;
		else if (!client->waits)
			events = may_speak(client) ? POLLIN | POLLRDHUP : 0;
		watched[i] = (struct pollfd){.fd = client->used && events ? client->fd : -1, .events = events};
	}
	return KEEP_CLIENTS;
}

void clients_serve(const struct pollfd *watched)
{
	for (size_t i = 0; i < KEEP_CLIENTS; i++) {
		struct client *client = &clients[i];
		short found = watched[i].revents;
		if (!found || !client->used || client->fd != watched[i].fd)
			continue;
		if (client->waits) { /* it sends nothing meanwhile: this is its end */
			if (found & (POLLRDHUP | POLLHUP | POLLERR))
				forget(client, true);
		} else if (client->out.len) {
			speak(client);
		} else if (may_speak(client)) { /* another may rest the machine since */
			hear(client);
		}
	}
}
