/* Pipes or a terminal, a control socket, and the fork of a supervisor. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

enum { FILE_PIPE_BYTES = 256 * 1024 };

/* Both ends of everything; -1 where there is none. */
struct plumbing {
	int ours[4]; /* stdin, stdout, stderr, control */
	int theirs[4];
};

enum { IN, OUT, ERR, CONTROL };

static void close_all(int *fds)
{
	for (int i = 0; i < 4; i++)
		if (fds[i] >= 0 && fds[i] != FD_NULL)
			close(fds[i]);
}

static int open_pipe(struct plumbing *p, int which, bool big)
{
	int ends[2];
	int mine = which == IN ? 1 : 0;
	if (pipe2(ends, O_CLOEXEC) < 0)
		return -1;
	p->ours[which] = ends[mine];
	p->theirs[which] = ends[!mine];
	if (fcntl(ends[mine], F_SETFL, O_NONBLOCK | (mine ? O_WRONLY : O_RDONLY)) < 0)
		return -1;
	/* Fewer switches for big files; refused where the user's pipes are used up. */
	if (big)
		(void)fcntl(ends[mine], F_SETPIPE_SZ, FILE_PIPE_BYTES);
	return 0;
}

static int open_terminal(struct plumbing *p, const struct exec_request *request)
{
	struct winsize size = {.ws_row = request->rows, .ws_col = request->cols};
	int zero = 0;
	int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
	if (master < 0)
		return -1;
	p->ours[OUT] = master;
	if (ioctl(master, TIOCSPTLCK, &zero) < 0 || ioctl(master, TIOCSWINSZ, &size) < 0)
		return -1;
	p->theirs[OUT] = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (p->theirs[OUT] < 0)
		return -1;
	/* A second descriptor, so that epoll can wait for each direction alone. */
	if (request->flags & WF_EXEC_STDIN) {
		p->ours[IN] = fcntl(master, F_DUPFD_CLOEXEC, FD_JOIN);
		if (p->ours[IN] < 0)
			return -1;
	}
	return 0;
}

static int open_pipes(struct plumbing *p, uint32_t flags)
{
	bool big = flags & WF_EXEC_BUILTIN;
	if (flags & WF_EXEC_STDIN) {
		if (open_pipe(p, IN, big) < 0)
			return -1;
	}
	if (!(flags & WF_EXEC_DISCARD_OUT) && open_pipe(p, OUT, big) < 0)
		return -1;
	if (!(flags & (WF_EXEC_DISCARD_ERR | WF_EXEC_MERGE)) && open_pipe(p, ERR, false) < 0)
		return -1;
	return 0;
}

static int open_plumbing(struct plumbing *p, const struct exec_request *request)
{
	int control[2];
	for (int i = 0; i < 4; i++)
		p->ours[i] = p->theirs[i] = -1;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control) < 0)
		return -1;
	p->ours[CONTROL] = control[0];
	p->theirs[CONTROL] = control[1];
	if (request->flags & WF_EXEC_PTY)
		return open_terminal(p, request);
	return open_pipes(p, request->flags);
}

static struct supervisor_start starting(const struct plumbing *p,
					const struct exec_request *request)
{
	struct supervisor_start start = {
		.request = request, .kept = &srv.kept, .control_fd = p->theirs[CONTROL]};
	bool tty = request->flags & WF_EXEC_PTY;
	start.stdout_fd = p->theirs[OUT] >= 0 ? p->theirs[OUT] : FD_NULL;
	start.stdin_fd = tty ? start.stdout_fd : p->theirs[IN] >= 0 ? p->theirs[IN] : FD_NULL;
	start.stderr_fd = p->theirs[ERR] >= 0 ? p->theirs[ERR] : FD_NULL;
	if (tty || (request->flags & WF_EXEC_MERGE))
		start.stderr_fd = start.stdout_fd;
	return start;
}

void command_launch(struct command *command, struct exec_request *request)
{
	struct plumbing p;
	pid_t pid = -1;
	command->state = COMMAND_STARTING;
	command->started_us = now_us();
	command->started_unix_ms = unix_ms();
	command->oom_before = oom_kills();
	if (open_plumbing(&p, request) == 0) {
		struct supervisor_start start = starting(&p, request);
		pid = fork();
		if (pid == 0)
			supervisor_main(&start);
	}
	int error = errno;
	close_all(p.theirs);
	command->control.ready = command_on_control;
	if (pid < 0 || !watch(p.ours[CONTROL], &command->control, EPOLLIN)) {
		/* Without its control socket the supervisor ends by itself. */
		close_all(p.ours);
		command_not_started(command, pid < 0 ? error : errno, "cannot start it");
		return;
	}
	command->supervisor = pid;
	command->control_fd = p.ours[CONTROL];
	stream_open(command, 0, p.ours[OUT]);
	stream_open(command, 1, p.ours[ERR]);
	input_open(command, p.ours[IN], request->flags & WF_EXEC_PTY);
	if (command->timeout_ms) {
		command->timeout_at = now_ms() + command->timeout_ms;
		wake_at(command->timeout_at);
	}
}
