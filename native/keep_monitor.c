/* Lets a machine run again that a client had stopped and left so: `cont`, in
 * QEMU's language of orders, as one of the clients of `qmp`. It serves them one
 * after the other, so that this may wait for one that still has its connection.
 * The machine's program may be in the hands of its guest: what it answers is
 * searched, and never kept beyond a line. */
#define _GNU_SOURCE
#include "keep.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 4096, AGAIN_MS = 100 };

static const char orders[] = "{\"execute\": \"qmp_capabilities\"}\n"
			     "{\"execute\": \"cont\", \"id\": \"keep\"}\n";

static struct {
	bool wanted;
	bool connected;
	int fd;
	uint64_t again_ms; /* when to connect next, if not connected */
	char line[LINE_MAX_BYTES];
	size_t len;
} monitor;

static void leave(void)
{
	if (monitor.connected)
		close(monitor.fd);
	monitor.connected = false;
	monitor.len = 0;
	monitor.again_ms = keep_now_ms() + AGAIN_MS;
}

static void enter(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "qmp"};

	monitor.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	monitor.connected = monitor.fd >= 0;
	if (!monitor.connected || connect(monitor.fd, (struct sockaddr *)&address, sizeof address) < 0 ||
	    send(monitor.fd, orders, sizeof orders - 1, MSG_NOSIGNAL) != (ssize_t)sizeof orders - 1)
		leave();
}

void monitor_continue(void)
{
	if (monitor.wanted)
		return;
	monitor.wanted = true;
	enter();
}

bool monitor_busy(void)
{
	return monitor.wanted;
}

struct pollfd monitor_watch(void)
{
	return (struct pollfd){.fd = monitor.connected ? monitor.fd : -1, .events = POLLIN};
}

uint64_t monitor_due_ms(void)
{
	return monitor.wanted && !monitor.connected ? monitor.again_ms : UINT64_MAX;
}

/* A refusal is asked again: an order that was not yet finished stands before. */
static void hear_line(void)
{
	monitor.line[monitor.len] = '\0';
	monitor.len = 0;
	if (!strstr(monitor.line, "\"id\": \"keep\""))
		return;
	monitor.wanted = !strstr(monitor.line, "\"return\":");
	leave();
}

void monitor_serve(const struct pollfd *watched)
{
	char block[LINE_MAX_BYTES];

	if (!monitor.connected) {
		if (monitor.wanted && keep_now_ms() >= monitor.again_ms)
			enter();
		return;
	}
	if (!watched->revents || watched->fd != monitor.fd)
		return;
	ssize_t got = read(monitor.fd, block, sizeof block);
	if (got <= 0 && !(got < 0 && (errno == EAGAIN || errno == EINTR)))
		leave();
	for (ssize_t i = 0; i < got && monitor.connected; i++) {
		if (block[i] == '\n')
			hear_line();
		else if (monitor.len < LINE_MAX_BYTES - 1)
			monitor.line[monitor.len++] = block[i];
	}
}
