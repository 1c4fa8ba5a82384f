/* bare: what the kernel alone charges for one sandbox.
 *
 *   bare --work DIR --lower DIR [--lower DIR ...] [--bind PATH ...] [--cgroup DIR ...] [--unified]
 *        [--count K] [--concurrency C] [--warmup W] [--burst] [--plain] [--profile] [--skip STEP ...] [-- PATH ARG ...]
 *
 * Prints one latency a line, in microseconds, from before clone to wait returning. C workers are started beforehand and
 * work at once. With --burst they start each round together and a latency counts from the start of its round. With
 * --plain nothing is isolated: vfork, exec, wait. With --profile (concurrency 1) the lines are `STEP p50_us mean_us`.
 * DIR of --work is made if absent and removed at the end with all that was put in it; every failure ends the run with 1.
 * All mounts are made in the private mount namespace of each child.
 */
#define _GNU_SOURCE
#include "bare_steps.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define FAIL_SECONDS 300

struct shared {
  pthread_barrier_t barrier;
  volatile uint64_t round_start_ns;
  struct bare_stamps stamps;
};

struct settings {
  struct bare_plan plan;
  unsigned long count, concurrency, warmup;
  int burst, plain;
};

static void die(const char *what) {
  perror(what);
  exit(1);
}

/* Never follows a link and never leaves the device it started on. */
static int remove_tree(int parent, const char *name, dev_t device) {
  int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat st;
  if (fd < 0 || fstat(fd, &st)) return -1;
  if (st.st_dev != device) {
    errno = EXDEV;
    close(fd);
    return -1;
  }
  DIR *directory = fdopendir(fd);
  int failed = 0;
  for (struct dirent *entry; directory && (entry = readdir(directory));) {
    if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
    if (entry->d_type == DT_DIR ? remove_tree(fd, entry->d_name, device) : unlinkat(fd, entry->d_name, 0)) failed = -1;
  }
  if (directory) closedir(directory);
  return failed | unlinkat(parent, name, AT_REMOVEDIR);
}

static void remove_work_entry(const struct bare_plan *plan, const char *name) {
  int fd = open(plan->work, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  struct stat st;
  if (fd < 0 || fstat(fd, &st)) die(plan->work);
  if (remove_tree(fd, name, st.st_dev)) die("remove");
  close(fd);
}

static void remove_groups(const struct bare_plan *plan, const char *name) {
  char path[4096];
  for (size_t i = 0; i < plan->cgroup_count; i++) {
    snprintf(path, sizeof path, "%s/%s", plan->cgroups[i], name);
    int tries = 200;
    while (rmdir(path) && errno != ENOENT) {
      if (errno != EBUSY || !--tries) die(path);
      usleep(1000);
    }
  }
}

/* What a killed or failed worker left: every entry of `directory` that carries this run's mark. */
static void sweep(const struct bare_plan *plan) {
  char mark[32], name[256];
  snprintf(mark, sizeof mark, "b%d-", getpid());
  for (size_t i = 0; i <= plan->cgroup_count; i++) {
    DIR *directory = opendir(i < plan->cgroup_count ? plan->cgroups[i] : plan->work);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
      if (strncmp(entry->d_name, mark, strlen(mark))) continue;
      snprintf(name, sizeof name, "%s", entry->d_name);
      if (i < plan->cgroup_count) remove_groups(plan, name);
      else remove_work_entry(plan, name);
    }
    if (directory) closedir(directory);
  }
}

static pid_t start(const struct settings *settings, const char *name, struct bare_stamps *stamps) {
  const struct bare_plan *plan = &settings->plan;
  if (settings->plain) {
    pid_t pid = vfork();
    if (!pid) {
      execv(plan->argv[0], plan->argv);
      _exit(111);
    }
    return pid;
  }
  unsigned long flags = CLONE_NEWPID | SIGCHLD;
  if (!plan->profile) {
    flags |= CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS;
    if (!bare_skips(plan, STEP_UNSHARE_NET)) flags |= CLONE_NEWNET;
  }
  pid_t pid = (pid_t)syscall(SYS_clone, flags, NULL, NULL, NULL, NULL);
  if (!pid) bare_child(plan, name, stamps);
  return pid;
}

