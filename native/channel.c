/* A client's view of a command: its credit and its place in kept output. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <stdlib.h>

enum {
	PATIENCE_MS = 1000, /* how long a lagging viewer may hold up a KEEP process */
	LAG_BYTES = RING_MAX / 2,
	CHUNK = 64 * 1024,
	MAX_CHANNELS = 4096, /* of one connection */
};

struct channel *channel_new(struct conn *conn, uint32_t id, struct command *command)
{
	unsigned n = 0;
	for (struct channel *other = conn->channels; other; other = other->next_in_conn)
		n++;
	struct channel *channel = n < MAX_CHANNELS ? calloc(1, sizeof *channel) : NULL;
	if (!channel)
		return NULL;
	channel->conn = conn;
	channel->id = id;
	channel->command = command;
	channel->credit_ms = now_ms();
	channel->next_in_conn = conn->channels;
	conn->channels = channel;
	channel->next_in_command = command->channels;
	command->channels = channel;
	return channel;
}

void channel_free(struct channel *channel)
{
	struct channel **at;
	for (at = &channel->conn->channels; *at != channel; at = &(*at)->next_in_conn)
		;
	*at = channel->next_in_conn;
	for (at = &channel->command->channels; *at != channel; at = &(*at)->next_in_command)
		;
	*at = channel->next_in_command;
	if (channel->command->in.claim == channel)
		channel->command->in.claim = NULL;
	release_later(channel);
}

void channel_close(struct channel *channel)
{
	struct command *command = channel->command;
	bool ends = channel->starter && !(command->flags & WF_EXEC_KEEP) &&
		    command->state < COMMAND_ENDED;
	channel_free(channel);
	if (ends)
		command_kill(command, WF_REASON_CANCELLED);
	for (int i = 0; i < 2; i++)
		stream_resume(&command->out[i]);
	command_settle(command);
}

bool channel_holds_up(const struct channel *channel, const struct stream *stream, uint64_t now)
{
	if (channel->quiet || stream->ring.total - channel->cursor[stream->index] < LAG_BYTES)
		return false;
	return now - channel->credit_ms < PATIENCE_MS;
}

/* What the ring has lost since this viewer's place is told before what is left. */
static void tell_truncated(struct channel *channel)
{
	uint8_t payload[8];
	struct writer w = {.at = payload, .left = sizeof payload};
	uint64_t lost = 0;
	for (int i = 0; i < 2; i++) {
		const struct ring *ring = &channel->command->out[i].ring;
		if (channel->cursor[i] < ring->start) {
			lost += ring->start - channel->cursor[i];
			channel->cursor[i] = ring->start;
		}
	}
	if (!lost)
		return;
	write_u64(&w, lost);
	conn_send(channel->conn, WF_TRUNCATED, channel->id, payload, sizeof payload);
}

/* Sends one piece of stream i; false when there is none, or no room. */
static bool send_piece(struct channel *channel, int i)
{
	const struct ring *ring = &channel->command->out[i].ring;
	uint64_t end = channel->follow || channel->until[i] > ring->total ? ring->total
									  : channel->until[i];
	if (channel->cursor[i] >= end)
		return false;
	uint64_t n = end - channel->cursor[i];
	if (n > CHUNK)
		n = CHUNK;
	if (n > channel->credit)
		n = channel->credit;
	uint8_t *at = n && conn_has_room(channel->conn)
			      ? conn_room(channel->conn, WF_HEADER + (size_t)n)
			      : NULL;
	if (!at)
		return false;
	frame_header(at, (uint32_t)n, i ? WF_STDERR : WF_STDOUT, 0, channel->id);
	ring_get(ring, channel->cursor[i], at + WF_HEADER, (size_t)n);
	conn_commit(channel->conn, WF_HEADER + (size_t)n);
	channel->credit -= n;
	channel->cursor[i] += n;
	return true;
}

