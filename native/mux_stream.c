/* Streams of the multiplexer: their windows and ends, and the sockets that
 * they carry the bytes of. */
#include "mux.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
	OUT_HIGH = 128 * 1024,	      /* no stream is read while this waits */
	GRANT_LEAST = MUX_WINDOW / 4, /* few, large CREDITs */
};

static struct mux_stream *find(struct mux *mux, uint16_t id)
{
	for (size_t i = 0; i < MUX_STREAMS; i++)
		if (mux->streams[i].used && mux->streams[i].id == id)
			return &mux->streams[i];
	return NULL;
}

static struct mux_stream *take_free(struct mux *mux, uint16_t id, int fd)
{
	for (size_t i = 0; i < MUX_STREAMS; i++)
		if (!mux->streams[i].used) {
			mux->streams[i] = (struct mux_stream){.used = true, .id = id, .fd = fd,
							      .may_send = MUX_WINDOW, .room = MUX_WINDOW};
			return &mux->streams[i];
		}
	return NULL;
}

static void leave(struct mux_stream *s)
{
	if (s->fd >= 0)
		close(s->fd);
	mux_drop(&s->in);
	s->fd = -1;
}

static void send_end(struct mux *mux, struct mux_stream *s, uint8_t gone)
{
	if (!s->sent_end)
		mux_send(mux, MUX_CLOSE, s->id, &gone, 1);
	s->sent_end = true;
}

/* After any change: what both sides have ended is forgotten. */
static void settle(struct mux_stream *s)
{
	if (s->got_end && s->sent_end) {
		s->id = 0;
		if (s->in.len && s->fd >= 0)
			return;
		leave(s);
		s->used = false;
	} else if (s->got_end && !s->in.len && !s->shut && s->fd >= 0) {
		s->shut = true;
		/* Where the peer is gone, its end shows when read. */
		(void)shutdown(s->fd, SHUT_WR);
	}
}

void streams_void(struct mux *mux)
{
	for (size_t i = 0; i < MUX_STREAMS; i++)
		if (mux->streams[i].used) {
			leave(&mux->streams[i]);
			mux->streams[i].used = false;
		}
}

bool mux_open(struct mux *mux, int fd, uint16_t target, const void *argument, size_t size)
{
	uint8_t payload[2 + MUX_ARGUMENT];
	uint16_t id = mux->last_id;
	struct mux_stream *s;
	if (size > MUX_ARGUMENT)
		return false;
	do
		id++;
	while (id == 0 || find(mux, id));
	s = take_free(mux, id, fd);
	if (!s)
		return false;
	mux->last_id = id;
	memcpy(payload, &target, 2);
	if (size)
		memcpy(payload + 2, argument, size);
	mux_send(mux, MUX_OPEN, id, payload, 2 + size);
	return true;
}

static bool on_open(struct mux *mux, uint16_t id, const uint8_t *payload, uint32_t size)
{
	static const uint8_t gone = 1;
	char argument[MUX_ARGUMENT + 1];
	uint16_t target;
	if (mux->host || size < 2 || size > 2 + MUX_ARGUMENT || find(mux, id))
		return false;
	memcpy(&target, payload, 2);
	memcpy(argument, payload + 2, size - 2);
	argument[size - 2] = '\0';
	struct mux_stream *s = take_free(mux, id, -1);
	if (!s) { /* the host holds as many as the guest may: its end is not yet here */
		mux_send(mux, MUX_CLOSE, id, &gone, 1);
		return true;
	}
	s->fd = mux->calls->open(mux, target, argument);
	if (s->fd < 0)
		send_end(mux, s, 1);
	return true;
}

static void pass_credit(struct mux *mux, struct mux_stream *s, uint32_t least)
{
	if (s->got_end || s->owed < least || !s->owed)
		return;
	mux_send(mux, MUX_CREDIT, s->id, &s->owed, sizeof s->owed);
	s->room += s->owed;
	s->owed = 0;
}

static bool on_data(struct mux *mux, struct mux_stream *s, const uint8_t *payload, uint32_t size)
{
	if (size == 0 || size > MUX_DATA || s->got_end || size > s->room)
		return false;
	s->room -= size;
	if (s->fd < 0) { /* nobody takes it; the other side will end too */
		s->owed += size;
		pass_credit(mux, s, GRANT_LEAST);
		return true;
	}
	return mux_append(&s->in, payload, size);
}

