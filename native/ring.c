#include "ring.h"

#include <stdlib.h>
#include <string.h>

enum { RING_FIRST = 4096 };

static size_t in_use;

size_t rings_bytes(void)
{
	return in_use;
}

static void copy_in(struct ring *ring, uint64_t place, const uint8_t *data, size_t n)
{
	size_t at = (size_t)(place & (ring->cap - 1));
	size_t first = n < ring->cap - at ? n : ring->cap - at;
	memcpy(ring->data + at, data, first);
	memcpy(ring->data, data + first, n - first);
}

void ring_get(const struct ring *ring, uint64_t from, uint8_t *into, size_t n)
{
	if (n == 0)
		return;
	size_t at = (size_t)(from & (ring->cap - 1));
	size_t first = n < ring->cap - at ? n : ring->cap - at;
	memcpy(into, ring->data + at, first);
	memcpy(into + first, ring->data, n - first);
}

static void grow(struct ring *ring, size_t want)
{
	size_t cap = ring->cap ? ring->cap : RING_FIRST;
	while (cap < want && cap < RING_MAX)
		cap *= 2;
	if (cap <= ring->cap || in_use + cap - ring->cap > RING_BUDGET)
		return;
	uint8_t *data = malloc(cap);
	if (!data)
		return;
	struct ring bigger = {.data = data, .cap = cap, .start = ring->start, .total = ring->total};
	size_t kept = (size_t)(ring->total - ring->start);
	for (size_t done = 0; done < kept;) {
		size_t at = (size_t)((ring->start + done) & (ring->cap - 1));
		size_t n = kept - done < ring->cap - at ? kept - done : ring->cap - at;
		copy_in(&bigger, ring->start + done, ring->data + at, n);
		done += n;
	}
	in_use += cap - ring->cap;
	free(ring->data);
	*ring = bigger;
}

void ring_put(struct ring *ring, const uint8_t *data, size_t n)
{
	size_t kept = (size_t)(ring->total - ring->start);
	if (kept + n > ring->cap)
		grow(ring, kept + n);
	if (n > ring->cap) {
		ring->total += n - ring->cap;
		data += n - ring->cap;
		n = ring->cap;
	}
	if (n)
		copy_in(ring, ring->total, data, n);
	ring->total += n;
	if (ring->total - ring->start > ring->cap)
		ring->start = ring->total - ring->cap;
}

void ring_free(struct ring *ring)
{
	in_use -= ring->cap;
	free(ring->data);
	ring->data = NULL;
	ring->cap = 0;
	ring->start = ring->total;
}
