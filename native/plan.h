/* The plan: what Python tells launch and reroot to do, as NUL-terminated
 * "key=value" items behind one length, and the way back for errors. */
#ifndef WF_PLAN_H
#define WF_PLAN_H

#include <stddef.h>
#include <stdint.h>
#include <stdnoreturn.h>

#define PLAN_FD 3	     /* the socket to the owner */
#define PLAN_MAX (4u << 20)  /* bytes */
#define PLAN_MAX_LAYERS 500  /* the kernel's limit on lower directories */
#define PLAN_MAX_ITEMS 256   /* binds, identity files, knobs */
#define PLAN_MAX_MOUNTS 16   /* directories of snapshots */
#define PLAN_MAX_SHOWN 1000  /* layers of all of them together */

struct plan_item {
	const char *key, *value;
};

/* mount=TARGET\tPATH, then shown= for each of its layers, top first. */
struct plan_mount {
	const char *value;
	size_t first, count; /* of the plan's `shown` */
};

struct plan {
	char *text;
	struct plan_item *items;
	size_t n_items;
	const char *layers[PLAN_MAX_LAYERS];
	size_t n_layers;
	struct plan_mount mounts[PLAN_MAX_MOUNTS];
	size_t n_mounts;
	const char *shown[PLAN_MAX_SHOWN];
	size_t n_shown;
};

/* Reads one plan from PLAN_FD; dies with a report when it is malformed. */
void plan_read(struct plan *plan);
/* The value of the last item with this key, or `missing`. */
const char *plan_get(const struct plan *plan, const char *key,
		     const char *missing);
uint64_t plan_number(const struct plan *plan, const char *key,
		     uint64_t missing);
int plan_is(const struct plan *plan, const char *key, const char *value);

/* Sends an ERROR frame that names the step and errno, then exits with 1. */
noreturn void die(const char *format, ...)
	__attribute__((format(printf, 1, 2)));
/* Sends one frame on PLAN_FD. */
void report(uint16_t type, const void *payload, size_t size);

#endif
