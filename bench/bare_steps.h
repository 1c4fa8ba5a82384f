/* The steps by which `bare` makes one sandbox, and the clock readings between them. */
#ifndef BARE_STEPS_H
#define BARE_STEPS_H

#include <stdint.h>
#include <stddef.h>

enum bare_step {
  STEP_CLONE,
  STEP_UNSHARE_NET,
  STEP_UNSHARE_MOUNT,
  STEP_UNSHARE_REST,
  STEP_CGROUP_MKDIR,
  STEP_CGROUP_LIMITS,
  STEP_CGROUP_JOIN,
  STEP_CGROUP_NAMESPACE,
  STEP_PRIVATE,
  STEP_DIRECTORIES,
  STEP_OVERLAY_MAKE,
  STEP_OVERLAY_ATTACH,
  STEP_BINDS,
  STEP_PROC,
  STEP_PROC_MASKS,
  STEP_SYS,
  STEP_DEV,
  STEP_DEVPTS_SHM,
  STEP_IDENTITY,
  STEP_PIVOT,
  STEP_DETACH_OLD_ROOT,
  STEP_LOOPBACK,
  STEP_CAPABILITIES,
  STEP_SECCOMP,
  STEP_EXEC,
  STEP_RUN,
  STEP_TEARDOWN,
  STEP_COUNT
};

extern const char *const bare_step_names[STEP_COUNT];

struct bare_plan {
  const char *work;            /* directory for uppers and mount points, made by the caller */
  const char *lowers[512];     /* top first */
  size_t lower_count;
  const char *binds[32];       /* host paths shown read-only at the same place inside */
  size_t bind_count;
  const char *cgroups[16];     /* directories, one per hierarchy, under which a group is made */
  size_t cgroup_count;
  const char *skips[STEP_COUNT];
  size_t skip_count;
  int unified;                 /* the groups are cgroup v2 */
  int profile;
  char *const *argv;           /* what to run inside; argv[0] is a path */
};

struct bare_stamps {
  uint64_t ns[STEP_COUNT];     /* when each step ended; 0 for one that did not run */
};

uint64_t bare_now_ns(void);
void bare_fail(const char *what, const char *subject) __attribute__((noreturn));
int bare_skips(const struct bare_plan *plan, enum bare_step step);

/* Runs as PID 1 of a new pid namespace (and, unless profiling, of all the new ones); never returns. */
void bare_child(const struct bare_plan *plan, const char *name, struct bare_stamps *stamps) __attribute__((noreturn));

#endif
