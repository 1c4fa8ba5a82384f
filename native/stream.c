/* A command's output: read within its client's credit, into the ring of a
 * KEEP process, or thrown away once nobody can get it any more. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

enum {
	CHUNK = 64 * 1024,
	TICK_MS = 4, /* what nobody waits for is read at CHUNK per tick */
};

static uint8_t scratch[CHUNK];

static struct channel *starter_of(const struct command *command)
{
	for (struct channel *channel = command->channels; channel;
	     channel = channel->next_in_command)
		if (channel->starter)
			return channel;
	return NULL;
}

static void stream_arm(struct stream *stream, bool on)
{
	if (stream->armed == on || stream->fd < 0)
		return;
	if (on) {
		stream->armed = watch(stream->fd, &stream->source, EPOLLIN);
	} else {
		/* Out altogether: a hang-up is reported whatever is asked for. */
		unwatch(stream->fd);
		stream->armed = false;
	}
}

void stream_close(struct stream *stream)
{
	if (stream->fd < 0)
		return;
	stream_arm(stream, false);
	close(stream->fd);
	stream->fd = -1;
}

static void tick_soon(void)
{
	if (!srv.tick_ms)
		srv.tick_ms = now_ms() + TICK_MS;
	wake_at(srv.tick_ms);
}

static void slow_down(struct stream *stream)
{
	stream->slow = true;
	stream_arm(stream, false);
	tick_soon();
}

/* One read; returns what read() did, with errno EAGAIN for an empty stream. */
static ssize_t take(struct stream *stream, uint8_t *into, size_t n)
{
	ssize_t got;
	do
		got = read(stream->fd, into, n);
	while (got < 0 && errno == EINTR);
	stream->empty = got < 0 && errno == EAGAIN;
	/* A terminal without any process left reports EIO. */
	if (got == 0 || (got < 0 && !stream->empty))
		stream_close(stream);
	else if (got > 0 && stream->command->drained)
		stream->late_bytes += (uint64_t)got;
	return got;
}

static ssize_t read_direct(struct stream *stream, struct channel *channel)
{
	size_t n = channel->credit < CHUNK ? (size_t)channel->credit : CHUNK;
	int waiting = 0;
	uint8_t *at =
		n && conn_has_room(channel->conn) ? conn_room(channel->conn, WF_HEADER + n) : NULL;
	if (!at) {
		stream->empty = ioctl(stream->fd, FIONREAD, &waiting) == 0 && waiting == 0;
		stream_arm(stream, false);
		return -1;
	}
	ssize_t got = take(stream, at + WF_HEADER, n);
	if (got <= 0)
		return got;
	frame_header(at, (uint32_t)got, stream->index ? WF_STDERR : WF_STDOUT, 0, channel->id);
	conn_commit(channel->conn, WF_HEADER + (size_t)got);
	channel->credit -= (uint64_t)got;
	return got;
}

static bool held_up(struct stream *stream)
{
	uint64_t now = now_ms();
	for (struct channel *channel = stream->command->channels; channel;
	     channel = channel->next_in_command)
		if (channel_holds_up(channel, stream, now))
			return true;
	return false;
}

static ssize_t read_kept(struct stream *stream)
{
	struct command *command = stream->command;
	if (held_up(stream)) {
		slow_down(stream);
		return -1;
	}
	ssize_t got = take(stream, scratch, sizeof scratch);
	if (got <= 0)
		return got;
	ring_put(&stream->ring, scratch, (size_t)got);
	for (struct channel *channel = command->channels, *next; channel; channel = next) {
		next = channel->next_in_command;
		channel_pump(channel);
	}
	if (got == (ssize_t)sizeof scratch && !command->channels)
		slow_down(stream);
	return got;
}

static ssize_t read_away(struct stream *stream)
{
	ssize_t got = take(stream, scratch, sizeof scratch);
	if (got == (ssize_t)sizeof scratch)
		slow_down(stream);
	return got;
}

void stream_read(struct stream *stream, unsigned rounds)
{
	struct command *command = stream->command;
	ssize_t got = 1;
	while (rounds-- > 0 && got > 0 && stream->fd >= 0 && !stream->slow) {
		if (command->flags & WF_EXEC_KEEP) {
			got = read_kept(stream);
		} else {
			struct channel *channel = starter_of(command);
			got = channel ? read_direct(stream, channel) : read_away(stream);
		}
	}
}

/* The drain time is over. What the pipe can hold now is still the command's;
 * what comes after that is a background process talking. */
void stream_last_call(struct stream *stream)
{
	if (stream->fd < 0)
		return;
	int size = fcntl(stream->fd, F_GETPIPE_SZ);
	stream->late_limit = size > 0 ? (uint64_t)size : CHUNK;
	stream->late_bytes = 0;
	stream_read(stream, 1);
}

void stream_resume(struct stream *stream)
{
	if (stream->fd >= 0 && !stream->slow && stream->command->state >= COMMAND_RUNNING)
		stream_arm(stream, true);
}

static void on_output(struct source *source, uint32_t events)
{
	struct stream *stream =
		(struct stream *)(void *)((char *)source - offsetof(struct stream, source));
	(void)events;
	if (stream->fd < 0 || !stream->armed)
		return;
	stream_read(stream, 1);
	command_settle(stream->command);
}

bool stream_finished(const struct stream *stream)
{
	const struct command *command = stream->command;
	if (stream->fd < 0)
		return true;
	if (!command->drained)
		return false;
	if (command->killed && command->killed_for == WF_REASON_CANCELLED)
		return true;
	return stream->empty || stream->late_bytes >= stream->late_limit;
}

void stream_open(struct command *command, int index, int fd)
{
	struct stream *stream = &command->out[index];
	stream->source.ready = on_output;
	stream->command = command;
	stream->index = index;
	stream->fd = fd;
}

void stream_resize(struct stream *stream, uint16_t rows, uint16_t cols)
{
	struct winsize size = {.ws_row = rows, .ws_col = cols};
	if (stream->fd >= 0 && (stream->command->flags & WF_EXEC_PTY))
		(void)ioctl(stream->fd, TIOCSWINSZ, &size);
}
