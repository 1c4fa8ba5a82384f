/* Overlays and the mount calls that C libraries of supported systems lack. */
#ifndef WF_OVERLAY_H
#define WF_OVERLAY_H

#include "plan.h"

#include <linux/mount.h>
#include <stdint.h>

int wf_fsopen(const char *fs, unsigned int flags);
int wf_fsmount(int fs_fd, unsigned int flags, unsigned int attributes);
int wf_open_tree(int dir, const char *path, unsigned int flags);
int wf_move_mount(int from_dir, const char *from, int to_dir, const char *to,
		  unsigned int flags);
int wf_mount_setattr(int dir, const char *path, unsigned int flags,
		     uint64_t set, uint64_t clear);
/* Opens a path below `dir` without following a link; O_PATH. */
int wf_open_beneath(int dir, const char *path);

/* A detached overlay over the plan's layers, upper and work; returns a mount
 * descriptor. The legacy way needs a private mount namespace of the caller's
 * and the plan's "scratch" directory. Dies with a report. */
int overlay_mount(const struct plan *plan);
/* The same without an upper, read-only, over the layers of a mount, of which
 * the kernel wants two at least. */
int overlay_show(const struct plan *plan, const struct plan_mount *mount);

#endif
