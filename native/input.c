/* A command's stdin: a bounded queue in front of a pipe or a terminal. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { GIVE_BACK = 16 * 1024, END_OF_TRANSMISSION = 4 };

static void input_arm(struct input *input, bool on)
{
	if (input->armed == on || input->fd < 0)
		return;
	if (on) {
		input->armed = watch(input->fd, &input->source, EPOLLOUT);
	} else {
		unwatch(input->fd);
		input->armed = false;
	}
}

void input_close(struct input *input)
{
	if (input->fd >= 0) {
		input_arm(input, false);
		close(input->fd);
		input->fd = -1;
	}
	buffer_free(&input->queue);
}

static void give_back(struct input *input, size_t bytes)
{
	uint8_t payload[4];
	struct writer w = {.at = payload, .left = sizeof payload};
	if (!input->claim)
		return;
	input->owed += (uint32_t)bytes;
	if (input->owed == 0 || (input->owed < GIVE_BACK && input->queue.len))
		return;
	write_u32(&w, input->owed);
	input->owed = 0;
	conn_send(input->claim->conn, WF_STDIN_MORE, input->claim->id, payload, sizeof payload);
}

/* The command reads no more: what comes is dropped, and credit still given. */
static void input_break(struct input *input)
{
	size_t dropped = input->queue.len;
	input->broken = true;
	input_close(input);
	give_back(input, dropped);
}

void input_flush(struct command *command)
{
	struct input *input = &command->in;
	size_t done = 0;
	while (input->fd >= 0 && input->queue.len) {
		ssize_t n = write(input->fd, buffer_front(&input->queue), input->queue.len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			break;
		if (n <= 0) {
			give_back(input, done);
			input_break(input);
			return;
		}
		done += (size_t)n;
		buffer_take(&input->queue, (size_t)n);
	}
	give_back(input, done);
	if (input->fd >= 0 && input->eof && !input->queue.len && !input->tty)
		input_close(input);
	else
		input_arm(input, input->queue.len > 0);
}

bool input_put(struct channel *channel, const uint8_t *data, size_t len, bool eof)
{
	struct command *command = channel->command;
	struct input *input = &command->in;
	static const uint8_t end = END_OF_TRANSMISSION;
	if (input->eof || command->state >= COMMAND_ENDED)
		return true;
	if (input->broken) {
		give_back(input, len);
		return true;
	}
	size_t extra = eof && input->tty;
	if (input->queue.len + len > STDIN_LIMIT)
		return false;
	uint8_t *at = buffer_room(&input->queue, len + extra);
	if (!at && len + extra)
		return false;
	if (len)
		memcpy(at, data, len);
	if (extra)
		memcpy(at + len, &end, 1);
	input->queue.len += len + extra;
	input->eof = eof;
	if (command->state >= COMMAND_RUNNING) /* STARTED comes before any credit */
		input_flush(command);
	return true;
}

static void on_input(struct source *source, uint32_t events)
{
	struct input *input =
		(struct input *)(void *)((char *)source - offsetof(struct input, source));
	struct command *command =
		(struct command *)(void *)((char *)input - offsetof(struct command, in));
	(void)events;
	if (input->armed)
		input_flush(command);
}

void input_open(struct command *command, int fd, bool tty)
{
	command->in.source.ready = on_input;
	command->in.fd = fd;
	command->in.tty = tty;
	if (fd < 0)
		command->in.eof = true;
}