static double run_one(const struct settings *settings, const char *name, struct shared *shared) {
  int executed[2] = {-1, -1}, ended[2] = {-1, -1};
  char byte;
  if (settings->plan.profile) {
    memset(&shared->stamps, 0, sizeof shared->stamps);
    if (pipe2(executed, O_CLOEXEC) || pipe2(ended, 0) || fcntl(ended[0], F_SETFD, FD_CLOEXEC)) die("pipe");
  }
  uint64_t from = settings->burst ? shared->round_start_ns : bare_now_ns();
  pid_t pid = start(settings, name, &shared->stamps);
  if (pid < 0) die("clone");
  uint64_t exec_ns = 0, end_ns = 0;
  if (settings->plan.profile) {
    close(executed[1]);
    close(ended[1]);
    if (read(executed[0], &byte, 1)) die("read");
    exec_ns = bare_now_ns();
    if (read(ended[0], &byte, 1)) die("read");
    end_ns = bare_now_ns();
    close(executed[0]);
    close(ended[0]);
  }
  int status;
  while (waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) die("waitpid");
  uint64_t done = bare_now_ns();
  if (!WIFEXITED(status) || WEXITSTATUS(status)) {
    fprintf(stderr, "bare: sandbox %s ended with status 0x%x\n", name, status);
    exit(1);
  }
  if (settings->plan.profile) {
    shared->stamps.ns[STEP_EXEC] = exec_ns;
    shared->stamps.ns[STEP_RUN] = end_ns;
    shared->stamps.ns[STEP_TEARDOWN] = done;
    uint64_t last = from;
    for (;;) { /* stamps become durations, in the order in which they were taken */
      int next = -1;
      for (int i = 0; i < STEP_COUNT; i++)
        if (shared->stamps.ns[i] > last && (next < 0 || shared->stamps.ns[i] < shared->stamps.ns[next])) next = i;
      if (next < 0) break;
      uint64_t now = shared->stamps.ns[next];
      shared->stamps.ns[next] = 0;
      printf("@%d %.1f\n", next, (double)(now - last) / 1e3);
      last = now;
    }
  }
  return (double)(done - from) / 1e3;
}

static void work(const struct settings *settings, struct shared *shared, unsigned long worker, int out) {
  unsigned long rounds = settings->count / settings->concurrency, warm = settings->warmup;
  double *latencies = calloc(rounds, sizeof *latencies);
  char name[64];
  prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  if (!latencies) die("calloc");
  for (unsigned long i = 0; i < warm + rounds; i++) {
    snprintf(name, sizeof name, "b%d-%lu-%lu", getppid(), worker, i);
    if (settings->burst && pthread_barrier_wait(&shared->barrier) == PTHREAD_BARRIER_SERIAL_THREAD) shared->round_start_ns = bare_now_ns();
    if (settings->burst) pthread_barrier_wait(&shared->barrier);
    double us = run_one(settings, name, shared);
    if (i >= warm) latencies[i - warm] = us;
    if (settings->burst) pthread_barrier_wait(&shared->barrier);
    if (settings->plain) continue;
    remove_groups(&settings->plan, name);
    remove_work_entry(&settings->plan, name);
  }
  size_t bytes = rounds * sizeof *latencies;
  for (size_t sent = 0; sent < bytes;) {
    ssize_t n = write(out, (char *)latencies + sent, bytes - sent);
    if (n <= 0) die("write");
    sent += (size_t)n;
  }
  fflush(stdout);
  _exit(0);
}

/* A worker that failed leaves the others at the barrier, so its end is looked for while reading. */
static int reap(pid_t *pids, unsigned long n, unsigned long *left) {
  int status, failed = 0;
  for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
    --*left;
    failed |= status;
    for (unsigned long i = 0; i < n; i++)
      if (pids[i] == pid) pids[i] = 0;
  }
  for (unsigned long i = 0; failed && i < n; i++)
    if (pids[i]) kill(pids[i], SIGKILL);
  return failed;
}

