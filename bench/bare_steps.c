/* One sandbox by system calls alone: the floor under every figure that is given as a ratio. */
#define _GNU_SOURCE
#include "bare_steps.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

/* glibc before 2.36 has no declarations for the new mount calls, so they are made by number with their own constants. */
#define WF_FSCONFIG_SET_FLAG 0
#define WF_FSCONFIG_SET_STRING 1
#define WF_FSCONFIG_CMD_CREATE 6
#define WF_ATTR_RDONLY 0x1
#define WF_ATTR_NOSUID 0x2
#define WF_ATTR_NODEV 0x4
#define WF_ATTR_NOEXEC 0x8
#define WF_MOVE_FROM_EMPTY 0x4
#define WF_OPEN_TREE_CLONE 1
#define WF_RECURSIVE 0x8000
struct wf_mount_attr { uint64_t set, clear, propagation, userns_fd; };

const char *const bare_step_names[STEP_COUNT] = {
    "clone",      "unshare_net", "unshare_mount", "unshare_rest", "cgroup_mkdir", "cgroup_limits",   "cgroup_join", "cgroup_namespace", "private",
    "directories", "overlay_make", "overlay_attach", "binds",     "proc",         "proc_masks",      "sys",         "dev",              "devpts_shm",
    "identity",   "pivot",       "detach_old_root", "loopback",   "capabilities", "seccomp",         "exec",        "run",              "teardown"};

uint64_t bare_now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void bare_fail(const char *what, const char *subject) {
  dprintf(2, "bare: %s %s: %s\n", what, subject ? subject : "", strerror(errno));
  _exit(111);
}

int bare_skips(const struct bare_plan *plan, enum bare_step step) {
  for (size_t i = 0; i < plan->skip_count; i++)
    if (!strcmp(plan->skips[i], bare_step_names[step])) return 1;
  return 0;
}

static void write_file(const char *path, const char *text, int must) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0 || write(fd, text, strlen(text)) < 0) {
    if (must) bare_fail("write", path);
  }
  if (fd >= 0) close(fd);
}

static void make_directory(const char *path) {
  if (mkdir(path, 0755) && errno != EEXIST) bare_fail("mkdir", path);
}

static void touch(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd < 0 || write(fd, text, strlen(text)) < 0) bare_fail("create", path);
  close(fd);
}

static void do_cgroups(const struct bare_plan *plan, const char *name, struct bare_stamps *stamps) {
  static const struct { const char *file, *text; int unified; } limits[] = {
      {"memory.limit_in_bytes", "2147483648", 0}, {"pids.max", "512", 0}, {"cpu.cfs_quota_us", "200000", 0},
      {"memory.max", "2147483648", 1},            {"pids.max", "512", 1}, {"cpu.max", "200000 100000", 1}};
  char path[4096];
  for (size_t i = 0; i < plan->cgroup_count; i++) {
    snprintf(path, sizeof path, "%s/%s", plan->cgroups[i], name);
    make_directory(path);
  }
  stamps->ns[STEP_CGROUP_MKDIR] = bare_now_ns();
  for (size_t i = 0; i < plan->cgroup_count; i++) {
    for (size_t j = 0; j < sizeof limits / sizeof *limits; j++) {
      if (limits[j].unified != plan->unified) continue;
      snprintf(path, sizeof path, "%s/%s/%s", plan->cgroups[i], name, limits[j].file);
      int fd = open(path, O_WRONLY | O_CLOEXEC);
      if (fd < 0) continue; /* belongs to another hierarchy */
      if (write(fd, limits[j].text, strlen(limits[j].text)) < 0) bare_fail("write", path);
      close(fd);
    }
  }
  stamps->ns[STEP_CGROUP_LIMITS] = bare_now_ns();
  for (size_t i = 0; i < plan->cgroup_count; i++) {
    snprintf(path, sizeof path, "%s/%s/%s", plan->cgroups[i], name, plan->unified ? "cgroup.procs" : "tasks");
    write_file(path, "0", 1);
  }
  stamps->ns[STEP_CGROUP_JOIN] = bare_now_ns();
}

static int configure(int fs, unsigned command, const char *key, const char *value) {
  return (int)syscall(SYS_fsconfig, fs, command, key, value, 0);
}

static void attach(int mount_fd, const char *target) {
  if (syscall(SYS_move_mount, mount_fd, "", AT_FDCWD, target, WF_MOVE_FROM_EMPTY)) bare_fail("move_mount", target);
  close(mount_fd);
}

