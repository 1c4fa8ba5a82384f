/* A map of many ids takes a privileged program on the host, newuidmap(1). It
 * writes that of one namespace for each owner; every sandbox's own lies below
 * that, where its owner is root and may pass the same ids on. */
#define _GNU_SOURCE
#include "ids.h"
#include "plan.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAP_MAX 4096 /* what the kernel takes of a map at once */

/* Writes to one map of a process the ids that this one has itself, each as
 * itself: one line for each line of its own, for none may span two of these. */
static int write_same_ids(pid_t pid, const char *name)
{
	char path[64], own[MAP_MAX], text[MAP_MAX];
	size_t used = 0;
	ssize_t size;
	int fd, result;

	snprintf(path, sizeof(path), "/proc/self/%s", name);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	size = read(fd, own, sizeof(own) - 1);
	close(fd);
	if (size <= 0 || size == sizeof(own) - 1)
		return -1;
	own[size] = '\0';
	for (char *save = NULL, *line = strtok_r(own, "\n", &save); line;
	     line = strtok_r(NULL, "\n", &save)) {
		unsigned int first, count;

		if (sscanf(line, "%u %*u %u", &first, &count) != 2 ||
		    used > sizeof(text) - 40)
			return -1;
		used += (size_t)snprintf(text + used, sizeof(text) - used,
					 "%u %u %u\n", first, first, count);
	}
	snprintf(path, sizeof(path), "/proc/%d/%s", (int)pid, name);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	result = write(fd, text, used) == (ssize_t)used ? 0 : -1;
	close(fd);
	return result;
}

/* A namespace of its own below the owner's, with the same map. Only a process
 * that stays in the owner's may write it. */
void ids_unshare(int shared)
{
	pid_t self = getpid(), writer;
	int go[2], status;
	char word;

	if (setns(shared, CLONE_NEWUSER) < 0)
		die("userns: joining the range of ids");
	close(shared);
	if (pipe2(go, O_CLOEXEC) < 0)
		die("a pipe");
	writer = fork();
	if (writer < 0)
		die("userns: starting the writer of the map");
	if (writer == 0) {
		close(go[1]);
		_exit(read(go[0], &word, 1) != 1 ||
		      write_same_ids(self, "uid_map") < 0 ||
		      write_same_ids(self, "gid_map") < 0);
	}
	close(go[0]);
	if (unshare(CLONE_NEWUSER) < 0)
		die("userns: a user namespace of its own");
	if (write(go[1], "g", 1) != 1)
		die("userns: letting the writer of the map go on");
	close(go[1]);
	while (waitpid(writer, &status, 0) < 0)
		if (errno != EINTR)
			die("userns: waiting for the writer of the map");
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
		errno = EPERM;
		die("userns: mapping the range of ids");
	}
	/* Those of the host's that its map does not name would stay. */
	if (setgroups(0, NULL) < 0)
		die("dropping groups");
}
