/* Processes of the sandbox, as its own /proc shows them. */
#ifndef WF_TREE_H
#define WF_TREE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct process {
	pid_t pid, ppid;
	char state;  /* as in /proc/<pid>/stat */
	int threads; /* of a zombie: more than 1 while others of its threads live */
	bool marked;
};

/* All processes in ascending order of pid, in memory that the next call
 * reuses. Not atomic. Returns how many, or -1 with errno. */
ssize_t tree_scan(int proc_fd, struct process **list);
struct process *tree_find(struct process *list, size_t n, pid_t pid);
bool tree_is_dead(const struct process *process);

/* Signals every living descendant of root; leaves out, with all below them,
 * the children of root for which skip() is true (skip may be NULL). Returns
 * how many got it. */
unsigned tree_signal(int proc_fd, pid_t root, int signo, bool (*skip)(pid_t));

#endif
