/* The multiplexer at both ends, fed a stream in pieces: whatever comes, it keeps
 * its bounds, and it does the same however the stream is cut. */
#define _GNU_SOURCE
#include "../mux.h"
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct seen {
	uint64_t hash;
	bool broken;
};

static struct seen now;

static void note(const void *data, size_t size)
{
	const uint8_t *at = data;
	for (size_t i = 0; i < size; i++)
		now.hash = (now.hash ^ at[i]) * 1099511628211u;
}

static int peers[MUX_STREAMS * 4];
static size_t n_peers;

/* Every other target is there. */
static int on_open(struct mux *mux, uint16_t target, const char *argument)
{
	int ends[2];
	(void)mux;
	note(&target, sizeof target);
	note(argument, strlen(argument));
	if (target % 2 || n_peers == sizeof peers / sizeof *peers ||
	    socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0)
		return -1;
	peers[n_peers++] = ends[1];
	return ends[0];
}

static void on_control(struct mux *mux, const uint8_t *payload, uint32_t size)
{
	note(payload, size);
	mux_send(mux, MUX_CONTROL, 0, payload, size);
}

static void on_event(struct mux *mux, enum mux_kind kind)
{
	(void)mux;
	note(&kind, sizeof kind);
}

static const struct mux_calls calls = {on_open, on_control, on_event};

static void check(const struct mux *mux)
{
	for (size_t i = 0; i < MUX_STREAMS; i++) {
		const struct mux_stream *s = &mux->streams[i];
		if (s->used && (s->may_send > MUX_WINDOW || s->room > MUX_WINDOW || s->in.len > MUX_WINDOW))
			abort();
	}
	if (!mux->broken && mux->in.len >= MUX_HEADER + MUX_PAYLOAD)
		abort();
}

/* Only the input decides: streams are not served in between. */
static struct seen feed(const uint8_t *data, size_t size, size_t step, bool host)
{
	struct mux *mux = malloc(sizeof *mux);
	if (!mux)
		abort();
	now = (struct seen){0};
	mux_init(mux, &calls, host);
	if (host) {
		int ends[2];
		mux_reset(mux, 7);
		for (int i = 0; i < 4; i++) {
			if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) < 0 ||
			    !mux_open(mux, ends[0], TO_SANDBOX, NULL, 0))
				abort();
			peers[n_peers++] = ends[1];
		}
		mux_quiesce(mux);
	}
	for (size_t at = 0; at < size && !mux->broken; at += step) {
		size_t n = size - at < step ? size - at : step;
		(void)mux_feed(mux, data + at, n);
		check(mux);
	}
	now.broken = mux->broken;
	note(mux->out.data + mux->out.at, mux->out.len);
	note(mux->later.data + mux->later.at, mux->later.len);
	struct pollfd watched[MUX_STREAMS];
	size_t n = mux_watch(mux, watched);
	if (poll(watched, n, 0) > 0)
		mux_serve(mux, watched, n);
	check(mux);
	mux_free(mux);
	free(mux);
	while (n_peers)
		close(peers[--n_peers]);
	return now;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size > 4096)
		size = 4096;
	for (int host = 0; host < 2; host++) {
		struct seen whole = feed(data, size, size ? size : 1, host);
		struct seen pieces = feed(data, size, 1 + size / 7, host);
		struct seen bytes = feed(data, size, 1, host);
		if (whole.hash != pieces.hash || whole.broken != pieces.broken ||
		    whole.hash != bytes.hash || whole.broken != bytes.broken)
			abort();
	}
	return 0;
}

static size_t frame(uint8_t *into, uint16_t kind, uint16_t stream, const void *payload, uint32_t size)
{
	memcpy(into, &size, 4);
	memcpy(into + 4, &kind, 2);
	memcpy(into + 6, &stream, 2);
	memcpy(into + 8, payload, size);
	return MUX_HEADER + size;
}

static const struct {
	uint16_t kind, stream;
	uint32_t size;
	uint8_t payload[16];
} story[] = {
	{MUX_RESET, 0, 4, {7}},	     {MUX_OPEN, 1, 2, {0}},	 {MUX_OPEN, 2, 6, {2, 0, '/', 'a', 0, 'b'}},
	{MUX_DATA_FRAME, 1, 5, {1}}, {MUX_CREDIT, 1, 4, {0}},	 {MUX_CONTROL, 0, 13, {4}},
	{MUX_OPEN, 3, 2, {1}},	     {MUX_CLOSE, 2, 1, {1}},	 {MUX_CLOSE, 3, 1, {0}},
	{MUX_DATA_FRAME, 1, 9, {2}}, {MUX_QUIESCE, 0, 0, {0}},	 {MUX_QUIET, 0, 0, {0}},
	{MUX_GO, 0, 0, {0}},	     {MUX_CLOSE, 1, 1, {0}},	 {MUX_OPEN, 1, 2, {0}},
	{MUX_CREDIT, 9, 4, {1}},     {MUX_RESET, 0, 4, {7}},	 {MUX_OPEN, 1, 2, {0}},
};

/* Frames that each end takes: the host never sends QUIET, the guest not OPEN,
 * QUIESCE or GO, so that both get far. */
size_t fuzz_example(unsigned n, uint8_t *into, size_t room)
{
	size_t at = 0, all = sizeof story / sizeof *story;
	bool host = n % 2;
	if (n >= 2 * all || room < 4096)
		return 0;
	for (size_t i = 0; i <= n / 2; i++) {
		uint16_t kind = story[i].kind;
		bool only_host = kind == MUX_OPEN || kind == MUX_QUIESCE || kind == MUX_GO;
		if ((host && only_host) || (!host && kind == MUX_QUIET))
			continue;
		at += frame(into + at, kind, story[i].stream, story[i].payload, story[i].size);
	}
	return at ? at : frame(into, MUX_RESET, 0, story[0].payload, 4);
}
