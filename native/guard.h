/* What a sandbox may not do: capabilities and system calls. */
#ifndef WF_GUARD_H
#define WF_GUARD_H

/* Drops every capability but the bounded set that a command may get, sets
 * no_new_privs and installs the system call filter. Dies with a report.
 * `shares_network`: the network is the host's. */
void guard_install(int shares_network);

#endif
