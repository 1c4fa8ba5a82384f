#include "frame.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static uint16_t get16(const uint8_t *p)
{
	return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t get32(const uint8_t *p)
{
	return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void put16(uint8_t *p, uint16_t v)
{
	p[0] = (uint8_t)v;
	p[1] = (uint8_t)(v >> 8);
}

static void put32(uint8_t *p, uint32_t v)
{
	put16(p, (uint16_t)v);
	put16(p + 2, (uint16_t)(v >> 16));
}

enum frame_status frame_decode(uint8_t *buf, size_t len, struct frame *out, size_t *need)
{
	*need = WF_HEADER;
	if (len < WF_HEADER)
		return FRAME_MORE;
	out->length = get32(buf);
	out->type = get16(buf + 4);
	out->flags = get16(buf + 6);
	out->channel = get32(buf + 8);
	out->payload = buf + WF_HEADER;
	if (out->type < WF_EXEC || out->type > WF_LAST_REQUEST)
		return FRAME_BAD;
	if (out->length > (out->type == WF_EXEC ? (uint32_t)WF_MAX_EXEC : (uint32_t)WF_MAX_PAYLOAD))
		return FRAME_BAD;
	*need = WF_HEADER + (size_t)out->length;
	return len < *need ? FRAME_MORE : FRAME_OK;
}

void frame_header(uint8_t *at, uint32_t length, uint16_t type, uint16_t flags, uint32_t channel)
{
	put32(at, length);
	put16(at + 4, type);
	put16(at + 6, flags);
	put32(at + 8, channel);
}

static uint8_t *take(struct reader *r, size_t n)
{
	if (r->bad || r->left < n) {
		r->bad = true;
		return NULL;
	}
	uint8_t *at = r->at;
	r->at += n;
	r->left -= n;
	return at;
}

uint8_t read_u8(struct reader *r)
{
	uint8_t *p = take(r, 1);
	return p ? *p : 0;
}

uint16_t read_u16(struct reader *r)
{
	uint8_t *p = take(r, 2);
	return p ? get16(p) : 0;
}

uint32_t read_u32(struct reader *r)
{
	uint8_t *p = take(r, 4);
	return p ? get32(p) : 0;
}

uint64_t read_u64(struct reader *r)
{
	uint8_t *p = take(r, 8);
	return p ? (uint64_t)get32(p) | (uint64_t)get32(p + 4) << 32 : 0;
}

char *read_str(struct reader *r, size_t *len)
{
	static char nothing[1];
	size_t n = read_u32(r);
	uint8_t *p = take(r, n);
	if (!p) {
		nothing[0] = 0;
		if (len)
			*len = 0;
		return nothing;
	}
	/* One byte to the left leaves room for the NUL and stays in this field. */
	memmove(p - 1, p, n);
	p[(ptrdiff_t)n - 1] = 0; /* for an empty string this is the length's last byte */
	if (len)
		*len = n;
	return (char *)(p - 1);
}

static uint8_t *room(struct writer *w, size_t n)
{
	if (w->full || w->left < n) {
		w->full = true;
		return NULL;
	}
	uint8_t *at = w->at;
	w->at += n;
	w->left -= n;
	return at;
}

void write_u8(struct writer *w, uint8_t value)
{
	uint8_t *p = room(w, 1);
	if (p)
		*p = value;
}

void write_u16(struct writer *w, uint16_t value)
{
	uint8_t *p = room(w, 2);
	if (p)
		put16(p, value);
}

void write_u32(struct writer *w, uint32_t value)
{
	uint8_t *p = room(w, 4);
	if (p)
		put32(p, value);
}

void write_u64(struct writer *w, uint64_t value)
{
	uint8_t *p = room(w, 8);
	if (!p)
		return;
	put32(p, (uint32_t)value);
	put32(p + 4, (uint32_t)(value >> 32));
}

void write_str(struct writer *w, const char *text, size_t len)
{
	if (len > UINT32_MAX) {
		w->full = true;
		return;
	}
	write_u32(w, (uint32_t)len);
	uint8_t *p = room(w, len);
	if (p && len)
		memcpy(p, text, len);
}

static void read_rlimits(struct reader *r, struct exec_request *out, int *error)
{
	uint32_t n = read_u32(r);
	if (n > EXEC_MAX_RLIMITS) {
		/* Walk over them all the same: only bytes that do not add up are malformed. */
		*error = EINVAL;
		if ((uint64_t)n * 20 > r->left)
			r->bad = true;
		else
			take(r, (size_t)n * 20);
		return;
	}
	for (uint32_t i = 0; i < n && !r->bad; i++) {
		out->rlimits[i].resource = read_u32(r);
		out->rlimits[i].soft = read_u64(r);
		out->rlimits[i].hard = read_u64(r);
	}
	out->n_rlimit = n;
}

/* First pass: counts strings and checks that they fit, changing nothing. */
static uint32_t skip_strings(struct reader *r)
{
	uint32_t n = read_u32(r);
	for (uint32_t i = 0; i < n && !r->bad; i++)
		take(r, read_u32(r));
	return n;
}

static void read_strings(struct reader *r, char **into, uint32_t n, int *error)
{
	read_u32(r);
	for (uint32_t i = 0; i < n; i++) {
		size_t len;
		into[i] = read_str(r, &len);
		if (strlen(into[i]) != len)
			*error = EINVAL;
	}
	into[n] = NULL;
}

static char *read_plain_str(struct reader *r, int *error)
{
	size_t len;
	char *text = read_str(r, &len);
	if (strlen(text) != len)
		*error = EINVAL;
	return text;
}

enum exec_status exec_decode(uint8_t *payload, size_t len, struct exec_request *out, int *error)
{
	struct reader r = {.at = payload, .left = len};
	memset(out, 0, sizeof *out);
	*error = 0;
	out->flags = read_u32(&r);
	out->credit = read_u32(&r);
	out->timeout_ms = read_u64(&r);
	out->drain_ms = read_u32(&r);
	out->user = read_plain_str(&r, error);
	out->cwd = read_plain_str(&r, error);
	out->rows = read_u16(&r);
	out->cols = read_u16(&r);
	read_rlimits(&r, out, error);
	struct reader ahead = r;
	out->argc = skip_strings(&ahead);
	out->envc = skip_strings(&ahead);
	if (ahead.bad || ahead.left)
		return EXEC_BAD_FRAME;
	if (out->argc == 0 || (out->flags & ~(uint32_t)WF_EXEC_ALL))
		*error = EINVAL;
	if ((uint64_t)out->argc + out->envc > EXEC_MAX_STRINGS)
		*error = E2BIG;
	if (*error)
		return EXEC_REFUSED;
	out->argv = malloc(((size_t)out->argc + out->envc + 2) * sizeof *out->argv);
	if (!out->argv) {
		*error = ENOMEM;
		return EXEC_REFUSED;
	}
	out->envp = out->argv + out->argc + 1;
	read_strings(&r, out->argv, out->argc, error);
	read_strings(&r, out->envp, out->envc, error);
	if (*error) {
		exec_free(out);
		return EXEC_REFUSED;
	}
	return EXEC_OK;
}

void exec_free(struct exec_request *request)
{
	free(request->argv);
	request->argv = NULL;
	request->envp = NULL;
}
