/* The frame parser, fed a stream in pieces: it never reads past what has come,
 * always makes progress, and finds the same frames however the stream is cut. */
#include "../frame.h"
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

struct seen {
	uint64_t frames, hash;
	int bad;
};

static void note(struct seen *seen, const struct frame *frame)
{
	seen->frames++;
	seen->hash = (seen->hash ^ frame->type ^ frame->channel) * 1099511628211u;
	for (uint32_t i = 0; i < frame->length; i++)
		seen->hash = (seen->hash ^ frame->payload[i]) * 1099511628211u;
}

/* Hands over `step` more bytes at a time, in a buffer of exactly that size. */
static struct seen parse(const uint8_t *data, size_t size, size_t step)
{
	struct seen seen = {0};
	size_t done = 0, have = 0;
	while (!seen.bad && have < size) {
		have = size - have < step ? size : have + step;
		for (;;) {
			struct frame frame;
			size_t len = have - done, need = 0;
			uint8_t *exact = malloc(len ? len : 1);
			if (!exact)
				abort();
			memcpy(exact, data + done, len);
			enum frame_status status = frame_decode(exact, len, &frame, &need);
			if (status == FRAME_OK)
				note(&seen, &frame);
			free(exact);
			if (status == FRAME_MORE && need <= len)
				abort();
			seen.bad = status == FRAME_BAD;
			if (status != FRAME_OK)
				break;
			if (need != WF_HEADER + (size_t)frame.length || need > len)
				abort();
			done += need;
		}
	}
	return seen;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size > 4096)
		size = 4096;
	struct seen whole = parse(data, size, size ? size : 1);
	struct seen pieces = parse(data, size, 1 + size / 7);
	if (whole.frames != pieces.frames || whole.hash != pieces.hash || whole.bad != pieces.bad)
		abort();
	return 0;
}

size_t fuzz_example(unsigned n, uint8_t *into, size_t room)
{
	size_t at = 0;
	if (n >= WF_LAST_REQUEST)
		return 0;
	for (uint16_t type = WF_EXEC; type <= n + 1 && room - at > 64; type++) {
		uint32_t len = (type * 7u) % 40;
		frame_header(into + at, len, type, 0, type);
		memset(into + at + WF_HEADER, type, len);
		at += WF_HEADER + len;
	}
	return at;
}
