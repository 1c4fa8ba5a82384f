/* A byte queue that grows; its users bound it. */
#ifndef WF_BUFFER_H
#define WF_BUFFER_H

#include <stddef.h>
#include <stdint.h>

struct buffer {
	uint8_t *data;
	size_t head, len, cap;
};

/* Room for n bytes behind the queued ones; NULL when there is no memory. */
uint8_t *buffer_room(struct buffer *buffer, size_t n);
void buffer_take(struct buffer *buffer, size_t n);
uint8_t *buffer_front(const struct buffer *buffer);
void buffer_free(struct buffer *buffer);

#endif
