/* What launch and keep do alike on the host: cgroups and listening sockets. */
#ifndef WF_PLACE_H
#define WF_PLACE_H

#include "plan.h"
#include "wf.h"

void place_write(int dir, const char *path, const char *text);
/* cgdir=, then cgset=, cgjoin=, cgfreeze= and cgoom= for that directory. */
void place_cgroups(const struct plan *plan, struct wf_init_config *c);
/* A unix socket's path has 108 bytes: bound in the working directory. */
int place_listen(const char *name);

#endif
