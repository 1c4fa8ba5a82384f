#define _GNU_SOURCE
#include "guard.h"
#include "plan.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define NATIVE_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE_ARCH AUDIT_ARCH_AARCH64
#else
#error "the system call filter knows x86_64 and aarch64"
#endif

#define X32_BIT 0x40000000u
#define FILTER_MAX 256
#define TIOCSTI_CMD 0x5412u   /* types into somebody else's terminal */
#define TIOCLINUX_CMD 0x541Cu /* pastes into a console */
#define FAMILY_VSOCK 40u      /* reaches the hypervisor, past the network */

#define NAMESPACE_FLAGS                                                     \
	(CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC |       \
	 CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | 0x80u /* NEWTIME */)

/* Docker's default set less MKNOD and AUDIT_WRITE. */
static const int kept_capabilities[] = {
	CAP_CHOWN,  CAP_DAC_OVERRIDE, CAP_FOWNER,	    CAP_FSETID,
	CAP_KILL,   CAP_SETGID,	      CAP_SETUID,	    CAP_SETPCAP,
	CAP_SETFCAP, CAP_SYS_CHROOT,  CAP_NET_BIND_SERVICE, CAP_NET_RAW,
};

/* Refused with EPERM whatever their arguments. */
static const unsigned int refused[] = {
	SYS_mount, SYS_umount2, SYS_pivot_root, SYS_move_mount, SYS_open_tree,
	SYS_fsopen, SYS_fsconfig, SYS_fsmount, SYS_fspick, SYS_mount_setattr,
	SYS_unshare, SYS_setns, SYS_bpf, SYS_perf_event_open, SYS_kexec_load,
#ifdef SYS_kexec_file_load
	SYS_kexec_file_load,
#endif
	SYS_init_module, SYS_finit_module, SYS_delete_module,
	SYS_open_by_handle_at, SYS_acct, SYS_add_key, SYS_request_key,
	SYS_keyctl, SYS_reboot, SYS_swapon, SYS_swapoff, SYS_settimeofday,
	SYS_clock_settime, SYS_clock_adjtime, SYS_adjtimex, SYS_quotactl,
	SYS_quotactl_fd, SYS_syslog, SYS_userfaultfd, SYS_vhangup,
	SYS_lookup_dcookie, SYS_nfsservctl, SYS_move_pages, SYS_mbind,
	SYS_migrate_pages, SYS_set_mempolicy, SYS_fanotify_init,
	SYS_process_vm_readv, SYS_process_vm_writev, SYS_kcmp,
#ifdef __x86_64__
	SYS_iopl, SYS_ioperm, SYS_uselib, SYS_ustat, SYS_sysfs,
	SYS_modify_ldt, SYS__sysctl, SYS_create_module, SYS_get_kernel_syms,
	SYS_query_module,
#endif
};

/* Answered with ENOSYS, so that programs take their older way. */
static const unsigned int absent[] = {
	SYS_clone3, SYS_io_uring_setup, SYS_io_uring_enter,
	SYS_io_uring_register,
};

struct filter {
	struct sock_filter code[FILTER_MAX];
	unsigned short length;
};

static void emit(struct filter *f, struct sock_filter one)
{
	if (f->length == FILTER_MAX) {
		errno = E2BIG;
		die("the system call filter is too long");
	}
	f->code[f->length++] = one;
}

static void load(struct filter *f, size_t offset)
{
	emit(f, (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
					     (unsigned int)offset));
}

static void answer(struct filter *f, unsigned int action)
{
	emit(f, (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action));
}

/* When the loaded word equals `value`, runs the next `body` instructions. */
static void if_equal(struct filter *f, unsigned int value, unsigned char body)
{
	emit(f, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value,
					     0, body));
}

static size_t argument(int index)
{
	return offsetof(struct seccomp_data, args) + 8 * (size_t)index;
}

static void reload_number(struct filter *f)
{
	load(f, offsetof(struct seccomp_data, nr));
}

/* Refuses `call` when bits of `mask` are set in argument `index`. */
static void refuse_bits(struct filter *f, unsigned int call, int index,
			unsigned int mask)
{
	if_equal(f, call, 4);
	load(f, argument(index));
	emit(f, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, mask,
					     0, 1));
	answer(f, SECCOMP_RET_ERRNO | EPERM);
	reload_number(f);
}

