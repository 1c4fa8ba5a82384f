/* From a fork of the supervisor to the command. Runs in memory shared with
 * the supervisor (as after vfork), so nothing here allocates or returns early
 * into code that would. */
#define _GNU_SOURCE
#include "builtin.h"
#include "supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <linux/close_range.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int failed(struct failure *failure, const char *what, const char *which)
{
	failure->error = errno;
	if (which)
		snprintf(failure->text, sizeof failure->text, "%s %.120s", what, which);
	else
		snprintf(failure->text, sizeof failure->text, "%s", what);
	return -1;
}

/* A write of a few bytes to a kernel file is whole or fails. */
static int write_once(int fd, const char *text)
{
	ssize_t n;
	do
		n = write(fd, text, strlen(text));
	while (n < 0 && errno == EINTR);
	return n < 0 ? -1 : 0;
}

static int join_cgroups(const struct kept *kept, struct failure *failure)
{
	for (int i = 0; i < kept->n_join; i++)
		if (write_once(FD_JOIN + i, "0") < 0)
			return failed(failure, "cannot join its cgroup", NULL);
	return 0;
}

/* Makes the command a likelier victim than PID 1. Not being able to is no
 * reason not to run it. In a user namespace the files of an undumpable process
 * are not its own: there the supervisor does it, after the exec. It must not
 * become dumpable for it, since what runs inside could then get hold of it. */
bool raise_oom_score(const char *who)
{
	char path[48];
	snprintf(path, sizeof path, "%s/oom_score_adj", who);
	int fd = openat(FD_PROC, path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	int result = write_once(fd, "500");
	close(fd);
	return result == 0;
}

static int set_limits(const struct supervisor_start *start, struct failure *failure)
{
	struct rlimit nofile = {start->kept->nofile_soft, start->kept->nofile_hard};
	if (setrlimit(RLIMIT_NOFILE, &nofile) < 0)
		return failed(failure, "cannot restore its limit of open files", NULL);
	for (uint32_t i = 0; i < start->request->n_rlimit; i++) {
		const struct exec_rlimit *limit = &start->request->rlimits[i];
		struct rlimit value = {limit->soft, limit->hard};
		if (limit->resource >= RLIM_NLIMITS) {
			errno = EINVAL;
			return failed(failure, "no such resource limit", NULL);
		}
		if (setrlimit((int)limit->resource, &value) < 0) {
			char number[16];
			snprintf(number, sizeof number, "%u", limit->resource);
			return failed(failure, "cannot set resource limit", number);
		}
	}
	return 0;
}

static int take_terminal(const struct user *user, struct failure *failure)
{
	if (ioctl(STDIN_FILENO, TIOCSCTTY, 0) < 0)
		return failed(failure, "cannot take its terminal", NULL);
	if (user->uid != geteuid() && fchown(STDIN_FILENO, user->uid, (gid_t)-1) < 0)
		return failed(failure, "cannot give it its terminal", NULL);
	return 0;
}

static int take_user(const struct user *user, struct failure *failure)
{
	bool same = user->uid == geteuid() && user->gid == getegid();
	failure->stage = STAGE_USER;
	if (user->groups_known && syscall(SYS_setgroups, user->n_groups, user->groups) < 0 &&
	    !(errno == EPERM && same))
		goto bad;
	if (!same && (syscall(SYS_setresgid, user->gid, user->gid, user->gid) < 0 ||
		      syscall(SYS_setresuid, user->uid, user->uid, user->uid) < 0))
		goto bad;
	failure->stage = STAGE_OTHER;
	return 0;
bad:
	/* A user namespace that maps one id denies setgroups; others lack some. */
	if (errno == EPERM)
		return failed(failure,
			      "this sandbox has a single user id, so only root can be used", NULL);
	if (errno == EINVAL)
		return failed(failure, "that id is beyond the range of ids of this sandbox", NULL);
	return failed(failure, "cannot become the user", NULL);
}

static void exec_along_path(const struct exec_request *request, struct failure *failure)
{
	const char *file = request->argv[0];
	const char *path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
	char full[PATH_MAX];
	int error = ENOENT;
	for (uint32_t i = 0; i < request->envc; i++)
		if (strncmp(request->envp[i], "PATH=", 5) == 0) {
			path = request->envp[i] + 5;
			break;
		}
	for (const char *at = path; at;) {
		size_t len = strcspn(at, ":");
		const char *dir = len ? at : ".";
		int n = snprintf(full, sizeof full, "%.*s/%s", len ? (int)len : 1, dir, file);
		at = at[len] ? at + len + 1 : NULL;
		if (n < 0 || (size_t)n >= sizeof full)
			continue;
		execve(full, request->argv, request->envp);
		if (errno == EACCES)
			error = EACCES;
		else if (errno != ENOENT && errno != ENOTDIR && errno != ENAMETOOLONG &&
			 errno != ELOOP) {
			error = errno;
			break;
		}
	}
	errno = error;
	failed(failure, "cannot run", file);
}

static void clear_signals(void)
{
	sigset_t none;
	sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
}

static void become_builtin(const struct exec_request *request)
{
	struct control_message message = {.kind = CONTROL_STARTED, .value = getpid()};
	ssize_t n;
	do
		n = write(FD_CONTROL, &message, sizeof message);
	while (n < 0 && errno == EINTR);
	(void)syscall(SYS_close_range, FD_NULL, ~0U, 0);
	signal(SIGCHLD, SIG_DFL);
	clear_signals();
	_exit(builtin_main((int)request->argc, request->argv));
}

void start_command(const struct supervisor_start *start, const struct user *user,
		   struct failure *failure)
{
	const struct exec_request *request = start->request;
	failure->stage = STAGE_OTHER;
	if (setsid() < 0) {
		failed(failure, "cannot start a session", NULL);
		return;
	}
	if (join_cgroups(start->kept, failure) < 0)
		return;
	failure->likely_victim = raise_oom_score("self");
	if (set_limits(start, failure) < 0)
		return;
	if ((request->flags & WF_EXEC_PTY) && take_terminal(user, failure) < 0)
		return;
	if (take_user(user, failure) < 0)
		return;
	umask(022);
	if (chdir(request->cwd[0] ? request->cwd : "/") < 0) {
		failed(failure, "cannot enter the directory", request->cwd);
		return;
	}
	if (request->flags & WF_EXEC_BUILTIN)
		become_builtin(request);
	/* All are close-on-exec; this is for the one that some day is not. */
	(void)syscall(SYS_close_range, FD_NULL, ~0U, CLOSE_RANGE_CLOEXEC);
	clear_signals();
	if (!request->argv[0][0]) {
		errno = ENOENT;
		failed(failure, "cannot run", "an empty name");
	} else if (strchr(request->argv[0], '/')) {
		execve(request->argv[0], request->argv, request->envp);
		failed(failure, "cannot run", request->argv[0]);
	} else {
		exec_along_path(request, failure);
	}
}
