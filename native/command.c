/* The life of a command, as PID 1 sees it. */
#define _GNU_SOURCE
#include "serve.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DRAIN_ROUNDS = 8 };

struct command *command_by_supervisor(pid_t pid)
{
	for (struct command *command = srv.commands; command; command = command->next)
		if (command->supervisor == pid)
			return command;
	return NULL;
}

struct command *command_by_pid(uint32_t pid)
{
	struct command *ended = NULL;
	for (struct command *command = srv.commands; command; command = command->next) {
		if ((uint32_t)command->pid != pid || pid == 0 || command->state < COMMAND_RUNNING)
			continue;
		if (command->state == COMMAND_RUNNING)
			return command;
		if (!ended && (command->flags & WF_EXEC_KEEP))
			ended = command; /* the newest with this number */
	}
	return ended;
}

void command_forget_request(struct command *command)
{
	exec_free(&command->request);
	free(command->payload);
	srv.queued_bytes -= command->payload_len;
	command->payload = NULL;
	command->payload_len = 0;
}

static void command_bury(struct command *command)
{
	for (struct command **at = &srv.commands; *at; at = &(*at)->next) {
		if (*at == command) {
			*at = command->next;
			break;
		}
	}
	command->buried = true;
	command_forget_request(command);
	for (int i = 0; i < 2; i++) {
		stream_close(&command->out[i]);
		ring_free(&command->out[i].ring);
	}
	input_close(&command->in);
	if (command->control_fd >= 0) {
		unwatch(command->control_fd);
		close(command->control_fd);
	}
	command->control.ready = NULL;
	free(command->argv_shown);
	release_later(command);
}

/* Ended KEEP commands stay for LIST and ATTACH: the last few, within memory. */
static void forget_old(void)
{
	unsigned ended = 0;
	struct command *oldest = NULL;
	for (struct command *command = srv.commands; command; command = command->next) {
		if (command->state != COMMAND_DONE || !(command->flags & WF_EXEC_KEEP))
			continue;
		ended++;
		if (!command->channels && command->supervisor == 0 &&
		    stream_finished(&command->out[0]) && stream_finished(&command->out[1]))
			oldest = command;
	}
	if (oldest && (ended > MAX_ENDED || rings_bytes() > RING_BUDGET / 2))
		command_bury(oldest);
}

static bool is_over(const struct command *command)
{
	if (command->state != COMMAND_DONE || command->channels || command->supervisor != 0)
		return false;
	return !(command->flags & WF_EXEC_KEEP) && command->out[0].fd < 0 && command->out[1].fd < 0;
}

void command_exit_frame(struct channel *channel)
{
	const struct command *command = channel->command;
	uint8_t payload[44];
	struct writer w = {.at = payload, .left = sizeof payload};
	write_u32(&w, (uint32_t)command->reason);
	write_u32(&w, (uint32_t)command->exit_code);
	write_u32(&w, (uint32_t)command->signal);
	write_u64(&w, command->usage.user_us);
	write_u64(&w, command->usage.sys_us);
	write_u64(&w, command->usage.maxrss_kib);
	write_u64(&w, command->usage.wall_us);
	conn_send(channel->conn, WF_EXIT, channel->id, payload, sizeof payload);
}

static void command_done(struct command *command)
{
	command->state = COMMAND_DONE;
	command->drain_at = 0;
	for (struct channel *channel = command->channels, *next; channel; channel = next) {
		next = channel->next_in_command;
		if ((command->flags & WF_EXEC_KEEP) && !channel->quiet) {
			channel_pump(channel);
		} else {
			command_exit_frame(channel);
			channel_free(channel);
		}
	}
	for (int i = 0; i < 2; i++)
		stream_resume(&command->out[i]);
}

/* Is the tree gone, and has its output been taken? */
static bool may_finish(const struct command *command)
{
	if (command->killed && command->supervisor != 0 && command->reason != WF_REASON_NOT_STARTED)
		return false;
	return stream_finished(&command->out[0]) && stream_finished(&command->out[1]);
}

void command_settle(struct command *command)
{
	if (command->buried)
		return;
	if (command->state == COMMAND_ENDED && may_finish(command))
		command_done(command);
	if (is_over(command))
		command_bury(command);
	else if (command->state == COMMAND_DONE)
		forget_old();
}

static void drain_over(struct command *command)
{
	command->drain_at = 0;
	command->drained = true;
	for (int i = 0; i < 2; i++)
		stream_last_call(&command->out[i]);
}

/* The command's own process ended, or never was. */
void command_ended(struct command *command)
{
	command->state = COMMAND_ENDED;
	command->timeout_at = 0;
	command->ended_unix_ms = unix_ms();
	input_close(&command->in);
	for (int i = 0; i < 2; i++)
		stream_read(&command->out[i], DRAIN_ROUNDS);
	if (command->drain_ms == 0 || command->reason == WF_REASON_NOT_STARTED) {
		drain_over(command);
	} else {
		command->drain_at = now_ms() + command->drain_ms;
		wake_at(command->drain_at);
	}
	command_settle(command);
}

static void tell_not_started(struct command *command, const char *text)
{
	char line[300];
	int n = snprintf(line, sizeof line, "%s: %s\n", text, strerror(command->exit_code));
	for (struct channel *channel = command->channels; channel;
	     channel = channel->next_in_command) {
		size_t len = n > 0 ? strnlen(line, sizeof line) : 0;
		if (len > channel->credit)
			len = (size_t)channel->credit;
		if (len && !channel->quiet && !(command->flags & WF_EXEC_DISCARD_ERR)) {
			channel->credit -= len;
			conn_send(channel->conn, WF_STDERR, channel->id, line, len);
		}
	}
}

void command_not_started(struct command *command, int error, const char *text)
{
	command->reason = WF_REASON_NOT_STARTED;
	command->exit_code = error;
	command->reported = true;
	command->flags &= ~(uint32_t)WF_EXEC_KEEP;
	tell_not_started(command, text);
	command_ended(command);
}

static void command_deadlines(struct command *command, uint64_t now)
{
	if (command->timeout_at && now >= command->timeout_at && !freeze_active()) {
		command->timeout_at = 0;
		command_kill(command, WF_REASON_TIMEOUT);
	}
	if (command->kill_at && now >= command->kill_at) {
		command->kill_at = 0;
		if (command->supervisor)
			(void)kill(command->supervisor, SIGKILL);
	}
	if (command->state == COMMAND_ENDED && command->drain_at && now >= command->drain_at) {
		drain_over(command);
		command_settle(command);
		return;
	}
	if (!freeze_active())
		wake_at(command->timeout_at);
	wake_at(command->kill_at);
	wake_at(command->drain_at);
}

void command_time(uint64_t now)
{
	bool tick = srv.tick_ms && now >= srv.tick_ms;
	if (tick)
		srv.tick_ms = 0;
	for (struct command *command = srv.commands, *next; command; command = next) {
		next = command->next;
		for (int i = 0; tick && i < 2; i++) {
			command->out[i].slow = false;
			stream_resume(&command->out[i]);
		}
		command_deadlines(command, now);
	}
	wake_at(srv.tick_ms);
}

void command_shift(uint64_t ms)
{
	for (struct command *command = srv.commands; command; command = command->next)
		if (command->timeout_at) {
			command->timeout_at += ms;
			wake_at(command->timeout_at);
		}
}
