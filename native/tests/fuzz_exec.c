/* The decoder of an EXEC payload: any bytes, and what it accepts must be a
 * command whose strings lie inside those bytes. */
#include "../frame.h"
#include "fuzz.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void check_string(const char *text, const uint8_t *data, size_t size)
{
	const uint8_t *at = (const uint8_t *)text;
	if (at < data || at >= data + size || strlen(text) >= size)
		abort();
}

static void check_strings(char **strings, uint32_t n, const uint8_t *data, size_t size)
{
	for (uint32_t i = 0; i < n; i++)
		check_string(strings[i], data, size);
	if (strings[n])
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct exec_request request;
	int error = -1;
	uint8_t *copy = malloc(size ? size : 1);
	if (!copy)
		return 0;
	if (size)
		memcpy(copy, data, size);
	switch (exec_decode(copy, size, &request, &error)) {
	case EXEC_OK:
		if (error || request.argc == 0 || request.n_rlimit > EXEC_MAX_RLIMITS)
			abort();
		check_string(request.user, copy, size);
		check_string(request.cwd, copy, size);
		check_strings(request.argv, request.argc, copy, size);
		check_strings(request.envp, request.envc, copy, size);
		exec_free(&request);
		break;
	case EXEC_REFUSED:
		if (error <= 0)
			abort();
		/* fall through */
	case EXEC_BAD_FRAME:
		if (request.argv)
			abort();
	}
	free(copy);
	return 0;
}

size_t fuzz_example(unsigned n, uint8_t *into, size_t room)
{
	struct writer w = {.at = into, .left = room};
	if (n >= 4)
		return 0;
	write_u32(&w, n & 1 ? WF_EXEC_STDIN | WF_EXEC_KEEP : 0);
	write_u32(&w, 1 << 20);
	write_u64(&w, 1000);
	write_u32(&w, 100);
	write_str(&w, "nobody", n & 1 ? 6 : 0);
	write_str(&w, "/workspace", 10);
	write_u32(&w, 24 | 80 << 16);
	write_u32(&w, n);
	for (unsigned i = 0; i < n; i++) {
		write_u32(&w, 7);
		write_u64(&w, 64);
		write_u64(&w, 64);
	}
	write_u32(&w, 1 + n);
	for (unsigned i = 0; i <= n; i++)
		write_str(&w, "echo", 4 - i);
	write_u32(&w, n);
	for (unsigned i = 0; i < n; i++)
		write_str(&w, "A=b", 3);
	return room - w.left;
}