static bool caught_up(const struct channel *channel)
{
	for (int i = 0; i < 2; i++) {
		uint64_t end =
			channel->follow ? channel->command->out[i].ring.total : channel->until[i];
		if (channel->cursor[i] < end)
			return false;
	}
	return true;
}

void channel_pump(struct channel *channel)
{
	struct command *command = channel->command;
	if (channel->quiet) {
		if (command->state == COMMAND_DONE) {
			command_exit_frame(channel);
			channel_free(channel);
		}
		return;
	}
	bool more = true;
	while (more && channel->credit && conn_has_room(channel->conn)) {
		tell_truncated(channel);
		more = send_piece(channel, 0);
		more = send_piece(channel, 1) || more;
	}
	if (!caught_up(channel))
		return;
	if (command->state == COMMAND_DONE)
		command_exit_frame(channel);
	else if (!channel->follow)
		conn_send(channel->conn, WF_REPLY, channel->id, NULL, 0);
	else
		return;
	channel_free(channel);
}

/* There is credit or room again. */
void channel_resume(struct channel *channel)
{
	struct command *command = channel->command;
	if (command->flags & WF_EXEC_KEEP) {
		channel_pump(channel);
		return;
	}
	if (!channel->starter || !channel->credit || !conn_has_room(channel->conn))
		return;
	if (command->state == COMMAND_ENDED) {
		for (int i = 0; i < 2; i++)
			stream_read(&command->out[i], 1);
		command_settle(command);
		if (command->buried)
			return;
	}
	for (int i = 0; i < 2; i++)
		stream_resume(&command->out[i]);
}

void channel_credit(struct channel *channel, uint32_t bytes)
{
	channel->credit += bytes;
	channel->credit_ms = now_ms();
	channel_resume(channel);
}

static int check_attach(const struct command *command, uint32_t flags, const char **why)
{
	*why = "no such process";
	if (!command)
		return ESRCH;
	*why = "unknown flags";
	if (flags & ~(uint32_t)WF_ATTACH_ALL)
		return EINVAL;
	*why = "this process does not keep its output; attach without output";
	if (!(flags & WF_ATTACH_QUIET) && !(command->flags & WF_EXEC_KEEP))
		return ENOTSUP;
	*why = "its stdin is not open";
	if ((flags & WF_ATTACH_CLAIM) && (command->in.fd < 0 || command->in.eof))
		return EPIPE;
	*why = "another client writes its stdin";
	if ((flags & WF_ATTACH_CLAIM) &&
	    (command->in.claim || command->in.queue.len > STDIN_LIMIT - WF_STDIN_CREDIT))
		return EBUSY;
	return 0;
}

void channel_attach(struct conn *conn, uint32_t id, uint32_t pid, uint32_t credit, uint32_t flags)
{
	uint8_t payload[4];
	struct writer w = {.at = payload, .left = sizeof payload};
	struct command *command = command_by_pid(pid);
	const char *why;
	int error = check_attach(command, flags, &why);
	struct channel *channel = error ? NULL : channel_new(conn, id, command);
	if (!channel) {
		conn_error(conn, id, error ? error : EAGAIN, "%s",
			   error ? why : "too many channels");
		return;
	}
	channel->credit = credit;
	channel->quiet = flags & WF_ATTACH_QUIET;
	channel->follow = channel->quiet || (flags & WF_ATTACH_FOLLOW);
	for (int i = 0; i < 2; i++) {
		channel->until[i] = command->out[i].ring.total;
		channel->cursor[i] = flags & WF_ATTACH_REPLAY ? 0 : channel->until[i];
	}
	if (flags & WF_ATTACH_CLAIM) {
		command->in.claim = channel;
		command->in.owed = 0;
	}
	channel->told_start = true;
	write_u32(&w, pid);
	conn_send(conn, WF_STARTED, id, payload, sizeof payload);
	channel_pump(channel);
}
