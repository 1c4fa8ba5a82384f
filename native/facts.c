/* Answers to LIST, INFO, ACCOUNT and NSFDS. */
#define _GNU_SOURCE
#include "serve.h"
#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LIST_ROW_BYTES = 36, LIST_MAX_ROWS = 1500, OOM_FILE_BYTES = 1024 };

enum shown_status { SHOWN_RUNNING, SHOWN_EXITED, SHOWN_SIGNALED, SHOWN_OOM };

static bool is_running(const struct command *command)
{
	return command->state == COMMAND_STARTING || command->state == COMMAND_RUNNING;
}

static bool is_listed(const struct command *command)
{
	if (command->state == COMMAND_RUNNING)
		return true;
	return command->state >= COMMAND_ENDED && (command->flags & WF_EXEC_KEEP) &&
	       command->reason != WF_REASON_NOT_STARTED;
}

unsigned commands_running(void)
{
	unsigned n = 0;
	for (struct command *command = srv.commands; command; command = command->next)
		n += is_running(command);
	return n;
}

/* Writes as many of the remembered arguments as `room` bytes hold. */
static void write_argv(struct writer *w, const struct command *command, size_t room)
{
	struct reader r = {.at = command->argv_shown, .left = command->argv_shown_len};
	size_t fits = 0;
	uint32_t n = 0;
	while (n < command->argc_shown) {
		uint32_t len = read_u32(&r);
		if (r.bad || len > r.left || fits + 4 + len > room)
			break;
		r.at += len;
		r.left -= len;
		fits += 4 + len;
		n++;
	}
	write_u32(w, n);
	for (size_t i = 0; i < fits; i++)
		write_u8(w, command->argv_shown[i]);
}

static void write_row(struct writer *w, const struct command *command, size_t argv_room)
{
	enum shown_status status = SHOWN_RUNNING;
	if (command->state >= COMMAND_ENDED)
		status = command->reason == WF_REASON_OOM ? SHOWN_OOM
			 : command->signal                ? SHOWN_SIGNALED
							  : SHOWN_EXITED;
	write_u32(w, (uint32_t)command->pid);
	write_u8(w, (uint8_t)status);
	write_u8(w, !!(command->flags & WF_EXEC_KEEP));
	write_u8(w, command->in.fd >= 0 && !command->in.eof);
	write_u8(w, 0);
	write_u32(w, (uint32_t)command->exit_code);
	write_u32(w, (uint32_t)command->signal);
	write_u64(w, command->started_unix_ms);
	write_u64(w, command->ended_unix_ms);
	write_argv(w, command, argv_room);
}

void facts_list(struct conn *conn, uint32_t channel)
{
	uint32_t n = 0;
	for (struct command *command = srv.commands; command; command = command->next)
		n += is_listed(command) && n < LIST_MAX_ROWS;
	uint8_t *payload = malloc(WF_MAX_PAYLOAD);
	if (!payload) {
		conn_error(conn, channel, ENOMEM, "no memory for the list");
		return;
	}
	struct writer w = {.at = payload, .left = WF_MAX_PAYLOAD};
	size_t argv_room = n ? (WF_MAX_PAYLOAD - 4) / n - LIST_ROW_BYTES : 0;
	write_u32(&w, n);
	for (struct command *command = srv.commands; command && n; command = command->next)
		if (is_listed(command) && n--)
			write_row(&w, command, argv_room);
	conn_send(conn, WF_REPLY, channel, payload, WF_MAX_PAYLOAD - w.left);
	free(payload);
}

unsigned processes_inside(void)
{
	struct process *list;
	siginfo_t info;
	/* All that runs here descends from PID 1: without a child there is nothing to count. */
	if (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) < 0 && errno == ECHILD)
		return 0;
	ssize_t n = tree_scan(FD_PROC, &list);
	unsigned count = 0;
	for (ssize_t i = 0; i < n; i++)
		if (list[i].pid != getpid() && !tree_is_dead(&list[i]) &&
		    !is_known_child(list[i].pid))
			count++;
	return count;
}

void facts_info(struct conn *conn, uint32_t channel)
{
	uint8_t payload[28];
	struct writer w = {.at = payload, .left = sizeof payload};
	write_u64(&w, now_ms() - srv.started_ms);
	write_u32(&w, commands_running());
	write_u32(&w, processes_inside());
	write_u32(&w, srv.n_conns);
	write_u32(&w, hold_count());
	write_u32(&w, freeze_active());
	conn_send(conn, WF_REPLY, channel, payload, sizeof payload);
}

uint64_t oom_kills(void)
{
	char text[OOM_FILE_BYTES];
	if (srv.oom_fd < 0)
		return 0;
	ssize_t n = pread(srv.oom_fd, text, sizeof text - 1, 0);
	if (n <= 0)
		return 0;
	text[n] = 0;
	for (char *line = text; line;) {
		if (strncmp(line, "oom_kill ", 9) == 0)
			return strtoull(line + 9, NULL, 10);
		line = strchr(line, '\n');
		line = line ? line + 1 : NULL;
	}
	return 0;
}

void facts_account(struct conn *conn, uint32_t channel)
{
	uint8_t payload[16];
	struct writer w = {.at = payload, .left = sizeof payload};
	uint64_t cpu_us = srv.reaped_cpu_us;
	/* What a supervisor that lingers has counted comes to PID 1 with its own end. */
	for (struct command *command = srv.commands; command; command = command->next)
		if (command->state >= COMMAND_ENDED && command->supervisor)
			cpu_us += command->usage.user_us + command->usage.sys_us;
	write_u64(&w, cpu_us);
	write_u64(&w, oom_kills());
	conn_send(conn, WF_REPLY, channel, payload, sizeof payload);
}

void facts_nsfds(struct conn *conn, uint32_t channel)
{
	static const char *const names[] = {"self/ns/user", "self/ns/mnt", "self/ns/pid",
					    "self/ns/net"};
	int fds[4], n = 0;
	if (conn->n_fds) {
		conn_error(conn, channel, EBUSY,
			   "the answer to an earlier request is still on its way");
		return;
	}
	for (; n < 4; n++) {
		fds[n] = openat(FD_PROC, names[n], O_RDONLY | O_CLOEXEC);
		if (fds[n] < 0)
			break;
	}
	if (n < 4) {
		conn_error(conn, channel, errno, "cannot open %s: %s", names[n], strerror(errno));
		while (n-- > 0)
			close(fds[n]);
		return;
	}
	conn->fds_at = conn->out.len;
	memcpy(conn->fds, fds, sizeof fds);
	conn->n_fds = 4;
	conn_send(conn, WF_REPLY, channel, NULL, 0);
}
