/* FREEZE and THAW: by the freezer of the commands' cgroup, or else by SIGSTOP
 * to each process. */
#define _GNU_SOURCE
#include "serve.h"
#include "tree.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { POLL_MS = 1, AGAIN_MS = 50, GIVE_UP_MS = 10 * 1000, V1 = 1, V2 = 2 };

static enum freeze_state state;
static struct conn *asker;
static uint32_t asked_on;
static uint64_t since_ms, next_ms, again_ms;
static pid_t *stopped; /* those that were before: they stay so */
static size_t n_stopped;

enum freeze_state freeze_state(void)
{
	return state;
}

bool freeze_active(void)
{
	return state == FREEZE_DONE;
}

static bool say(const char *text)
{
	ssize_t n;
	do
		n = pwrite(srv.freeze_fd, text, strlen(text), 0);
	while (n < 0 && errno == EINTR);
	return n >= 0;
}

static bool group_is_frozen(void)
{
	char text[256];
	ssize_t n = pread(srv.freeze_state_fd, text, sizeof text - 1, 0);
	if (n <= 0)
		return false;
	text[n] = 0;
	if (srv.config->freeze_kind == V1)
		return strncmp(text, "FROZEN", 6) == 0;
	return strstr(text, "frozen 1") != NULL;
}

static bool was_stopped(pid_t pid)
{
	for (size_t i = 0; i < n_stopped; i++)
		if (stopped[i] == pid)
			return true;
	return false;
}

static bool spares(const struct process *process)
{
	return process->pid == getpid() || tree_is_dead(process) || is_known_child(process->pid);
}

static bool is_still(const struct process *list, size_t n, const struct process *process)
{
	if (process->state == 'T' || process->state == 't')
		return true;
	if (process->state != 'D')
		return false;
	/* The parent of a vfork waits, deaf to SIGSTOP, for a child that is stopped. */
	for (size_t i = 0; i < n; i++)
		if (list[i].ppid == process->pid && list[i].state == 'T')
			return true;
	return false;
}

static bool remember_stopped(void)
{
	struct process *list;
	ssize_t n = tree_scan(FD_PROC, &list);
	if (n < 0)
		return false;
	free(stopped);
	n_stopped = 0;
	stopped = malloc(((size_t)n + 1) * sizeof *stopped);
	for (ssize_t i = 0; stopped && i < n; i++)
		if (!spares(&list[i]) && list[i].state == 'T')
			stopped[n_stopped++] = list[i].pid;
	return stopped != NULL;
}

static bool all_are_still(void)
{
	struct process *list;
	ssize_t n = tree_scan(FD_PROC, &list);
	bool still = n >= 0;
	for (ssize_t i = 0; i < n; i++) {
		if (spares(&list[i]) || is_still(list, (size_t)n, &list[i]))
			continue;
		still = false;
		(void)kill(list[i].pid, SIGSTOP);
	}
	return still;
}

static void signal_on(void)
{
	struct process *list;
	ssize_t n = tree_scan(FD_PROC, &list);
	for (ssize_t i = 0; i < n; i++)
		if (!spares(&list[i]) && !was_stopped(list[i].pid))
			(void)kill(list[i].pid, SIGCONT);
}

void freeze_undo(void)
{
	if (state == FREEZE_NONE)
		return;
	if (srv.config->freeze_kind == V1)
		(void)say("THAWED");
	else if (srv.config->freeze_kind == V2)
		(void)say("0");
	else
		signal_on();
	free(stopped);
	stopped = NULL;
	n_stopped = 0;
	asker = NULL;
	next_ms = 0;
	state = FREEZE_NONE;
	command_shift(now_ms() - since_ms);
}

static bool begin(void)
{
	if (srv.config->freeze_kind == V1)
		return say("FROZEN");
	if (srv.config->freeze_kind == V2)
		return say("1");
	return remember_stopped();
}

/* A group of version 1 can stay FREEZING for good when a task joins or forks
 * at that moment; the kernel's freezer-subsystem.rst says to change it again. */
static void press(void)
{
	if (srv.config->freeze_kind != V1 || now_ms() < again_ms)
		return;
	again_ms = now_ms() + AGAIN_MS;
	(void)say("THAWED");
	(void)say("FROZEN");
}

static bool anything_starts(void)
{
	for (struct command *command = srv.commands; command; command = command->next)
		if (command->state == COMMAND_STARTING)
			return true;
	return false;
}

static void give_up(int error)
{
	struct conn *conn = asker;
	uint32_t channel = asked_on;
	freeze_undo();
	if (conn)
		conn_error(conn, channel, error, "cannot freeze the sandbox: %s", strerror(error));
	command_start_queued();
}

/* A command on its way into the group would slip through, so those come first. */
static void step(void)
{
	uint8_t payload[4];
	struct writer w = {.at = payload, .left = sizeof payload};
	if (state == FREEZE_WAITING && !anything_starts()) {
		state = FREEZE_GOING;
		again_ms = now_ms() + AGAIN_MS;
		if (!begin()) {
			give_up(errno);
			return;
		}
	}
	if (state == FREEZE_GOING &&
	    (srv.config->freeze_kind ? group_is_frozen() : all_are_still())) {
		state = FREEZE_DONE;
		next_ms = 0;
		write_u32(&w, 1);
		conn_send(asker, WF_REPLY, asked_on, payload, sizeof payload);
		return;
	}
	if (now_ms() - since_ms > GIVE_UP_MS) {
		give_up(ETIMEDOUT);
		return;
	}
	if (state == FREEZE_GOING)
		press();
	next_ms = now_ms() + POLL_MS;
	wake_at(next_ms);
}

void freeze_request(struct conn *conn, uint32_t channel)
{
	if (state != FREEZE_NONE || shutdown_active()) {
		conn_error(conn, channel, EBUSY, "the sandbox is frozen already, or shutting down");
		return;
	}
	asker = conn;
	asked_on = channel;
	since_ms = now_ms();
	state = FREEZE_WAITING;
	step();
}

void freeze_thaw(struct conn *conn, uint32_t channel)
{
	if (state == FREEZE_WAITING || state == FREEZE_GOING)
		give_up(ECANCELED);
	freeze_undo();
	conn_send(conn, WF_REPLY, channel, NULL, 0);
	command_start_queued();
}

void freeze_forget(struct conn *conn)
{
	if (state == FREEZE_NONE || asker != conn)
		return;
	freeze_undo();
	command_start_queued();
}

void freeze_time(uint64_t now)
{
	if (!next_ms)
		return;
	if (now >= next_ms)
		step();
	else
		wake_at(next_ms);
}
