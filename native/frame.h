/* Bytes to frames and back: pure, bounded, no system calls. */
#ifndef WF_FRAME_H
#define WF_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto.h"

struct frame {
	uint32_t length;
	uint16_t type;
	uint16_t flags;
	uint32_t channel;
	uint8_t *payload; /* inside the caller's buffer */
};

enum frame_status { FRAME_OK, FRAME_MORE, FRAME_BAD };

/* Looks at the front of buf. FRAME_OK fills *out; the frame takes
 * WF_HEADER + out->length bytes. FRAME_MORE: *need bytes in all are wanted. */
enum frame_status frame_decode(uint8_t *buf, size_t len, struct frame *out, size_t *need);

void frame_header(uint8_t *at, uint32_t length, uint16_t type, uint16_t flags, uint32_t channel);

/* A reader that can only fail once: after a short read `bad` stays set and
 * every further value is 0. */
struct reader {
	uint8_t *at;
	size_t left;
	bool bad;
};

uint8_t read_u8(struct reader *r);
uint16_t read_u16(struct reader *r);
uint32_t read_u32(struct reader *r);
uint64_t read_u64(struct reader *r);
/* A str, ended with a NUL in place (over its own length field). *len may be
 * NULL. The result is "" when bad. */
char *read_str(struct reader *r, size_t *len);

/* A writer into a fixed buffer; `full` stays set once something did not fit. */
struct writer {
	uint8_t *at;
	size_t left;
	bool full;
};

void write_u8(struct writer *w, uint8_t value);
void write_u16(struct writer *w, uint16_t value);
void write_u32(struct writer *w, uint32_t value);
void write_u64(struct writer *w, uint64_t value);
void write_str(struct writer *w, const char *text, size_t len);

enum { EXEC_MAX_RLIMITS = 32, EXEC_MAX_STRINGS = 256 * 1024 };

struct exec_rlimit {
	uint32_t resource;
	uint64_t soft, hard;
};

struct exec_request {
	uint32_t flags, credit, drain_ms;
	uint64_t timeout_ms;
	char *user, *cwd;
	uint16_t rows, cols;
	uint32_t n_rlimit;
	struct exec_rlimit rlimits[EXEC_MAX_RLIMITS];
	uint32_t argc, envc;
	char **argv, **envp; /* one allocation, argv's; each ends with NULL */
};

enum exec_status {
	EXEC_OK,
	EXEC_BAD_FRAME, /* lengths do not add up: close the connection */
	EXEC_REFUSED,   /* well formed, but not a thing that can be run: *error says why */
};

/* Decodes in place: `payload` is changed and must outlive *out. */
enum exec_status exec_decode(uint8_t *payload, size_t len, struct exec_request *out, int *error);
void exec_free(struct exec_request *request);

#endif
