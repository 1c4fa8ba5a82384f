/* MAPPED: which files processes inside can change without a system call that
 * shows in their times. A worker of its own looks, for it takes a while and
 * needs, for each process, that process's user. */
#define _GNU_SOURCE
#include "serve.h"
#include "tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_FILES = (WF_MAX_PAYLOAD - 4) / 16, PATH_BYTES = 4096 };

struct file_id {
	uint64_t dev, ino;
};

/* What the worker writes: a result, then its files. */
struct finding {
	int32_t error;
	uint32_t pid; /* that could not be looked at */
	uint32_t n;
	uint32_t unused;
	struct file_id files[MAX_FILES];
};

static struct finding found;
static pid_t worker;
static int from_worker = -1;
static struct source worker_source;
static size_t received;
static struct conn *asker;
static uint32_t asked_on;

pid_t mapped_worker(void)
{
	return worker;
}

static bool note(uint64_t dev, uint64_t ino)
{
	for (uint32_t i = found.n; i-- > 0;)
		if (found.files[i].dev == dev && found.files[i].ino == ino)
			return true;
	if (found.n == MAX_FILES) {
		errno = E2BIG;
		return false;
	}
	found.files[found.n++] = (struct file_id){.dev = dev, .ino = ino};
	return true;
}

static bool look_at_fds(const char *pid)
{
	char path[64];
	struct stat link, file;
	snprintf(path, sizeof path, "%.20s/fd", pid);
	int fd = openat(FD_PROC, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);
	bool good = dir != NULL;
	for (struct dirent *entry; good && (entry = readdir(dir));) {
		if (fstatat(dirfd(dir), entry->d_name, &link, AT_SYMLINK_NOFOLLOW) < 0 ||
		    !(link.st_mode & S_IWUSR))
			continue;
		if (fstatat(dirfd(dir), entry->d_name, &file, 0) == 0 && S_ISREG(file.st_mode))
			good = note(file.st_dev, file.st_ino);
	}
	int error = errno;
	if (dir)
		closedir(dir);
	else if (fd >= 0)
		close(fd);
	errno = error;
	return good;
}

/* maps may show the file below an overlay; what stat says of its path counts too. */
static bool look_at_map(const char *line)
{
	char perms[8], path[PATH_BYTES];
	unsigned major_no, minor_no;
	unsigned long long ino;
	struct stat st;
	int n = sscanf(line, "%*s %7s %*s %x:%x %llu %4095[^\n]", perms, &major_no, &minor_no, &ino,
		       path);
	if (n < 4 || ino == 0 || perms[1] != 'w' || perms[3] != 's')
		return true;
	if (!note(makedev(major_no, minor_no), ino))
		return false;
	if (n == 5 && path[0] == '/' && lstat(path, &st) == 0 && S_ISREG(st.st_mode))
		return note(st.st_dev, st.st_ino);
	return true;
}

static bool look_at_maps(const char *pid)
{
	char path[64];
	static char line[PATH_BYTES + 256];
	snprintf(path, sizeof path, "%.20s/maps", pid);
	int fd = openat(FD_PROC, path, O_RDONLY | O_CLOEXEC);
	FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
	if (!file) {
		if (fd >= 0)
			close(fd);
		return false;
	}
	bool good = true;
	while (good && fgets(line, sizeof line, file))
		good = look_at_map(line);
	int error = errno;
	fclose(file);
	errno = error;
	return good;
}

/* In a process of its own, as the other one's user: /proc asks for that. */
static int look_at(const struct process *process, uid_t uid, gid_t gid)
{
	char pid[24];
	if (geteuid() != uid || getegid() != gid) {
		if (syscall(SYS_setgroups, 0, NULL) < 0 ||
		    syscall(SYS_setresgid, gid, gid, gid) < 0 ||
		    syscall(SYS_setresuid, uid, uid, uid) < 0)
			return errno;
	}
	snprintf(pid, sizeof pid, "%d", (int)process->pid);
	errno = 0;
	if (look_at_maps(pid) && look_at_fds(pid))
		return 0;
	/* It may have ended meanwhile. */
	return errno == ENOENT || errno == ESRCH ? 0 : errno ? errno : EIO;
}

