#define _GNU_SOURCE
#include "tree.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { TREE_MAX = 1 << 17, STAT_MAX = 512, THREADS_FIELD = 20 };

struct dirent64_head {
	uint64_t ino;
	int64_t off;
	uint16_t reclen;
	uint8_t type;
	char name[];
};

static struct process *table;
static size_t table_len, table_cap;

static bool add(const struct process *process)
{
	if (table_len == table_cap) {
		size_t cap = table_cap ? table_cap * 2 : 256;
		if (cap > TREE_MAX) {
			errno = EOVERFLOW;
			return false;
		}
		struct process *bigger = realloc(table, cap * sizeof *bigger);
		if (!bigger)
			return false;
		table = bigger;
		table_cap = cap;
	}
	table[table_len++] = *process;
	return true;
}

static bool parse_stat(char *text, struct process *process)
{
	/* The command's name may hold anything, ')' too: its end is the last one. */
	char *at = strrchr(text, ')');
	if (!at || at[1] != ' ')
		return false;
	at += 2;
	process->state = *at;
	char *save = NULL;
	int field = 3;
	for (char *word = strtok_r(at, " ", &save); word;
	     word = strtok_r(NULL, " ", &save), field++) {
		if (field == 4)
			process->ppid = (pid_t)strtol(word, NULL, 10);
		if (field == THREADS_FIELD) {
			process->threads = (int)strtol(word, NULL, 10);
			return true;
		}
	}
	return false;
}

static bool read_process(int proc_fd, const char *name, struct process *process)
{
	char path[64], text[STAT_MAX];
	snprintf(path, sizeof path, "%.20s/stat", name);
	int fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return false;
	text[n] = 0;
	memset(process, 0, sizeof *process);
	process->pid = (pid_t)strtol(name, NULL, 10);
	return parse_stat(text, process);
}

static int compare(const void *a, const void *b)
{
	const struct process *x = a, *y = b;
	return (x->pid > y->pid) - (x->pid < y->pid);
}

ssize_t tree_scan(int proc_fd, struct process **list)
{
	static _Alignas(8) char names[32 * 1024];
	struct process process;
	table_len = 0;
	int fd = openat(proc_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	long got;
	while ((got = syscall(SYS_getdents64, fd, names, sizeof names)) > 0) {
		for (long at = 0; at < got;) {
			struct dirent64_head *entry = (struct dirent64_head *)(void *)(names + at);
			at += entry->reclen;
			if (entry->name[0] < '1' || entry->name[0] > '9')
				continue;
			/* A process that went away meanwhile is simply not there. */
			if (read_process(proc_fd, entry->name, &process) && !add(&process)) {
				close(fd);
				return -1;
			}
		}
	}
	int error = errno;
	close(fd);
	errno = error;
	if (got < 0)
		return -1;
	qsort(table, table_len, sizeof *table, compare);
	*list = table;
	return (ssize_t)table_len;
}

struct process *tree_find(struct process *list, size_t n, pid_t pid)
{
	struct process key = {.pid = pid};
	return n ? bsearch(&key, list, n, sizeof *list, compare) : NULL;
}

bool tree_is_dead(const struct process *process)
{
	return process->state == 'X' || (process->state == 'Z' && process->threads < 2);
}

unsigned tree_signal(int proc_fd, pid_t root, int signo, bool (*skip)(pid_t))
{
	struct process *list;
	ssize_t n = tree_scan(proc_fd, &list);
	unsigned signalled = 0;
	bool changed = n > 0;
	while (changed) {
		changed = false;
		for (ssize_t i = 0; i < n; i++) {
			struct process *p = &list[i];
			if (p->marked || p->pid == root ||
			    (p->ppid == root && skip && skip(p->pid)))
				continue;
			struct process *parent = tree_find(list, (size_t)n, p->ppid);
			if (p->ppid == root || (parent && parent->marked)) {
				p->marked = true;
				changed = true;
			}
		}
	}
	for (ssize_t i = 0; i < n; i++)
		if (list[i].marked && !tree_is_dead(&list[i]) && kill(list[i].pid, signo) == 0)
			signalled++;
	return signalled;
}
