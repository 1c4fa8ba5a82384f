/* What a supervisor that died before its command left to PID 1: all of it is
 * killed, since nobody else could find it any more. */
#define _GNU_SOURCE
#include "serve.h"
#include "tree.h"

#include <signal.h>
#include <unistd.h>

enum { FIRST_WAIT_MS = 2, LONGEST_WAIT_MS = 200 };

bool is_known_child(pid_t pid)
{
	return command_by_supervisor(pid) != NULL || pid == mapped_worker();
}

void strays_begin(void)
{
	if (!srv.strays) {
		srv.strays = true;
		srv.strays_wait_ms = FIRST_WAIT_MS;
		srv.strays_ms = now_ms();
	}
	wake_at(srv.strays_ms);
}

void strays_time(uint64_t now)
{
	if (!srv.strays)
		return;
	if (now >= srv.strays_ms) {
		if (srv.strays_wait_ms > FIRST_WAIT_MS)
			(void)tree_signal(FD_PROC, getpid(), SIGSTOP, is_known_child);
		if (tree_signal(FD_PROC, getpid(), SIGKILL, is_known_child) == 0) {
			srv.strays = false;
			return;
		}
		srv.strays_ms = now + srv.strays_wait_ms;
		if (srv.strays_wait_ms < LONGEST_WAIT_MS)
			srv.strays_wait_ms *= 2;
	}
	wake_at(srv.strays_ms);
}
