/* Frames of the multiplexer: their bounds, their order, rest and reset. */
#include "mux.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BUFFER_MAX = 4 * 1024 * 1024, READ_BLOCK = 64 * 1024, WRITE_BLOCK = 32 * 1024 };

bool mux_append(struct mux_buffer *buffer, const void *data, size_t size)
{
	if (buffer->at && (buffer->len == 0 || buffer->at + buffer->len + size > buffer->cap)) {
		memmove(buffer->data, buffer->data + buffer->at, buffer->len);
		buffer->at = 0;
	}
	if (buffer->len + size > buffer->cap) {
		size_t cap = buffer->cap ? buffer->cap : 4096;
		while (cap < buffer->len + size)
			cap *= 2;
		uint8_t *more = cap > BUFFER_MAX ? NULL : realloc(buffer->data, cap);
		if (!more)
			return false;
		buffer->data = more;
		buffer->cap = cap;
	}
	if (size)
		memcpy(buffer->data + buffer->at + buffer->len, data, size);
	buffer->len += size;
	return true;
}

void mux_consume(struct mux_buffer *buffer, size_t size)
{
	buffer->at += size;
	buffer->len -= size;
	if (!buffer->len)
		buffer->at = 0;
}

void mux_drop(struct mux_buffer *buffer)
{
	free(buffer->data);
	*buffer = (struct mux_buffer){0};
}

void mux_init(struct mux *mux, const struct mux_calls *calls, bool host)
{
	*mux = (struct mux){.calls = calls, .host = host};
}

void mux_free(struct mux *mux)
{
	streams_void(mux);
	mux_drop(&mux->in);
	mux_drop(&mux->out);
	mux_drop(&mux->later);
}

static void put(struct mux *mux, struct mux_buffer *to, enum mux_kind kind, uint16_t stream,
		const void *payload, size_t size)
{
	uint8_t head[MUX_HEADER];
	uint32_t length = (uint32_t)size;
	uint16_t number = (uint16_t)kind;
	memcpy(head, &length, 4);
	memcpy(head + 4, &number, 2);
	memcpy(head + 6, &stream, 2);
	if (size > MUX_PAYLOAD || !mux_append(to, head, sizeof head) || !mux_append(to, payload, size))
		mux->broken = true;
}

void mux_send(struct mux *mux, enum mux_kind kind, uint16_t stream, const void *payload, size_t size)
{
	put(mux, mux->held ? &mux->later : &mux->out, kind, stream, payload, size);
}

void mux_reset(struct mux *mux, uint32_t generation)
{
	streams_void(mux);
	mux->held = false;
	mux->resetting = true;
	mux->quiets = 0;
	mux->generation = generation;
	mux_send(mux, MUX_RESET, 0, &generation, sizeof generation);
}

void mux_quiesce(struct mux *mux)
{
	if (mux->held)
		return;
	mux_send(mux, MUX_QUIESCE, 0, NULL, 0);
	mux->held = true;
	mux->quiets++;
}

static void go_on(struct mux *mux)
{
	mux->held = false;
	if (!mux_append(&mux->out, mux->later.data + mux->later.at, mux->later.len))
		mux->broken = true;
	mux_drop(&mux->later);
}

void mux_go(struct mux *mux)
{
	if (!mux->held)
		return;
	put(mux, &mux->out, MUX_GO, 0, NULL, 0);
	go_on(mux);
}

static bool reset_frame(struct mux *mux, const uint8_t *payload, uint32_t size)
{
	uint32_t generation;
	if (size != sizeof generation)
		return false;
	memcpy(&generation, payload, sizeof generation);
	if (mux->host) {
		if (!mux->resetting || generation != mux->generation)
			return false;
		mux->resetting = false;
	} else {
		streams_void(mux);
		mux_drop(&mux->later);
		mux->held = false;
		mux->generation = generation;
		mux_send(mux, MUX_RESET, 0, &generation, sizeof generation);
	}
	mux->calls->event(mux, MUX_RESET);
	return true;
}

static bool rest_frame(struct mux *mux, uint16_t kind)
{
	if (mux->host) {
		if (kind != MUX_QUIET || !mux->quiets)
			return false;
		/* A GO may have been sent before this answer came. */
		if (--mux->quiets == 0 && mux->held)
			mux->calls->event(mux, MUX_QUIET);
	} else if (kind == MUX_QUIESCE && !mux->held) {
		mux_send(mux, MUX_QUIET, 0, NULL, 0);
		mux->held = true;
	} else if (kind == MUX_GO && mux->held) {
		go_on(mux);
	} else {
		return false;
	}
	return true;
}

static bool frame(struct mux *mux, uint16_t kind, uint16_t stream, const uint8_t *payload, uint32_t size)
{
	if (mux->resetting && kind != MUX_RESET)
		return true;
	/* A host that rests, or a guest that has answered, hears no stream. */
	if (mux->held && !mux->host && kind != MUX_GO && kind != MUX_RESET)
		return false;
	switch (kind) {
	case MUX_OPEN:
	case MUX_DATA_FRAME:
	case MUX_CREDIT:
	case MUX_CLOSE:
		return stream != 0 && stream_frame(mux, kind, stream, payload, size);
	case MUX_CONTROL:
		if (stream || size < MUX_CONTROL_HEAD)
			return false;
		mux->calls->control(mux, payload, size);
		return true;
	case MUX_QUIESCE:
	case MUX_QUIET:
	case MUX_GO:
		return !stream && !size && rest_frame(mux, kind);
	case MUX_RESET:
		return !stream && reset_frame(mux, payload, size);
	default:
		return false;
	}
}

bool mux_feed(struct mux *mux, const void *data, size_t size)
{
	if (!mux->broken && !mux_append(&mux->in, data, size))
		mux->broken = true;
	while (!mux->broken && mux->in.len >= MUX_HEADER) {
		const uint8_t *at = mux->in.data + mux->in.at;
		uint32_t length;
		uint16_t kind, stream;
		memcpy(&length, at, 4);
		memcpy(&kind, at + 4, 2);
		memcpy(&stream, at + 6, 2);
		if (length > MUX_PAYLOAD) {
			mux->broken = true;
			break;
		}
		if (mux->in.len < MUX_HEADER + (size_t)length)
			break;
		if (!frame(mux, kind, stream, at + MUX_HEADER, length))
			mux->broken = true;
		mux_consume(&mux->in, MUX_HEADER + (size_t)length);
	}
	return !mux->broken;
}

int mux_read_from(struct mux *mux, int fd)
{
	static uint8_t block[READ_BLOCK];
	ssize_t got = read(fd, block, sizeof block);
	if (got > 0 && !mux_feed(mux, block, (size_t)got)) {
		errno = EPROTO;
		return -1;
	}
	return (int)got;
}

int mux_write_to(struct mux *mux, int fd)
{
	size_t n = mux->out.len < WRITE_BLOCK ? mux->out.len : WRITE_BLOCK;
	ssize_t sent = write(fd, mux->out.data + mux->out.at, n);
	if (sent > 0)
		mux_consume(&mux->out, (size_t)sent);
	return (int)sent;
}