/* Refuses `call` when argument `index` is `value`. */
static void refuse_value(struct filter *f, unsigned int call, int index,
			 unsigned int value)
{
	if_equal(f, call, 4);
	load(f, argument(index));
	if_equal(f, value, 1);
	answer(f, SECCOMP_RET_ERRNO | EPERM);
	reload_number(f);
}

/* Refuses `call` unless argument `index` is zero. */
static void refuse_nonzero(struct filter *f, unsigned int call, int index)
{
	if_equal(f, call, 4);
	load(f, argument(index));
	emit(f, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0, 1,
					     0));
	answer(f, SECCOMP_RET_ERRNO | EPERM);
	reload_number(f);
}

/* personality(2): the plain ones and the query; others weaken ASLR. */
static void limit_personality(struct filter *f)
{
	static const unsigned int allowed[] = { 0, 8, 0x20000, 0x20008,
						0xffffffff };
	const unsigned char n = sizeof(allowed) / sizeof(allowed[0]);

	if_equal(f, SYS_personality, (unsigned char)(n + 3));
	load(f, argument(0));
	for (unsigned char i = 0; i < n; i++)
		emit(f, (struct sock_filter)BPF_JUMP(
				BPF_JMP | BPF_JEQ | BPF_K, allowed[i],
				(unsigned char)(n - i), 0));
	answer(f, SECCOMP_RET_ERRNO | EPERM);
	reload_number(f);
}

static void build(struct filter *f)
{
	load(f, offsetof(struct seccomp_data, arch));
	emit(f, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K,
					     NATIVE_ARCH, 1, 0));
	answer(f, SECCOMP_RET_KILL_PROCESS);
	reload_number(f);
#ifdef __x86_64__
	emit(f, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K,
					     X32_BIT, 0, 1));
	answer(f, SECCOMP_RET_KILL_PROCESS);
#endif
	for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
		if_equal(f, refused[i], 1);
		answer(f, SECCOMP_RET_ERRNO | EPERM);
	}
	for (size_t i = 0; i < sizeof(absent) / sizeof(absent[0]); i++) {
		if_equal(f, absent[i], 1);
		answer(f, SECCOMP_RET_ERRNO | ENOSYS);
	}
	refuse_bits(f, SYS_clone, 0, (unsigned int)NAMESPACE_FLAGS & ~0x80u);
	refuse_nonzero(f, SYS_prlimit64, 0);
	refuse_value(f, SYS_ioctl, 1, TIOCSTI_CMD);
	refuse_value(f, SYS_ioctl, 1, TIOCLINUX_CMD);
	refuse_value(f, SYS_socket, 0, FAMILY_VSOCK);
	limit_personality(f);
	answer(f, SECCOMP_RET_ALLOW);
}

static void drop_capabilities(void)
{
	struct __user_cap_header_struct header = {
		.version = _LINUX_CAPABILITY_VERSION_3,
	};
	struct __user_cap_data_struct data[2] = { { 0 } };
	unsigned long long kept = 0;

	for (size_t i = 0;
	     i < sizeof(kept_capabilities) / sizeof(kept_capabilities[0]); i++)
		kept |= 1ull << kept_capabilities[i];
	for (int cap = 0; cap < 64; cap++) {
		if (kept >> cap & 1)
			continue;
		if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0) {
			if (errno == EINVAL)
				break; /* past the kernel's last one */
			die("dropping capability %d", cap);
		}
	}
	if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0)
		die("clearing ambient capabilities");
	if (syscall(SYS_capget, &header, data) < 0)
		die("reading capabilities");
	for (int i = 0; i < 2; i++) {
		unsigned int part = (unsigned int)(kept >> (32 * i));

		data[i].permitted &= part;
		data[i].effective = data[i].permitted;
		data[i].inheritable = 0;
	}
	if (syscall(SYS_capset, &header, data) < 0)
		die("dropping capabilities");
}

void guard_install(void)
{
	static struct filter filter;
	struct sock_fprog program;

	drop_capabilities();
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		die("no_new_privs");
	build(&filter);
	program.len = filter.length;
	program.filter = filter.code;
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0)
		die("the system call filter");
}
