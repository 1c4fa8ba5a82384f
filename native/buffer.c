#include "buffer.h"

#include <stdlib.h>
#include <string.h>

enum { BUFFER_FIRST = 4096, BUFFER_KEPT = 256 * 1024 };

uint8_t *buffer_room(struct buffer *buffer, size_t n)
{
	if (buffer->cap - buffer->head - buffer->len >= n)
		return buffer->data ? buffer->data + buffer->head + buffer->len : NULL;
	if (buffer->cap - buffer->len >= n && buffer->head >= buffer->len) {
		memcpy(buffer->data, buffer->data + buffer->head, buffer->len);
		buffer->head = 0;
		return buffer->data + buffer->len;
	}
	if (n > SIZE_MAX / 4 - buffer->len)
		return NULL;
	size_t cap = buffer->cap ? buffer->cap : BUFFER_FIRST;
	while (cap < buffer->len + n)
		cap *= 2;
	uint8_t *data = malloc(cap);
	if (!data)
		return NULL;
	if (buffer->len)
		memcpy(data, buffer->data + buffer->head, buffer->len);
	free(buffer->data);
	buffer->data = data;
	buffer->cap = cap;
	buffer->head = 0;
	return data + buffer->len;
}

void buffer_take(struct buffer *buffer, size_t n)
{
	buffer->head += n;
	buffer->len -= n;
	if (buffer->len)
		return;
	buffer->head = 0;
	if (buffer->cap > BUFFER_KEPT)
		buffer_free(buffer);
}

uint8_t *buffer_front(const struct buffer *buffer)
{
	return buffer->data + buffer->head;
}

void buffer_free(struct buffer *buffer)
{
	free(buffer->data);
	*buffer = (struct buffer){0};
}
