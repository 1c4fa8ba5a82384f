/* EXEC: a new command, started now or kept until a hold ends. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_QUEUED_BYTES = 64 * 1024 * 1024, MAX_DRAIN_MS = 60 * 1000 };

static const uint64_t longest_timeout_ms = UINT64_MAX / 4; /* so that sums stay in range */

static void remember_argv(struct command *command, const struct exec_request *request)
{
	uint8_t packed[ARGV_SHOWN];
	struct writer w = {.at = packed, .left = sizeof packed};
	for (uint32_t i = 0; i < request->argc && !w.full; i++) {
		size_t len = strlen(request->argv[i]);
		size_t room = w.left > 4 ? w.left - 4 : 0;
		if (room == 0 && len)
			break;
		write_str(&w, request->argv[i], len < room ? len : room);
		command->argc_shown += !w.full;
	}
	command->argv_shown_len = sizeof packed - w.left;
	command->argv_shown = malloc(command->argv_shown_len + 1);
	if (command->argv_shown)
		memcpy(command->argv_shown, packed, command->argv_shown_len);
	else
		command->argv_shown_len = command->argc_shown = 0;
}

static struct command *command_new(struct conn *conn, uint32_t id,
				   const struct exec_request *request)
{
	struct command *command = calloc(1, sizeof *command);
	if (!command)
		return NULL;
	command->control_fd = command->in.fd = -1;
	for (int i = 0; i < 2; i++) {
		command->out[i].fd = -1;
		command->out[i].index = i;
		command->out[i].command = command;
	}
	struct channel *channel = channel_new(conn, id, command);
	if (!channel) {
		free(command);
		return NULL;
	}
	channel->starter = channel->follow = true;
	channel->credit = request->credit;
	if (request->flags & WF_EXEC_STDIN)
		command->in.claim = channel;
	command->flags = request->flags;
	command->drain_ms = request->drain_ms < MAX_DRAIN_MS ? request->drain_ms : MAX_DRAIN_MS;
	command->timeout_ms = request->timeout_ms < longest_timeout_ms ? request->timeout_ms : longest_timeout_ms;
	remember_argv(command, request);
	command->next = srv.commands;
	srv.commands = command;
	return command;
}

/* Decodes once more, from a copy: the strings lie in the payload. */
static int keep_request(struct command *command, struct exec_request *request,
			const struct frame *frame)
{
	if (srv.queued_bytes + frame->length > MAX_QUEUED_BYTES)
		return EAGAIN;
	command->payload = malloc(frame->length);
	if (!command->payload)
		return ENOMEM;
	command->payload_len = frame->length;
	srv.queued_bytes += frame->length;
	memcpy(command->payload, frame->payload, frame->length);
	ptrdiff_t moved = (char *)command->payload - (char *)frame->payload;
	for (uint32_t i = 0; i < request->argc; i++)
		request->argv[i] += moved;
	for (uint32_t i = 0; i < request->envc; i++)
		request->envp[i] += moved;
	request->user += moved;
	request->cwd += moved;
	command->request = *request;
	request->argv = NULL;
	return 0;
}

static unsigned live_commands(void)
{
	unsigned n = 0;
	for (struct command *command = srv.commands; command; command = command->next)
		n += command->supervisor != 0 || command->state < COMMAND_ENDED;
	return n;
}

void command_exec(struct conn *conn, struct frame *frame, struct exec_request *request)
{
	struct command *command =
		live_commands() < MAX_COMMANDS ? command_new(conn, frame->channel, request) : NULL;
	if (!command) {
		conn_error(conn, frame->channel, EAGAIN, "too many commands at once");
	} else if (hold_active()) {
		int error = keep_request(command, request, frame);
		if (error)
			command_not_started(command, error, "cannot keep it until the hold ends");
	} else {
		command_launch(command, request);
	}
	exec_free(request);
}

/* The list is newest first; what waited longest goes first. */
static struct command *oldest_queued(void)
{
	struct command *oldest = NULL;
	for (struct command *command = srv.commands; command; command = command->next)
		if (command->state == COMMAND_QUEUED)
			oldest = command;
	return oldest;
}

void command_start_queued(void)
{
	for (struct command *command; !hold_active() && (command = oldest_queued());) {
		struct exec_request request = command->request;
		command->request.argv = NULL;
		command_launch(command, &request);
		exec_free(&request);
		if (!command->buried)
			command_forget_request(command);
	}
}