static int read_ids(pid_t pid, uid_t *uid, gid_t *gid)
{
	char path[64], text[2048];
	snprintf(path, sizeof path, "%d/status", (int)pid);
	int fd = openat(FD_PROC, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return errno;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	text[n > 0 ? n : 0] = 0;
	const char *u = strstr(text, "\nUid:"), *g = strstr(text, "\nGid:");
	unsigned u_id, g_id;
	if (!u || !g || sscanf(u + 5, "%u", &u_id) != 1 || sscanf(g + 5, "%u", &g_id) != 1)
		return EIO;
	*uid = u_id;
	*gid = g_id;
	return 0;
}

/* One process with a user other than ours: through a child and a pipe. */
static int look_as(const struct process *process, uid_t uid, gid_t gid)
{
	int ends[2], status;
	if (pipe2(ends, O_CLOEXEC) < 0)
		return errno;
	pid_t pid = fork();
	if (pid == 0) {
		found.error = look_at(process, uid, gid);
		size_t size = offsetof(struct finding, files) + found.n * sizeof *found.files;
		for (size_t at = 0; at < size;) {
			ssize_t n = write(ends[1], (char *)&found + at, size - at);
			if (n < 0 && errno != EINTR)
				_exit(1);
			at += n > 0 ? (size_t)n : 0;
		}
		_exit(0);
	}
	close(ends[1]);
	size_t got = 0;
	for (ssize_t n = 1; pid > 0 && n != 0 && got < sizeof found;) {
		n = read(ends[0], (char *)&found + got, sizeof found - got);
		if (n < 0 && errno != EINTR)
			break;
		got += n > 0 ? (size_t)n : 0;
	}
	close(ends[0]);
	if (pid < 0)
		return EAGAIN;
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? found.error : EIO;
}

static void worker_main(int to) __attribute__((noreturn));
static void worker_main(int to)
{
	struct process *list;
	uid_t uid;
	gid_t gid;
	pid_t self = getpid(), init = getppid();
	memset(&found, 0, sizeof found);
	ssize_t n = tree_scan(FD_PROC, &list);
	int error = n < 0 ? errno : 0;
	for (ssize_t i = 0; !error && i < n; i++) {
		if (list[i].pid == init || list[i].pid == self || tree_is_dead(&list[i]) ||
		    is_known_child(list[i].pid))
			continue;
		error = read_ids(list[i].pid, &uid, &gid);
		if (!error)
			error = geteuid() == uid && getegid() == gid ? look_at(&list[i], uid, gid)
								     : look_as(&list[i], uid, gid);
		if (error == ENOENT || error == ESRCH)
			error = 0;
		found.pid = error ? (uint32_t)list[i].pid : 0;
	}
	found.error = error;
	size_t size = offsetof(struct finding, files) + found.n * sizeof *found.files;
	for (size_t at = 0; at < size;) {
		ssize_t done = write(to, (char *)&found + at, size - at);
		if (done < 0 && errno != EINTR)
			_exit(1);
		at += done > 0 ? (size_t)done : 0;
	}
	_exit(0);
}

static void stop_listening(void)
{
	if (from_worker < 0)
		return;
	unwatch(from_worker);
	close(from_worker);
	from_worker = -1;
}

static void answer(void)
{
	size_t head = offsetof(struct finding, files);
	if (received < head || received < head + found.n * sizeof *found.files) {
		conn_error(asker, asked_on, EIO, "looking at the processes failed");
	} else if (found.error) {
		conn_error(asker, asked_on, found.error, "process %u: %s", found.pid,
			   strerror(found.error));
	} else {
		size_t size = 4 + found.n * sizeof *found.files;
		uint8_t *at = conn_room(asker, WF_HEADER + size);
		if (at) {
			struct writer w = {.at = at + WF_HEADER, .left = size};
			frame_header(at, (uint32_t)size, WF_REPLY, 0, asked_on);
			write_u32(&w, found.n);
			for (uint32_t i = 0; i < found.n; i++) {
				write_u64(&w, found.files[i].dev);
				write_u64(&w, found.files[i].ino);
			}
			conn_commit(asker, WF_HEADER + size);
		}
	}
	asker = NULL;
}

static void on_worker(struct source *source, uint32_t events)
{
	(void)source;
	(void)events;
	if (from_worker < 0)
		return;
	ssize_t n = 0;
	if (received < sizeof found)
		n = read(from_worker, (char *)&found + received, sizeof found - received);
	if (n < 0 && (errno == EINTR || errno == EAGAIN))
		return;
	if (n > 0) {
		received += (size_t)n;
		return;
	}
	stop_listening();
	if (asker)
		answer();
}

void mapped_request(struct conn *conn, uint32_t channel)
{
	int ends[2];
	if (worker || from_worker >= 0) {
		conn_error(conn, channel, EBUSY, "another client asks the same");
		return;
	}
	if (pipe2(ends, O_CLOEXEC) < 0) {
		conn_error(conn, channel, errno, "no pipe: %s", strerror(errno));
		return;
	}
	worker = fork();
	if (worker == 0) {
		worker_source.ready = NULL;
		worker_main(ends[1]);
	}
	close(ends[1]);
	worker_source.ready = on_worker;
	if (worker < 0 || fcntl(ends[0], F_SETFL, O_NONBLOCK) < 0 ||
	    !watch(ends[0], &worker_source, EPOLLIN)) {
		close(ends[0]);
		if (worker < 0)
			worker = 0;
		conn_error(conn, channel, EAGAIN, "cannot start looking");
		return;
	}
	from_worker = ends[0];
	received = 0;
	asker = conn;
	asked_on = channel;
}

void mapped_forget(struct conn *conn)
{
	if (asker != conn)
		return;
	asker = NULL;
	if (worker)
		(void)kill(worker, SIGKILL);
}

bool mapped_reaped(pid_t pid)
{
	if (pid != worker || !pid)
		return false;
	worker = 0;
	return true;
}
