/* Connections of PID 1: accepting them, their bytes in and out. */
#define _GNU_SOURCE
#include "serve.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { READ_CHUNK = 64 * 1024, READ_ROUNDS = 4, REFUSED_PAUSE_MS = 20 };

static struct source listen_source;

static void conn_arm(struct conn *conn)
{
	uint32_t want = EPOLLRDHUP;
	if (conn->out.len < QUEUE_STUCK)
		want |= EPOLLIN;
	if (conn->out.len)
		want |= EPOLLOUT;
	if (want != conn->armed && watch(conn->fd, &conn->source, want))
		conn->armed = want;
}

void conn_close(struct conn *conn)
{
	if (conn->closing)
		return;
	conn->closing = true;
	if (conn->owner && !srv.config->detached)
		end_sandbox(WF_END_ASKED);
	while (conn->channels)
		channel_close(conn->channels);
	hold_forget(conn);
	freeze_forget(conn);
	shutdown_forget(conn);
	mapped_forget(conn);
	for (int i = 0; i < conn->n_fds; i++)
		close(conn->fds[i]);
	unwatch(conn->fd);
	/* A supervisor that is just starting may still have a copy. */
	(void)shutdown(conn->fd, SHUT_RDWR);
	close(conn->fd);
	conn->source.ready = NULL;
	for (struct conn **at = &srv.conns; *at; at = &(*at)->next) {
		if (*at == conn) {
			*at = conn->next;
			break;
		}
	}
	srv.n_conns--;
	buffer_free(&conn->in);
	buffer_free(&conn->out);
	release_later(conn);
	command_start_queued();
}

uint8_t *conn_room(struct conn *conn, size_t n)
{
	if (conn->closing || conn->hung_up)
		return NULL;
	uint8_t *at = buffer_room(&conn->out, n);
	if (!at)
		conn->hung_up = conn->dirty = true;
	return at;
}

void conn_commit(struct conn *conn, size_t n)
{
	conn->out.len += n;
	conn->dirty = true;
}

void conn_send(struct conn *conn, uint16_t type, uint32_t channel, const void *payload, size_t len)
{
	uint8_t *at = conn_room(conn, WF_HEADER + len);
	if (!at)
		return;
	frame_header(at, (uint32_t)len, type, 0, channel);
	if (len)
		memcpy(at + WF_HEADER, payload, len);
	conn_commit(conn, WF_HEADER + len);
}

void conn_error(struct conn *conn, uint32_t channel, int error, const char *format, ...)
{
	char text[320];
	uint8_t payload[sizeof text + 8];
	struct writer w = {.at = payload, .left = sizeof payload};
	va_list args;
	va_start(args, format);
	int n = vsnprintf(text, sizeof text, format, args);
	va_end(args);
	write_u32(&w, (uint32_t)error);
	write_str(&w, text, n < 0 ? 0 : strnlen(text, sizeof text));
	conn_send(conn, WF_ERROR, channel, payload, sizeof payload - w.left);
}

bool conn_has_room(const struct conn *conn)
{
	return !conn->closing && !conn->hung_up && conn->out.len < QUEUE_HIGH;
}

struct channel *conn_channel(struct conn *conn, uint32_t id)
{
	for (struct channel *channel = conn->channels; channel; channel = channel->next_in_conn)
		if (channel->id == id)
			return channel;
	return NULL;
}