static int make_overlay(const struct bare_plan *plan, const char *upper, const char *workdir) {
  static const char *const options[][2] = {{"index", "off"}, {"redirect_dir", "on"}, {"xino", "off"}, {"metacopy", "off"}};
  int fs = (int)syscall(SYS_fsopen, "overlay", 1 /* CLOEXEC */);
  if (fs < 0) bare_fail("fsopen", "overlay");
  for (size_t i = 0; i < plan->lower_count; i++)
    if (configure(fs, WF_FSCONFIG_SET_STRING, "lowerdir+", plan->lowers[i])) bare_fail("lowerdir+ (needs Linux 6.8)", plan->lowers[i]);
  if (configure(fs, WF_FSCONFIG_SET_STRING, "upperdir", upper)) bare_fail("upperdir", upper);
  if (configure(fs, WF_FSCONFIG_SET_STRING, "workdir", workdir)) bare_fail("workdir", workdir);
  if (configure(fs, WF_FSCONFIG_SET_FLAG, "volatile", NULL)) bare_fail("fsconfig", "volatile");
  for (size_t i = 0; i < sizeof options / sizeof *options; i++)
    if (configure(fs, WF_FSCONFIG_SET_STRING, options[i][0], options[i][1])) bare_fail("fsconfig", options[i][0]);
  if (configure(fs, WF_FSCONFIG_CMD_CREATE, NULL, NULL)) bare_fail("create overlay on", upper);
  int mount_fd = (int)syscall(SYS_fsmount, fs, 1 /* CLOEXEC */, WF_ATTR_NODEV);
  if (mount_fd < 0) bare_fail("fsmount overlay on", upper);
  close(fs);
  return mount_fd;
}

static void bind_read_only(const char *source, const char *target, uint64_t attributes) {
  int fd = (int)syscall(SYS_open_tree, AT_FDCWD, source, WF_OPEN_TREE_CLONE | WF_RECURSIVE | O_CLOEXEC);
  if (fd < 0) bare_fail("open_tree", source);
  struct wf_mount_attr attr = {.set = attributes};
  if (attributes && syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH | WF_RECURSIVE, &attr, sizeof attr)) bare_fail("mount_setattr", source);
  attach(fd, target);
}

/* Paths are relative to the new root, which is the current directory. */
static void mask_proc(void) {
  static const char *const masked[] = {"proc/acpi", "proc/kcore", "proc/keys", "proc/latency_stats", "proc/timer_list", "proc/timer_stats", "proc/sched_debug", "proc/scsi", "proc/asound", "proc/interrupts", "sys/firmware", "sys/devices/virtual/powercap"};
  static const char *const read_only[] = {"proc/bus", "proc/fs", "proc/irq", "proc/sys", "proc/sysrq-trigger"};
  for (size_t i = 0; i < sizeof masked / sizeof *masked; i++) {
    struct stat st;
    if (stat(masked[i], &st)) continue;
    if (S_ISDIR(st.st_mode)) {
      if (mount("tmpfs", masked[i], "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=0")) bare_fail("mask", masked[i]);
    } else {
      bind_read_only("dev/null", masked[i], 0);
    }
  }
  for (size_t i = 0; i < sizeof read_only / sizeof *read_only; i++)
    if (!access(read_only[i], F_OK)) bind_read_only(read_only[i], read_only[i], WF_ATTR_RDONLY | WF_ATTR_NOSUID | WF_ATTR_NODEV | WF_ATTR_NOEXEC);
}

