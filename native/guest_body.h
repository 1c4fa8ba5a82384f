/* How bodies of requests to the guest are read; it does nothing of what they ask. */
#ifndef WF_GUEST_BODY_H
#define WF_GUEST_BODY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct resume {
	uint32_t generation, entropy_size;
	uint64_t wall_ns;
	const uint8_t *entropy;
	size_t items_at; /* in the body, up to its end */
};

struct address {
	uint32_t own, mask, gateway; /* as in the network */
};

bool body_resume(const uint8_t *body, size_t size, struct resume *resume);
/* Whether items are a whole number of "key=value", each with a NUL behind. */
bool body_are_items(const char *text, size_t size);
/* The next of such items, cut at its '='; false past the last. */
bool body_next(char *text, size_t size, size_t *at, char **key, char **value);
/* Makes the two one again, as an error names them. */
void body_join(char *value);
/* Cuts a value at its first n - 1 tabs; false: it has fewer. */
bool body_fields(char *value, char **field, unsigned n);
/* ADDRESS/PREFIX and a gateway. */
bool body_address(char *own, const char *gateway, struct address *address);

#endif
