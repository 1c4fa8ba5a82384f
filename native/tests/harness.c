/* PID 1 without a sandbox round it: a new pid namespace with its own /proc on
 * the root that is there already, for tests of the protocol.
 *
 * harness SOCKET [--user] [--detached] [--lifetime MS] [--lock PATH] [--owner FD]
 *         [--join PATH]... [--freezer PATH] [--oom PATH] [--id ID]
 * Listens on SOCKET, prints "ready", and ends with PID 1's exit code. PID 1
 * watches this process through a pidfd, as it would its owner. */
#define _GNU_SOURCE
#include "../wf.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

static void fail(const char *what)
{
	fprintf(stderr, "harness: %s: %s\n", what, strerror(errno));
	exit(3);
}

static int listen_on(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int n = snprintf(address.sun_path, sizeof address.sun_path, "%s~", path);
	if (fd < 0 || n < 0 || (size_t)n >= sizeof address.sun_path)
		fail(path);
	/* Under its name only once it listens: callers wait for the name. */
	if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 128) < 0 ||
	    rename(address.sun_path, path) < 0)
		fail(path);
	return fd;
}

static void write_to(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		fail(path);
	close(fd);
}

static void make_namespaces(int user)
{
	char map[64];
	unsigned uid = geteuid(), gid = getegid();
	if (unshare(CLONE_NEWPID | CLONE_NEWNS | (user ? CLONE_NEWUSER : 0)) < 0)
		fail("unshare");
	if (user) {
		write_to("/proc/self/setgroups", "deny");
		snprintf(map, sizeof map, "0 %u 1", uid);
		write_to("/proc/self/uid_map", map);
		snprintf(map, sizeof map, "0 %u 1", gid);
		write_to("/proc/self/gid_map", map);
	}
}

static void drop_capabilities(void)
{
	static const int keep[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID,
				   CAP_KILL,  CAP_SETGID,       CAP_SETUID};
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {{0}};
	for (size_t i = 0; i < sizeof keep / sizeof *keep; i++)
		data[0].permitted |= 1u << keep[i];
	data[0].effective = data[0].permitted;
	for (int cap = 0; cap < 64; cap++)
		if ((cap >= 32 || !(data[0].permitted >> cap & 1)) &&
		    prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0 && errno != EINVAL)
			fail("PR_CAPBSET_DROP");
	if (syscall(SYS_capset, &header, data) < 0)
		fail("capset");
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		fail("no_new_privs");
}

static void become_init(struct wf_init_config *config)
{
	if (prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0 ||
	    mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		fail("private mounts");
	if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0 ||
	    chdir("/") < 0)
		fail("/proc");
	config->proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (config->proc_fd < 0)
		fail("/proc");
	drop_capabilities();
	exit(wf_init_main(config));
}

static int open_or_fail(const char *path, int flags)
{
	int fd = open(path, flags | O_CLOEXEC, 0600);
	if (fd < 0)
		fail(path);
	return fd;
}

static void take_option(struct wf_init_config *config, const char *name, const char *value)
{
	if (!value)
		fail(name);
	if (strcmp(name, "--lifetime") == 0)
		config->lifetime_ms = strtoull(value, NULL, 10);
	else if (strcmp(name, "--lock") == 0)
		config->lock_fd = open_or_fail(value, O_RDWR | O_CREAT);
	else if (strcmp(name, "--owner") == 0)
		config->owner_fd = atoi(value);
	else if (strcmp(name, "--join") == 0 && config->n_join < 8)
		config->join_fds[config->n_join++] = open_or_fail(value, O_WRONLY);
	else if (strcmp(name, "--freezer") == 0)
		config->freeze_kind = 1,
		config->freeze_fd = config->freeze_state_fd = open_or_fail(value, O_RDWR);
	else if (strcmp(name, "--oom") == 0)
		config->oom_fd = open_or_fail(value, O_RDONLY);
	else if (strcmp(name, "--id") == 0)
		config->sandbox_id = value;
	else
		errno = EINVAL, fail(name);
}

int main(int argc, char **argv)
{
	struct wf_init_config config = {.sandbox_id = "sb-harness",
					.owner_fd = -1,
					.lock_fd = -1,
					.oom_fd = -1,
					.freeze_fd = -1,
					.freeze_state_fd = -1,
					.peer_uid = geteuid()};
	int user = 0, status;
	if (argc < 2)
		fail("usage: harness SOCKET [options]");
	for (int i = 2; i < argc; i++) {
		if (strcmp(argv[i], "--user") == 0)
			user = 1;
		else if (strcmp(argv[i], "--detached") == 0)
			config.detached = 1;
		else
			take_option(&config, argv[i], argv[i + 1]), i++;
	}
	config.listen_fd = listen_on(argv[1]);
	config.owner_pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
	if (config.owner_pidfd < 0)
		fail("pidfd_open");
	make_namespaces(user);
	pid_t pid = fork();
	if (pid < 0)
		fail("fork");
	if (pid == 0)
		become_init(&config);
	if (config.owner_fd >= 0)
		close(config.owner_fd);
	puts("ready");
	fflush(stdout);
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			fail("waitpid");
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
