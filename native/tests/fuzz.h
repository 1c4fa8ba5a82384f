/* A plain driver for a libFuzzer target: seeded, deterministic, for any
 * compiler. With -DWF_LIBFUZZER only the target itself is left.
 *
 * fuzz_... [ITERATIONS [SEED]], or fuzz_... --file PATH to repeat one input. */
#ifndef WF_FUZZ_H
#define WF_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
/* Writes the n-th well-formed input; returns its size, 0 past the last. */
size_t fuzz_example(unsigned n, uint8_t *into, size_t room);

#ifndef WF_LIBFUZZER

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FUZZ_ROOM = 256 * 1024, FUZZ_EDITS = 8 };

static uint64_t fuzz_state = 1;

static uint64_t fuzz_next(uint64_t below)
{
	fuzz_state ^= fuzz_state << 13;
	fuzz_state ^= fuzz_state >> 7;
	fuzz_state ^= fuzz_state << 17;
	return below ? fuzz_state % below : fuzz_state;
}

/* One edit: a bit, a byte, a number that is likely to matter, a cut, a copy. */
static size_t fuzz_edit(uint8_t *data, size_t size)
{
	static const uint32_t edges[] = {0,          1,     0x7fffffff, 0x80000000, 0xffffffff,
					 0xfffffffe, 65536, 65537,      8388608,    8388609};
	uint32_t edge = edges[fuzz_next(sizeof edges / sizeof *edges)];
	size_t at = (size_t)fuzz_next(size), to = (size_t)fuzz_next(size);
	switch (size ? fuzz_next(6) : 5) {
	case 0:
		data[at] ^= (uint8_t)(1u << fuzz_next(8));
		return size;
	case 1:
		data[at] = (uint8_t)fuzz_next(256);
		return size;
	case 2:
		if (size - at >= sizeof edge)
			memcpy(data + at, &edge, sizeof edge);
		return size;
	case 3:
		return at;
	case 4:
		memmove(data + to, data + at, size - (at > to ? at : to));
		return size;
	default:
		if (size < FUZZ_ROOM)
			data[size++] = (uint8_t)fuzz_next(256);
		return size;
	}
}

/* A copy of exactly its size, so that a sanitizer sees the first byte past it. */
static void fuzz_try(const uint8_t *data, size_t size)
{
	uint8_t *exact = malloc(size ? size : 1);
	if (!exact)
		abort();
	if (size)
		memcpy(exact, data, size);
	(void)LLVMFuzzerTestOneInput(exact, size);
	free(exact);
}

static int fuzz_file(const char *path)
{
	static uint8_t data[FUZZ_ROOM];
	FILE *file = fopen(path, "rb");
	if (!file) {
		perror(path);
		return 2;
	}
	fuzz_try(data, fread(data, 1, sizeof data, file));
	fclose(file);
	return 0;
}

int main(int argc, char **argv)
{
	static uint8_t data[FUZZ_ROOM];
	unsigned examples = 0;
	if (argc == 3 && strcmp(argv[1], "--file") == 0)
		return fuzz_file(argv[2]);
	uint64_t iterations = argc > 1 ? strtoull(argv[1], NULL, 10) : 100000;
	if (argc > 2)
		fuzz_state = strtoull(argv[2], NULL, 10) | 1;
	while (fuzz_example(examples, data, sizeof data) > 0)
		examples++;
	for (uint64_t i = 0; i < iterations; i++) {
		size_t size = fuzz_example((unsigned)(i % examples), data, sizeof data);
		for (uint64_t edits = i < examples ? 0 : fuzz_next(FUZZ_EDITS); edits > 0; edits--)
			size = fuzz_edit(data, size);
		fuzz_try(data, size);
	}
	printf("%llu inputs\n", (unsigned long long)iterations);
	return 0;
}

#endif
#endif
