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
#include <stdlib.h>
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
#define SETLEASE_CMD 1024u    /* makes whoever opens the host's file wait */
#define FAMILY_VSOCK 40u      /* reaches the hypervisor, past the network */
#define OPEN_TREE_ATTR 467u   /* newer than the headers of some systems */
#define MEMPOLICY_HOME 450u
#define NEWEST_CALL 469u      /* of Linux 6.18; what comes later is unknown */

#define NAMESPACE_FLAGS                                                     \
	(CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC |       \
	 CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)

/* Docker's default set less MKNOD and AUDIT_WRITE; NET_RAW, which reads
 * everybody's traffic, only in a network of its own. */
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
	SYS_migrate_pages, SYS_set_mempolicy, MEMPOLICY_HOME,
	SYS_fanotify_init, OPEN_TREE_ATTR,
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

/* A filter under construction. Jumps name labels, which are resolved at the
 * end. The kernel runs a new filter once for every call number to learn which
 * are always allowed, so its numbers are searched, not walked: loading it costs
 * half as much. */
enum { NEXT, ALLOW, REFUSE, ABSENT, NO_FAMILY, CLONE, PRLIMIT, IOCTL, FCNTL,
       SOCKET, PERSONALITY, FIRST_FREE_LABEL, MAX_LABELS = 64 };

struct jump {
	unsigned short at;
	int if_true, if_false;
};

struct filter {
	struct sock_filter code[FILTER_MAX];
	unsigned short length;
	struct jump jumps[FILTER_MAX];
	size_t n_jumps;
	unsigned short labels[MAX_LABELS];
	int next_label;
};

struct rule {
	unsigned int number;
	int label;
};

static void emit(struct filter *f, unsigned short code, unsigned int k)
{
	if (f->length == FILTER_MAX) {
		errno = E2BIG;
		die("the system call filter is too long");
	}
	f->code[f->length++] = (struct sock_filter)BPF_STMT(code, k);
}

static void jump(struct filter *f, unsigned short test, unsigned int k,
		 int if_true, int if_false)
{
	f->jumps[f->n_jumps++] = (struct jump){ f->length, if_true, if_false };
	emit(f, (unsigned short)(BPF_JMP | test | BPF_K), k);
}

static void label(struct filter *f, int name)
{
	f->labels[name] = f->length;
}

static void load(struct filter *f, size_t offset)
{
	emit(f, BPF_LD | BPF_W | BPF_ABS, (unsigned int)offset);
}

static void load_argument(struct filter *f, int index)
{
	load(f, offsetof(struct seccomp_data, args) + 8 * (size_t)index);
}

static void answer(struct filter *f, unsigned int action)
{
	emit(f, BPF_RET | BPF_K, action);
}

static unsigned char distance(const struct filter *f, unsigned short at,
			      int name)
{
	int far = name == NEXT ? 0 : f->labels[name] - at - 1;

	if (far < 0 || far > 255) {
		errno = ERANGE;
		die("a jump of the system call filter is too far");
	}
	return (unsigned char)far;
}

static void resolve(struct filter *f)
{
	for (size_t i = 0; i < f->n_jumps; i++) {
		const struct jump *one = &f->jumps[i];

		f->code[one->at].jt = distance(f, one->at, one->if_true);
		f->code[one->at].jf = distance(f, one->at, one->if_false);
	}
}

static int by_number(const void *left, const void *right)
{
	unsigned int a = ((const struct rule *)left)->number;
	unsigned int b = ((const struct rule *)right)->number;

	return a < b ? -1 : a > b;
}

/* Looks the loaded number up among the sorted rules. */
static void search(struct filter *f, const struct rule *rules, size_t n)
{
	size_t half = n / 2;
	int right;

	if (n <= 4) {
		for (size_t i = 0; i < n; i++)
			jump(f, BPF_JEQ, rules[i].number, rules[i].label,
			     i + 1 == n ? ALLOW : NEXT);
		return;
	}
	if (f->next_label == MAX_LABELS) {
		errno = E2BIG;
		die("the system call filter has too many labels");
	}
	right = f->next_label++;
	jump(f, BPF_JGE, rules[half].number, right, NEXT);
	search(f, rules, half);
	label(f, right);
	search(f, rules + half, n - half);
}

