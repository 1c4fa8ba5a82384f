/* Bodies of requests to the guest: items are cut within their bounds, whatever
 * they hold, and joined again as they were. */
#define _GNU_SOURCE
#include "../guest_body.h"
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

enum { FIELDS_MAX = 5 };

/* Every field lies in the item, and they are all of it. */
static void check_fields(const char *value, unsigned n)
{
	char *field[FIELDS_MAX], *copy = strdup(value);
	size_t size = strlen(value);
	if (!copy)
		abort();
	if (body_fields(copy, field, n)) {
		const char *at = copy;
		for (unsigned i = 0; i < n; i++) {
			if (field[i] != at || (i < n - 1 && strchr(field[i], '\t')))
				abort();
			at += strlen(field[i]) + 1;
		}
		if (at != copy + size + 1)
			abort();
	}
	free(copy);
}

static void check_address(const char *value)
{
	char *field[3], *copy = strdup(value);
	struct address address;
	if (!copy)
		abort();
	if (body_fields(copy, field, 3) && body_address(field[1], field[2], &address) && !address.mask)
		abort();
	free(copy);
}

static void check_items(const uint8_t *data, size_t size)
{
	char *text = malloc(size ? size : 1), *key, *value;
	if (!text)
		abort();
	if (size)
		memcpy(text, data, size);
	if (body_are_items(text, size)) {
		size_t at = 0, before = 0;
		while (body_next(text, size, &at, &key, &value)) {
			if (at <= before || at > size || text[at - 1] || value[-1] || strchr(key, '='))
				abort();
			for (unsigned n = 1; n <= FIELDS_MAX; n++)
				check_fields(value, n);
			check_address(value);
			body_join(value);
			before = at;
		}
		if (at != size || (size && memcmp(text, data, size) != 0))
			abort();
	}
	free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct resume resume;
	check_items(data, size);
	if (body_resume(data, size, &resume)) {
		if (resume.items_at > size || resume.entropy + resume.entropy_size != data + resume.items_at)
			abort();
		check_items(data + resume.items_at, size - resume.items_at);
	}
	return 0;
}

static const char *const prepare[] = {
	"mkdir=/base",
	"mount=/dev/vda\t/base\terofs\tro,nodev\t",
	"address=eth0\t10.0.2.15/24\t10.0.2.2",
	"write=/proc/x\t=\t=",
	"drop=1",
};
static const char *const identity[] = {"hostname=other", "idfile=/etc/hosts\t127.0.0.1\tlocalhost\n"};

static size_t put(uint8_t *into, const char *const *items, size_t n)
{
	size_t at = 0;
	for (size_t i = 0; i < n; i++) {
		size_t size = strlen(items[i]) + 1;
		memcpy(into + at, items[i], size);
		at += size;
	}
	return at;
}

size_t fuzz_example(unsigned n, uint8_t *into, size_t room)
{
	if (room < 4096 || n > 6)
		return 0;
	if (n < 5)
		return put(into, prepare + n, 1);
	if (n == 5)
		return put(into, prepare, 5);
	memset(into, 0, 16 + 64);
	into[12] = 64; /* bytes of entropy */
	return 16 + 64 + put(into + 16 + 64, identity, 2);
}
