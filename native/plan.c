#define _GNU_SOURCE
#include "plan.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define FRAME_ERROR 106
#define ERROR_TEXT_MAX 2048

void report(uint16_t type, const void *payload, size_t size)
{
	char frame[12 + ERROR_TEXT_MAX + 8];
	uint32_t length = (uint32_t)size, channel = 0;
	uint16_t flags = 0;
	ssize_t sent;

	if (size > sizeof(frame) - 12)
		size = sizeof(frame) - 12, length = (uint32_t)size;
	memcpy(frame, &length, 4);
	memcpy(frame + 4, &type, 2);
	memcpy(frame + 6, &flags, 2);
	memcpy(frame + 8, &channel, 4);
	if (size)
		memcpy(frame + 12, payload, size);
	do
		sent = send(PLAN_FD, frame, 12 + size, MSG_NOSIGNAL);
	while (sent < 0 && errno == EINTR);
}

void die(const char *format, ...)
{
	char payload[8 + ERROR_TEXT_MAX];
	int32_t error = errno;
	va_list args;
	int written;
	uint32_t size;

	va_start(args, format);
	written = vsnprintf(payload + 8, ERROR_TEXT_MAX, format, args);
	va_end(args);
	size = written < 0 ? 0 : (uint32_t)written;
	if (size >= ERROR_TEXT_MAX)
		size = ERROR_TEXT_MAX - 1;
	memcpy(payload, &error, 4);
	memcpy(payload + 4, &size, 4);
	report(FRAME_ERROR, payload, 8 + size);
	_exit(1);
}

static void read_exactly(void *into, size_t size)
{
	char *at = into;

	while (size) {
		ssize_t got = read(PLAN_FD, at, size);

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0) {
			errno = got ? errno : EPIPE;
			die("reading the plan");
		}
		at += got;
		size -= (size_t)got;
	}
}

static void add_mount(struct plan *plan, const char *value)
{
	if (plan->n_mounts == PLAN_MAX_MOUNTS) {
		errno = E2BIG;
		die("more than %d mounts", PLAN_MAX_MOUNTS);
	}
	plan->mounts[plan->n_mounts++] =
		(struct plan_mount){ .value = value, .first = plan->n_shown };
}

static void add_shown(struct plan *plan, const char *layer)
{
	if (plan->n_mounts == 0) {
		errno = EINVAL;
		die("shown before any mount");
	}
	if (plan->n_shown == PLAN_MAX_SHOWN) {
		errno = E2BIG;
		die("more than %d layers in mounts", PLAN_MAX_SHOWN);
	}
	plan->shown[plan->n_shown++] = layer;
	plan->mounts[plan->n_mounts - 1].count++;
}

static void add_item(struct plan *plan, char *entry)
{
	char *equals = strchr(entry, '=');

	if (!equals) {
		errno = EINVAL;
		die("a plan item has no '=': %.64s", entry);
	}
	*equals = '\0';
	if (strcmp(entry, "layer") == 0) {
		if (plan->n_layers == PLAN_MAX_LAYERS) {
			errno = E2BIG;
			die("more than %d layers", PLAN_MAX_LAYERS);
		}
		plan->layers[plan->n_layers++] = equals + 1;
		return;
	}
	if (strcmp(entry, "mount") == 0) {
		add_mount(plan, equals + 1);
		return;
	}
	if (strcmp(entry, "shown") == 0) {
		add_shown(plan, equals + 1);
		return;
	}
	if (plan->n_items == PLAN_MAX_ITEMS) {
		errno = E2BIG;
		die("more than %d items in the plan", PLAN_MAX_ITEMS);
	}
	plan->items[plan->n_items++] =
		(struct plan_item){ .key = entry, .value = equals + 1 };
}

void plan_read(struct plan *plan)
{
	uint32_t size;
	size_t at = 0;

	memset(plan, 0, sizeof(*plan));
	read_exactly(&size, sizeof(size));
	if (size == 0 || size > PLAN_MAX) {
		errno = EMSGSIZE;
		die("a plan of %u bytes", size);
	}
	plan->text = malloc(size);
	plan->items = calloc(PLAN_MAX_ITEMS, sizeof(*plan->items));
	if (!plan->text || !plan->items)
		die("memory for the plan");
	read_exactly(plan->text, size);
	if (plan->text[size - 1] != '\0') {
		errno = EINVAL;
		die("the plan does not end with NUL");
	}
	while (at < size) {
		size_t length = strlen(plan->text + at);

		add_item(plan, plan->text + at);
		at += length + 1;
	}
}

const char *plan_get(const struct plan *plan, const char *key,
		     const char *missing)
{
	for (size_t i = plan->n_items; i-- > 0;)
		if (strcmp(plan->items[i].key, key) == 0)
			return plan->items[i].value;
	return missing;
}

uint64_t plan_number(const struct plan *plan, const char *key,
		     uint64_t missing)
{
	const char *text = plan_get(plan, key, NULL);
	unsigned long long number;
	char *end;

	if (!text)
		return missing;
	errno = 0;
	number = strtoull(text, &end, 10);
	if (errno || end == text || *end) {
		errno = EINVAL;
		die("'%s' is not a number: %.64s", key, text);
	}
	return number;
}

int plan_is(const struct plan *plan, const char *key, const char *value)
{
	const char *text = plan_get(plan, key, NULL);

	return text && strcmp(text, value) == 0;
}
