/* The mounts of a sandbox besides its root: binds from the host, /dev, /sys,
 * the identity files, /proc. */
#ifndef WF_FURNISH_H
#define WF_FURNISH_H

#include "plan.h"

struct furniture {
	int fds[PLAN_MAX_ITEMS];  /* detached copies of the host's sources */
	int shown[PLAN_MAX_MOUNTS]; /* detached directories of snapshots */
	int devices[6];		  /* of the host's device files, or -1 */
};

/* Opens what comes from the host; before the pivot. */
void furniture_open(const struct plan *plan, struct furniture *furniture);
/* Mounts all but /proc on the root that the caller now lives in. */
void furnish(const struct plan *plan, struct furniture *furniture);
/* Mounts /proc with its masks; only PID 1 of the new namespace can. */
void furnish_proc(int *proc_fd);

#endif