static bool on_credit(struct mux_stream *s, const uint8_t *payload, uint32_t size)
{
	uint32_t more;
	if (size != sizeof more)
		return false;
	if (!s)
		return true;
	memcpy(&more, payload, sizeof more);
	if (more > MUX_WINDOW - s->may_send)
		return false;
	s->may_send += more;
	return true;
}

static bool on_close(struct mux *mux, struct mux_stream *s, const uint8_t *payload, uint32_t size)
{
	if (size != 1 || payload[0] > 1 || s->got_end)
		return false;
	s->got_end = true;
	if (payload[0] == 1)
		send_end(mux, s, 1); /* what it sent before still goes to fd */
	settle(s);
	return true;
}

bool stream_frame(struct mux *mux, uint16_t kind, uint16_t id, const uint8_t *payload, uint32_t size)
{
	if (kind == MUX_OPEN)
		return on_open(mux, id, payload, size);
	struct mux_stream *s = find(mux, id);
	if (kind == MUX_CREDIT)
		return on_credit(s, payload, size);
	if (!s)
		/* An OPEN that found no room here: the host's own end of it. */
		return !mux->host && kind == MUX_CLOSE && size == 1;
	return kind == MUX_CLOSE ? on_close(mux, s, payload, size) : on_data(mux, s, payload, size);
}

static void fill_out(struct mux *mux, struct mux_stream *s, short found)
{
	uint8_t block[MUX_DATA];
	size_t most = s->may_send < sizeof block ? s->may_send : sizeof block;
	ssize_t got = read(s->fd, block, most);
	if (got > 0) {
		s->may_send -= (uint32_t)got;
		mux_send(mux, MUX_DATA_FRAME, s->id, block, (size_t)got);
		return;
	}
	if (got < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (got < 0 || (found & POLLHUP)) { /* the peer takes nothing any more either */
		leave(s);
		send_end(mux, s, 1);
	} else {
		send_end(mux, s, 0);
	}
}

static void empty_in(struct mux *mux, struct mux_stream *s)
{
	ssize_t sent = send(s->fd, s->in.data + s->in.at, s->in.len, MSG_NOSIGNAL | MSG_DONTWAIT);
	if (sent < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (sent < 0) {
		s->owed += (uint32_t)s->in.len;
		leave(s);
		send_end(mux, s, 1);
		pass_credit(mux, s, 1);
		return;
	}
	mux_consume(&s->in, (size_t)sent);
	s->owed += (uint32_t)sent;
	pass_credit(mux, s, s->in.len ? GRANT_LEAST : 1);
}

static short wanted(const struct mux *mux, const struct mux_stream *s)
{
	short events = 0;
	if (!s->used || s->fd < 0)
		return 0;
	if (s->in.len)
		events |= POLLOUT;
	if (!s->sent_end && s->may_send && !mux->held && mux->out.len < OUT_HIGH)
		events |= POLLIN;
	return events;
}

size_t mux_watch(const struct mux *mux, struct pollfd *watched)
{
	size_t n = MUX_STREAMS;
	while (n && !mux->streams[n - 1].used) /* places are taken from the front */
		n--;
	for (size_t i = 0; i < n; i++) {
		short events = wanted(mux, &mux->streams[i]);
		/* A hang-up would wake a wait for nothing over and over. */
		watched[i] = (struct pollfd){.fd = events ? mux->streams[i].fd : -1, .events = events};
	}
	return n;
}

void mux_serve(struct mux *mux, const struct pollfd *watched, size_t n)
{
	size_t first = mux->turn++;
	for (size_t k = 0; k < n; k++) {
		size_t i = (first + k) % n;
		struct mux_stream *s = &mux->streams[i];
		/* What came since may have ended the stream, or given its place away. */
		if (!watched[i].revents || !s->used || s->fd != watched[i].fd)
			continue;
		if (s->in.len && (watched[i].revents & (POLLOUT | POLLERR | POLLHUP)))
			empty_in(mux, s);
		if ((watched[i].events & POLLIN) && (watched[i].revents & (POLLIN | POLLHUP | POLLERR)) &&
		    (wanted(mux, s) & POLLIN))
			fill_out(mux, s, watched[i].revents);
		settle(s);
	}
}