static void check_arguments(struct filter *f)
{
	/* personality(2): the plain ones and the query; others weaken ASLR. */
	static const unsigned int personalities[] = { 0, 8, 0x20000, 0x20008,
						      0xffffffff };
	/* The rest would load kernel modules that few have looked at. */
	static const unsigned int families[] = { AF_UNIX, AF_INET, AF_INET6,
						 AF_NETLINK, AF_PACKET };

	label(f, CLONE);
	load_argument(f, 0);
	jump(f, BPF_JSET, NAMESPACE_FLAGS, REFUSE, ALLOW);
	label(f, PRLIMIT);
	load_argument(f, 0);
	jump(f, BPF_JEQ, 0, ALLOW, REFUSE);
	label(f, IOCTL);
	load_argument(f, 1);
	jump(f, BPF_JEQ, TIOCSTI_CMD, REFUSE, NEXT);
	jump(f, BPF_JEQ, TIOCLINUX_CMD, REFUSE, ALLOW);
	label(f, FCNTL);
	load_argument(f, 1);
	jump(f, BPF_JEQ, SETLEASE_CMD, REFUSE, ALLOW);
	label(f, SOCKET);
	load_argument(f, 0);
	for (size_t i = 0; i < sizeof(families) / sizeof(*families); i++)
		jump(f, BPF_JEQ, families[i], ALLOW, NEXT);
	jump(f, BPF_JEQ, FAMILY_VSOCK, REFUSE, NO_FAMILY);
	label(f, PERSONALITY);
	load_argument(f, 0);
	for (size_t i = 0; i < sizeof(personalities) / sizeof(*personalities);
	     i++)
		jump(f, BPF_JEQ, personalities[i], ALLOW, NEXT);
	label(f, REFUSE);
	answer(f, SECCOMP_RET_ERRNO | EPERM);
	label(f, ABSENT);
	answer(f, SECCOMP_RET_ERRNO | ENOSYS);
	label(f, NO_FAMILY);
	answer(f, SECCOMP_RET_ERRNO | EAFNOSUPPORT);
	label(f, ALLOW);
	answer(f, SECCOMP_RET_ALLOW);
}

static size_t collect_rules(struct rule *rules)
{
	static const struct rule special[] = {
		{ SYS_clone, CLONE },	{ SYS_prlimit64, PRLIMIT },
		{ SYS_ioctl, IOCTL },	{ SYS_fcntl, FCNTL },
		{ SYS_socket, SOCKET },	{ SYS_socketpair, SOCKET },
		{ SYS_personality, PERSONALITY },
	};
	size_t n = 0;

	for (size_t i = 0; i < sizeof(refused) / sizeof(*refused); i++)
		rules[n++] = (struct rule){ refused[i], REFUSE };
	for (size_t i = 0; i < sizeof(absent) / sizeof(*absent); i++)
		rules[n++] = (struct rule){ absent[i], ABSENT };
	for (size_t i = 0; i < sizeof(special) / sizeof(*special); i++)
		rules[n++] = special[i];
	qsort(rules, n, sizeof(*rules), by_number);
	return n;
}

static void build(struct filter *f)
{
	static struct rule rules[sizeof(refused) / sizeof(*refused) +
				 sizeof(absent) / sizeof(*absent) + 8];
	size_t n = collect_rules(rules);

	f->next_label = FIRST_FREE_LABEL;
	load(f, offsetof(struct seccomp_data, arch));
	emit(f, BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCH);
	f->code[f->length - 1].jt = 1;
	answer(f, SECCOMP_RET_KILL_PROCESS);
	load(f, offsetof(struct seccomp_data, nr));
#ifdef __x86_64__
	emit(f, BPF_JMP | BPF_JGE | BPF_K, X32_BIT);
	f->code[f->length - 1].jf = 1;
	answer(f, SECCOMP_RET_KILL_PROCESS);
#endif
	jump(f, BPF_JGT, NEWEST_CALL, ABSENT, NEXT);
	search(f, rules, n);
	check_arguments(f);
	resolve(f);
}

static void drop_capabilities(int shares_network)
{
	struct __user_cap_header_struct header = {
		.version = _LINUX_CAPABILITY_VERSION_3,
	};
	struct __user_cap_data_struct data[2] = { { 0 } };
	unsigned long long kept = 0;

	for (size_t i = 0;
	     i < sizeof(kept_capabilities) / sizeof(kept_capabilities[0]); i++)
		kept |= 1ull << kept_capabilities[i];
	if (shares_network)
		kept &= ~(1ull << CAP_NET_RAW);
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

void guard_install(int shares_network)
{
	static struct filter filter;
	struct sock_fprog program;

	drop_capabilities(shares_network);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		die("no_new_privs");
	build(&filter);
	program.len = filter.length;
	program.filter = filter.code;
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) < 0)
		die("the system call filter");
}