static int supervise(const struct settings *settings, struct shared *shared) {
  unsigned long n = settings->concurrency, left = n;
  pid_t *pids = calloc(n, sizeof *pids);
  int channel[2], failed = 0;
  if (!pids || pipe2(channel, O_CLOEXEC)) die("pipe");
  fflush(stdout);
  for (unsigned long i = 0; i < n; i++) {
    pids[i] = fork();
    if (pids[i] < 0) die("fork");
    if (!pids[i]) work(settings, shared, i, channel[1]);
  }
  close(channel[1]);
  double latency;
  size_t have = 0;
  struct pollfd ready = {.fd = channel[0], .events = POLLIN};
  for (ssize_t got = 1; got > 0 || left;) {
    failed |= reap(pids, n, &left);
    if (poll(&ready, 1, 50) <= 0 || got <= 0) continue;
    got = read(channel[0], (char *)&latency + have, sizeof latency - have);
    have += got > 0 ? (size_t)got : 0;
    if (have < sizeof latency) continue;
    have = 0;
    if (!settings->plan.profile) printf("%.1f\n", latency);
  }
  free(pids);
  return failed;
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* The workers print `@STEP MICROSECONDS`; this folds them into one line a step. */
static void report_profile(FILE *lines, unsigned long skipped) {
  static double values[STEP_COUNT][4096];
  size_t n[STEP_COUNT] = {0};
  int step;
  double us;
  while (fscanf(lines, "@%d %lf\n", &step, &us) == 2)
    if (step >= 0 && step < STEP_COUNT && n[step] < 4096) values[step][n[step]++] = us;
  double total = 0;
  for (step = 0; step < STEP_COUNT; step++) {
    if (n[step] <= skipped) continue;
    size_t kept = n[step] - skipped;
    double *v = values[step] + skipped, sum = 0;
    for (size_t i = 0; i < kept; i++) sum += v[i];
    qsort(v, kept, sizeof *v, by_value);
    printf("%s %.1f %.1f\n", bare_step_names[step], v[kept / 2], sum / (double)kept);
    total += sum / (double)kept;
  }
  printf("total - %.1f\n", total);
}

static void parse(int argc, char **argv, struct settings *s) {
  static char *const default_argv[] = {"/usr/bin/true", NULL};
  s->count = 100;
  s->concurrency = 1;
  s->plan.argv = default_argv;
  for (int i = 1; i < argc; i++) {
    const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
    int used = 1;
    if (!strcmp(name, "--")) {
      s->plan.argv = argv + i + 1;
      break;
    } else if (!strcmp(name, "--work")) s->plan.work = value;
    else if (!strcmp(name, "--lower") && s->plan.lower_count < 500) s->plan.lowers[s->plan.lower_count++] = value;
    else if (!strcmp(name, "--bind") && s->plan.bind_count < 32) s->plan.binds[s->plan.bind_count++] = value;
    else if (!strcmp(name, "--cgroup") && s->plan.cgroup_count < 16) s->plan.cgroups[s->plan.cgroup_count++] = value;
    else if (!strcmp(name, "--skip") && s->plan.skip_count < STEP_COUNT) s->plan.skips[s->plan.skip_count++] = value;
    else if (!strcmp(name, "--count")) s->count = strtoul(value, NULL, 10);
    else if (!strcmp(name, "--concurrency")) s->concurrency = strtoul(value, NULL, 10);
    else if (!strcmp(name, "--warmup")) s->warmup = strtoul(value, NULL, 10);
    else {
      used = 0;
      if (!strcmp(name, "--burst")) s->burst = 1;
      else if (!strcmp(name, "--plain")) s->plain = 1;
      else if (!strcmp(name, "--profile")) s->plan.profile = 1;
      else if (!strcmp(name, "--unified")) s->plan.unified = 1;
      else {
        fprintf(stderr, "bare: unknown option %s\n", name);
        exit(2);
      }
    }
    i += used;
  }
  if (!s->concurrency || s->concurrency > 1024 || s->count < s->concurrency || (s->plan.profile && s->concurrency != 1) || !*s->plan.argv ||
      (!s->plain && (!s->plan.work || !s->plan.lower_count))) {
    fprintf(stderr, "bare: give --work and --lower, a count of at least the concurrency, and profile one at a time\n");
    exit(2);
  }
}

int main(int argc, char **argv) {
  static struct settings settings;
  parse(argc, argv, &settings);
  struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  pthread_barrierattr_t attributes;
  if (shared == MAP_FAILED || pthread_barrierattr_init(&attributes) || pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) ||
      pthread_barrier_init(&shared->barrier, &attributes, (unsigned)settings.concurrency))
    die("barrier");
  char path[4096];
  static const char *const needed[] = {"", "/root", "/identity"};
  for (size_t i = 0; !settings.plain && i < sizeof needed / sizeof *needed; i++) {
    snprintf(path, sizeof path, "%s%s", settings.plan.work, needed[i]);
    if (mkdir(path, 0700) && errno != EEXIST) die(path);
  }
  alarm(FAIL_SECONDS);
  FILE *lines = NULL;
  int keep = -1;
  if (settings.plan.profile) {
    lines = tmpfile();
    keep = dup(1);
    if (!lines || keep < 0 || dup2(fileno(lines), 1) < 0) die("tmpfile");
  }
  int failed = supervise(&settings, shared);
  if (settings.plan.profile) {
    fflush(stdout);
    dup2(keep, 1);
    rewind(lines);
    report_profile(lines, settings.warmup);
  }
  if (!settings.plain) sweep(&settings.plan);
  for (size_t i = sizeof needed / sizeof *needed; !settings.plain && i-- > 0;) {
    snprintf(path, sizeof path, "%s%s", settings.plan.work, needed[i]);
    if (rmdir(path)) die(path);
  }
  return failed ? 1 : 0;
}
