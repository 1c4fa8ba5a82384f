#include "guest_body.h"
#include "mux.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

enum { RESUME_HEAD = 16 };

bool body_resume(const uint8_t *body, size_t size, struct resume *resume)
{
	if (size < RESUME_HEAD)
		return false;
	memcpy(&resume->generation, body, 4);
	memcpy(&resume->wall_ns, body + 4, 8);
	memcpy(&resume->entropy_size, body + 12, 4);
	if (resume->entropy_size > MUX_ENTROPY || resume->entropy_size > size - RESUME_HEAD)
		return false;
	resume->entropy = body + RESUME_HEAD;
	resume->items_at = RESUME_HEAD + resume->entropy_size;
	return body_are_items((const char *)body + resume->items_at, size - resume->items_at);
}

bool body_are_items(const char *text, size_t size)
{
	if (size && text[size - 1] != '\0')
		return false;
	for (size_t at = 0; at < size; at += strlen(text + at) + 1)
		if (!strchr(text + at, '='))
			return false;
	return true;
}

bool body_next(char *text, size_t size, size_t *at, char **key, char **value)
{
	if (*at >= size)
		return false;
	*key = text + *at;
	*at += strlen(*key) + 1;
	*value = strchr(*key, '=');
	*(*value)++ = '\0';
	return true;
}

void body_join(char *value)
{
	value[-1] = '=';
}

bool body_fields(char *value, char **field, unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		char *tab = i < n - 1 ? strchr(value, '\t') : NULL;
		field[i] = value;
		if (i == n - 1)
			return true;
		if (!tab)
			return false;
		*tab = '\0';
		value = tab + 1;
	}
	return false;
}

bool body_address(char *own, const char *gateway, struct address *address)
{
	struct in_addr first, second;
	char *slash = strchr(own, '/'), *end;
	if (!slash || slash[1] < '0' || slash[1] > '9')
		return false;
	unsigned long bits = strtoul(slash + 1, &end, 10);
	*slash = '\0';
	if (*end || bits < 1 || bits > 32 || inet_pton(AF_INET, own, &first) != 1 ||
	    inet_pton(AF_INET, gateway, &second) != 1)
		return false;
	*address = (struct address){first.s_addr, htonl(~(uint32_t)0 << (32 - bits)), second.s_addr};
	return true;
}