/* One write; descriptors go with exactly the byte they belong to. */
static ssize_t conn_write(struct conn *conn)
{
	union {
		char bytes[CMSG_SPACE(sizeof conn->fds)];
		struct cmsghdr align;
	} control = {{0}};
	struct iovec piece = {.iov_base = buffer_front(&conn->out), .iov_len = conn->out.len};
	struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
	if (conn->n_fds && conn->fds_at > 0) {
		piece.iov_len = conn->fds_at;
	} else if (conn->n_fds) {
		size_t size = (size_t)conn->n_fds * sizeof *conn->fds;
		message.msg_control = control.bytes;
		message.msg_controllen = CMSG_SPACE(size);
		struct cmsghdr *head = CMSG_FIRSTHDR(&message);
		head->cmsg_level = SOL_SOCKET;
		head->cmsg_type = SCM_RIGHTS;
		head->cmsg_len = CMSG_LEN(size);
		memcpy(CMSG_DATA(head), conn->fds, size);
	}
	return sendmsg(conn->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void conn_sent(struct conn *conn, size_t n)
{
	if (conn->n_fds && conn->fds_at == 0) {
		for (int i = 0; i < conn->n_fds; i++)
			close(conn->fds[i]);
		conn->n_fds = 0;
	} else if (conn->n_fds) {
		conn->fds_at -= n;
	}
	buffer_take(&conn->out, n);
}

static bool conn_frames(struct conn *conn, size_t *need);

static void conn_flush(struct conn *conn)
{
	conn->dirty = false;
	size_t need;
	bool was_full = conn->out.len >= QUEUE_LOW;
	bool was_stuck = conn->out.len >= QUEUE_STUCK;
	while (!conn->hung_up && conn->out.len) {
		ssize_t n = conn_write(conn);
		if (n > 0)
			conn_sent(conn, (size_t)n);
		else if (n < 0 && errno == EAGAIN)
			break;
		else if (n == 0 || errno != EINTR)
			conn->hung_up = true;
	}
	if (conn->hung_up) {
		conn_close(conn);
		return;
	}
	if (was_full && conn->out.len < QUEUE_LOW)
		for (struct channel *channel = conn->channels, *next; channel; channel = next) {
			next = channel->next_in_conn;
			channel_resume(channel);
		}
	/* Requests that came while it was stuck bring no event of their own. */
	if (was_stuck && conn->out.len < QUEUE_STUCK && !conn_frames(conn, &need)) {
		conn_close(conn);
		return;
	}
	conn_arm(conn);
}

void conns_flush(void)
{
	bool again = true;
	/* Closing one may end commands that others wait for, and so on. */
	while (again) {
		again = false;
		for (struct conn *conn = srv.conns; conn; conn = conn->next) {
			if (!conn->dirty)
				continue;
			conn_flush(conn);
			again = true;
			if (conn->closing)
				break;
		}
	}
}

/* Handles the whole frames that have come; false: close. */
static bool conn_frames(struct conn *conn, size_t *need)
{
	struct frame frame;
	while (!conn->closing && !conn->hung_up && conn->out.len < QUEUE_STUCK) {
		enum frame_status status =
			frame_decode(buffer_front(&conn->in), conn->in.len, &frame, need);
		if (status == FRAME_BAD)
			return false;
		if (status == FRAME_MORE)
			return true;
		size_t size = WF_HEADER + (size_t)frame.length;
		if (!request_handle(conn, &frame))
			return false;
		buffer_take(&conn->in, size);
	}
	*need = WF_HEADER;
	return true;
}

/* Reads what is there; false: the peer is gone or talks nonsense. */
static bool conn_read(struct conn *conn)
{
	size_t need = WF_HEADER;
	for (int round = 0; round < READ_ROUNDS; round++) {
		if (!conn_frames(conn, &need))
			return false;
		if (conn->closing || conn->out.len >= QUEUE_STUCK)
			return true;
		/* Memory follows what has come, not what a header promises. */
		uint8_t *at = buffer_room(&conn->in, READ_CHUNK);
		if (!at)
			return false;
		ssize_t n = recv(conn->fd, at, READ_CHUNK, MSG_DONTWAIT);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return errno == EAGAIN;
		if (n == 0)
			return false;
		conn->in.len += (size_t)n;
		if (n < READ_CHUNK)
			return conn_frames(conn, &need);
	}
	return conn_frames(conn, &need);
}

static void on_conn(struct source *source, uint32_t events)
{
	struct conn *conn = (struct conn *)(void *)((char *)source - offsetof(struct conn, source));
	bool good = true;
	if (events & EPOLLOUT) {
		conn_flush(conn);
		if (conn->closing)
			return;
	}
	if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {
		/* What a full queue held back comes first. */
		good = conn_read(conn);
		if (events & (EPOLLHUP | EPOLLERR))
			good = false;
		else if ((events & EPOLLRDHUP) && conn->out.len >= QUEUE_STUCK)
			good = false;
	}
	if (conn->closing)
		return;
	if (!good)
		conn_close(conn);
	else
		conn->dirty = true;
}

static void say_hello(struct conn *conn)
{
	uint8_t payload[512];
	struct writer w = {.at = payload, .left = sizeof payload};
	const char *id = srv.config->sandbox_id ? srv.config->sandbox_id : "";
	uint16_t features = (uint16_t)((srv.config->freeze_kind ? WF_FEATURE_FREEZER : 0) |
				       (srv.oom_fd >= 0 ? WF_FEATURE_OOM : 0) |
				       (srv.kept.n_join ? WF_FEATURE_CGROUPS : 0));
	write_u16(&w, WF_PROTO_VERSION);
	write_u16(&w, features);
	write_u32(&w, (uint32_t)getpid());
	write_str(&w, id, strnlen(id, 400));
	conn_send(conn, WF_HELLO, 0, payload, sizeof payload - w.left);
}

void conn_open(int fd, bool owner)
{
	struct conn *conn = srv.n_conns < MAX_CONNS || owner ? calloc(1, sizeof *conn) : NULL;
	if (!conn) {
		close(fd);
		return;
	}
	conn->source.ready = on_conn;
	conn->fd = fd;
	conn->owner = owner;
	conn->next = srv.conns;
	srv.conns = conn;
	srv.n_conns++;
	say_hello(conn);
	conn_arm(conn);
}

static bool may_talk(int fd)
{
	struct ucred peer;
	socklen_t size = sizeof peer;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 || size != sizeof peer)
		return false;
	return peer.uid == 0 || peer.uid == srv.config->peer_uid;
}

static void on_listen(struct source *source, uint32_t events)
{
	(void)source;
	(void)events;
	int fd = accept4(srv.listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd < 0) {
		/* Out of descriptors: the peer stays in the queue, and so would this event. */
		if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
			unwatch(srv.listen_fd);
			srv.listen_ms = now_ms() + REFUSED_PAUSE_MS;
			wake_at(srv.listen_ms);
		}
		return;
	}
	if (may_talk(fd))
		conn_open(fd, false);
	else
		close(fd);
}

int conns_listen(void)
{
	if (srv.listen_fd < 0)
		return 0;
	int flags = fcntl(srv.listen_fd, F_GETFL);
	if (flags < 0 || fcntl(srv.listen_fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return -1;
	listen_source.ready = on_listen;
	return watch(srv.listen_fd, &listen_source, EPOLLIN) ? 0 : -1;
}

void conns_time(uint64_t now)
{
	if (!srv.listen_ms)
		return;
	if (now < srv.listen_ms) {
		wake_at(srv.listen_ms);
		return;
	}
	srv.listen_ms = 0;
	if (!watch(srv.listen_fd, &listen_source, EPOLLIN)) {
		srv.listen_ms = now + REFUSED_PAUSE_MS;
		wake_at(srv.listen_ms);
	}
}