static void make_dev(void) {
  static const struct { const char *path; unsigned major, minor; } nodes[] = {{"dev/null", 1, 3}, {"dev/zero", 1, 5}, {"dev/full", 1, 7}, {"dev/random", 1, 8}, {"dev/urandom", 1, 9}, {"dev/tty", 5, 0}};
  static const char *const links[][2] = {{"/proc/self/fd", "dev/fd"}, {"/proc/self/fd/0", "dev/stdin"}, {"/proc/self/fd/1", "dev/stdout"}, {"/proc/self/fd/2", "dev/stderr"}, {"pts/ptmx", "dev/ptmx"}};
  if (mount("tmpfs", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=0755,size=65536k")) bare_fail("mount", "dev");
  for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++)
    if (mknod(nodes[i].path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) || chmod(nodes[i].path, 0666)) bare_fail("mknod", nodes[i].path);
  for (size_t i = 0; i < sizeof links / sizeof *links; i++)
    if (symlink(links[i][0], links[i][1])) bare_fail("symlink", links[i][1]);
  make_directory("dev/pts");
  make_directory("dev/shm");
}

static void make_identity(const struct bare_plan *plan, const char *name) {
  static const char *const files[] = {"hostname", "hosts", "resolv.conf", "machine-id"};
  char source[4096], target[64];
  snprintf(source, sizeof source, "%s/identity", plan->work);
  if (mount("tmpfs", source, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0755,size=256k")) bare_fail("mount", source);
  for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
    snprintf(source, sizeof source, "%s/identity/%s", plan->work, files[i]);
    snprintf(target, sizeof target, "etc/%s", files[i]);
    touch(source, name);
    if (access(target, F_OK)) touch(target, "");
    bind_read_only(source, target, 0);
  }
  if (sethostname(name, strlen(name))) bare_fail("sethostname", name);
}

static void drop_capabilities(void) {
  static const unsigned kept[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP, CAP_NET_BIND_SERVICE, CAP_SYS_CHROOT, CAP_AUDIT_WRITE, CAP_SETFCAP};
  uint64_t mask = 0;
  for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) mask |= (uint64_t)1 << kept[i];
  for (unsigned cap = 0; cap < 64; cap++)
    if (!(mask >> cap & 1) && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) && errno != EINVAL) bare_fail("drop", "capability");
  struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
  struct __user_cap_data_struct data[2] = {{(uint32_t)mask, (uint32_t)mask, 0}, {(uint32_t)(mask >> 32), (uint32_t)(mask >> 32), 0}};
  if (syscall(SYS_capset, &header, data)) bare_fail("capset", "");
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) bare_fail("no_new_privs", "");
}

static const unsigned denied[] = {
      SYS_acct, SYS_add_key, SYS_adjtimex, SYS_bpf, SYS_clock_adjtime, SYS_clock_settime, SYS_create_module, SYS_delete_module, SYS_finit_module, SYS_fsconfig, SYS_fsmount, SYS_fsopen, SYS_fspick, SYS_get_kernel_syms, SYS_get_mempolicy, SYS_init_module, SYS_io_uring_enter, SYS_io_uring_register, SYS_io_uring_setup, SYS_ioperm, SYS_iopl, SYS_kcmp, SYS_kexec_file_load, SYS_kexec_load, SYS_keyctl, SYS_lookup_dcookie, SYS_mbind, SYS_mount, SYS_mount_setattr, SYS_move_mount, SYS_move_pages, SYS_migrate_pages, SYS_name_to_handle_at, SYS_nfsservctl, SYS_open_by_handle_at, SYS_open_tree, SYS_perf_event_open, SYS_personality, SYS_pivot_root, SYS_process_madvise, SYS_process_vm_readv, SYS_process_vm_writev, SYS_ptrace, SYS_query_module, SYS_quotactl, SYS_reboot, SYS_request_key, SYS_set_mempolicy, SYS_setdomainname, SYS_sethostname, SYS_setns, SYS_settimeofday, SYS_swapoff, SYS_swapon, SYS_syslog, SYS_umount2, SYS_unshare, SYS_userfaultfd, SYS_uselib, SYS_vhangup};

enum { DENIED = sizeof denied / sizeof *denied, LEAF = 4, LENGTH = 4 + 2 * DENIED + 6 };

struct filter {
  struct sock_filter code[LENGTH];
  unsigned calls[DENIED], length, tail; /* tail: where the four answers stand */
};

static int by_number(const void *a, const void *b) {
  return *(const int *)a - *(const int *)b;
}

/* A search tree: on loading, the kernel tries a filter on every call number, so a list of 60 costs 0.2 ms and a tree a third. */
static void search(struct filter *f, unsigned low, unsigned high, int measure) {
  if (high - low > LEAF) {
    unsigned middle = low + (high - low) / 2, at = f->length++;
    search(f, low, middle, measure);
    f->code[at] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, f->calls[middle], (uint8_t)(f->length - at - 1), 0);
    search(f, middle, high, measure);
    return;
  }
  for (unsigned i = low; i < high; i++, f->length++) {
    uint8_t to_allow = i + 1 == high ? (uint8_t)(f->tail - f->length - 1) : 0;
    if (!measure) f->code[f->length] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, f->calls[i], (uint8_t)(f->tail + 1 - f->length - 1), to_allow);
  }
}

static void filter_calls(void) {
  struct filter f = {.tail = 0};
  memcpy(f.calls, denied, sizeof denied);
  qsort(f.calls, DENIED, sizeof *f.calls, by_number);
  for (int measure = 1; measure >= 0; measure--) {
    f.length = 5;
    search(&f, 0, DENIED, measure);
    f.tail = f.length;
  }
  f.code[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
  f.code[1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 0, (uint8_t)(f.tail + 3 - 2));
  f.code[2] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
  f.code[3] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, (uint8_t)(f.tail + 3 - 4), 0);
  f.code[4] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, (uint8_t)(f.tail + 2 - 5), 0);
  static const unsigned answers[] = {SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ERRNO | ENOSYS, SECCOMP_RET_KILL_PROCESS};
  for (unsigned i = 0; i < 4; i++) f.code[f.length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, answers[i]);
  struct sock_fprog program = {.len = (unsigned short)f.length, .filter = f.code};
  if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program)) bare_fail("seccomp", "");
}

