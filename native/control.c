/* What a supervisor says, and what it is told. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { KILL_PATIENCE_MS = 5000 }; /* then the supervisor goes too, and PID 1 does its work */

static void command_refused(struct command *command, const struct control_message *message)
{
	while (command->channels) {
		struct channel *channel = command->channels;
		conn_error(channel->conn, channel->id, message->value, "%s", message->text);
		channel_free(channel);
	}
	command_not_started(command, message->value, message->text);
}

static void take_status(struct command *command, int status)
{
	command->reason = WF_REASON_EXITED;
	command->exit_code = WEXITSTATUS(status);
	if (!WIFSIGNALED(status))
		return;
	command->signal = WTERMSIG(status);
	command->exit_code = -command->signal;
	command->reason = WF_REASON_SIGNALED;
	if (command->killed)
		command->reason = command->killed_for;
	else if (command->signal == SIGKILL && oom_kills() > command->oom_before)
		command->reason = WF_REASON_OOM;
}

static void on_started(struct command *command, pid_t pid)
{
	uint8_t payload[4];
	struct writer w = {.at = payload, .left = sizeof payload};
	if (command->state != COMMAND_STARTING)
		return;
	command->pid = pid;
	command->state = COMMAND_RUNNING;
	write_u32(&w, (uint32_t)pid);
	for (struct channel *channel = command->channels; channel;
	     channel = channel->next_in_command) {
		channel->told_start = true;
		conn_send(channel->conn, WF_STARTED, channel->id, payload, sizeof payload);
	}
	input_flush(command);
	/* Its output may have come first; nothing is read before STARTED is sent. */
	for (int i = 0; i < 2; i++)
		stream_resume(&command->out[i]);
}

static void obey_supervisor(struct command *command, const struct control_message *message)
{
	switch (message->kind) {
	case CONTROL_STARTED:
		on_started(command, message->value);
		break;
	case CONTROL_FAILED:
		if (command->state != COMMAND_STARTING)
			break;
		if (message->stage == STAGE_USER)
			command_refused(command, message);
		else
			command_not_started(command, message->value, message->text);
		break;
	case CONTROL_EXITED:
		if (command->reported)
			break;
		command->reported = true;
		command->usage = message->usage;
		take_status(command, message->value);
		command_ended(command);
		break;
	default:
		break;
	}
}

static bool read_control(struct command *command)
{
	struct control_message message;
	ssize_t n = recv(command->control_fd, &message, sizeof message, MSG_DONTWAIT);
	if (n == (ssize_t)sizeof message) {
		message.text[sizeof message.text - 1] = 0;
		obey_supervisor(command, &message);
		return !command->buried;
	}
	if (n < 0 && errno == EINTR)
		return true;
	if (n < 0 && errno == EAGAIN)
		return false;
	unwatch(command->control_fd);
	close(command->control_fd);
	command->control_fd = -1;
	return false;
}

void command_on_control(struct source *source, uint32_t events)
{
	struct command *command =
		(struct command *)(void *)((char *)source - offsetof(struct command, control));
	(void)events;
	while (command->control_fd >= 0 && read_control(command))
		;
}

void command_reaped(struct command *command, int status)
{
	/* What it said before it died comes first. */
	command_on_control(&command->control, 0);
	if (command->buried)
		return;
	command->supervisor = 0;
	command->kill_at = 0;
	if (!WIFEXITED(status))
		strays_begin();
	if (!command->reported) {
		command->reported = true;
		command->usage.wall_us = now_us() - command->started_us;
		take_status(command, WIFSIGNALED(status) ? status : SIGKILL);
		command_ended(command);
		return;
	}
	command_settle(command);
}

static void send_control(struct command *command, enum control_kind kind, int value)
{
	struct control_message message = {.kind = kind, .value = value};
	ssize_t n;
	if (command->control_fd < 0)
		return;
	do
		n = send(command->control_fd, &message, sizeof message,
			 MSG_DONTWAIT | MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	/* A full socket means a stopped supervisor: kill_at sees to that. */
}

static void cancel_queued(struct command *command, enum wf_reason reason)
{
	command->reason = reason;
	command->signal = SIGKILL;
	command->exit_code = -SIGKILL;
	command->reported = true;
	command->flags &= ~(uint32_t)WF_EXEC_KEEP;
	command_forget_request(command);
	command_ended(command);
}

void command_kill(struct command *command, enum wf_reason reason)
{
	if (command->state == COMMAND_QUEUED) {
		cancel_queued(command, reason);
		return;
	}
	if (command->killed || command->supervisor == 0)
		return;
	command->killed = true;
	command->killed_for = reason;
	command->kill_at = now_ms() + KILL_PATIENCE_MS;
	wake_at(command->kill_at);
	(void)kill(command->supervisor, SIGCONT); /* its command may have stopped it */
	send_control(command, CONTROL_KILL, 0);
}

void command_signal(struct command *command, int signo, bool tree)
{
	if (command->state == COMMAND_QUEUED && signo == SIGKILL)
		cancel_queued(command, WF_REASON_SIGNALED);
	else
		send_control(command, tree ? CONTROL_SIGNAL_TREE : CONTROL_SIGNAL, signo);
}
