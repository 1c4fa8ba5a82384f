/* The last bytes of a stream, addressed by their place in the whole of it. */
#ifndef WF_RING_H
#define WF_RING_H

#include <stddef.h>
#include <stdint.h>

enum { RING_MAX = 1024 * 1024, RING_BUDGET = 64 * 1024 * 1024 };

struct ring {
	uint8_t *data;
	size_t cap;     /* 0 or a power of two */
	uint64_t start; /* the oldest byte kept */
	uint64_t total; /* one past the newest */
};

void ring_put(struct ring *ring, const uint8_t *data, size_t n);
/* Copies n bytes from place `from`; all of them must be kept. */
void ring_get(const struct ring *ring, uint64_t from, uint8_t *into, size_t n);
void ring_free(struct ring *ring);
size_t rings_bytes(void); /* of all rings together */

#endif