static void loopback_up(void) {
  int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  struct ifreq request = {.ifr_name = "lo"};
  if (fd < 0 || ioctl(fd, SIOCGIFFLAGS, &request)) bare_fail("ioctl", "lo");
  request.ifr_flags |= IFF_UP;
  if (ioctl(fd, SIOCSIFFLAGS, &request)) bare_fail("ioctl up", "lo");
  close(fd);
}

#define STEP(step, ...)                                  \
  do {                                                   \
    if (!bare_skips(plan, step)) {                       \
      __VA_ARGS__;                                       \
      stamps->ns[step] = bare_now_ns();                  \
    }                                                    \
  } while (0)

static void unshare_or_fail(int flags) {
  if (unshare(flags)) bare_fail("unshare", "");
}

static void make_root(const struct bare_plan *plan, const char *name, struct bare_stamps *stamps) {
  char upper[4096], workdir[4096], root[4096], target[4096];
  snprintf(root, sizeof root, "%s/root", plan->work);
  snprintf(upper, sizeof upper, "%s/%s", plan->work, name);
  STEP(STEP_DIRECTORIES, make_directory(upper); snprintf(upper, sizeof upper, "%s/%s/upper", plan->work, name); make_directory(upper);
       snprintf(workdir, sizeof workdir, "%s/%s/work", plan->work, name); make_directory(workdir));
  int overlay = make_overlay(plan, upper, workdir);
  stamps->ns[STEP_OVERLAY_MAKE] = bare_now_ns();
  STEP(STEP_OVERLAY_ATTACH, attach(overlay, root); if (chdir(root)) bare_fail("chdir", root));
  STEP(STEP_BINDS, for (size_t i = 0; i < plan->bind_count; i++) {
    snprintf(target, sizeof target, "%s%s", root, plan->binds[i]);
    bind_read_only(plan->binds[i], target, WF_ATTR_RDONLY | WF_ATTR_NODEV);
  });
}

void bare_child(const struct bare_plan *plan, const char *name, struct bare_stamps *stamps) {
  stamps->ns[STEP_CLONE] = bare_now_ns();
  prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  if (plan->profile) {
    STEP(STEP_UNSHARE_NET, unshare_or_fail(CLONE_NEWNET));
    STEP(STEP_UNSHARE_MOUNT, unshare_or_fail(CLONE_NEWNS));
    STEP(STEP_UNSHARE_REST, unshare_or_fail(CLONE_NEWIPC | CLONE_NEWUTS));
  }
  STEP(STEP_CGROUP_JOIN, do_cgroups(plan, name, stamps));
  STEP(STEP_CGROUP_NAMESPACE, unshare_or_fail(CLONE_NEWCGROUP));
  STEP(STEP_PRIVATE, if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) bare_fail("make private", "/"));
  make_root(plan, name, stamps);
  STEP(STEP_DEV, make_dev());
  STEP(STEP_DEVPTS_SHM, if (mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")) bare_fail("mount", "devpts");
       if (mount("tmpfs", "dev/shm", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=1777,size=65536k")) bare_fail("mount", "shm"));
  STEP(STEP_PROC, if (mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) bare_fail("mount", "proc"));
  STEP(STEP_SYS, if (mount("sysfs", "sys", "sysfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL)) bare_fail("mount", "sys"));
  STEP(STEP_PROC_MASKS, mask_proc());
  STEP(STEP_IDENTITY, make_identity(plan, name));
  if (syscall(SYS_pivot_root, ".", ".")) bare_fail("pivot_root", plan->work);
  stamps->ns[STEP_PIVOT] = bare_now_ns();
  if (umount2(".", MNT_DETACH) || chdir("/")) bare_fail("detach", "old root");
  stamps->ns[STEP_DETACH_OLD_ROOT] = bare_now_ns();
  STEP(STEP_LOOPBACK, loopback_up());
  STEP(STEP_CAPABILITIES, drop_capabilities());
  STEP(STEP_SECCOMP, filter_calls());
  char *const no_variables[] = {NULL};
  execve(plan->argv[0], plan->argv, no_variables);
  bare_fail("exec", plan->argv[0]);
}
