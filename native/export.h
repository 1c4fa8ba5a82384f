/* Of export.c: what a directory holds, and what a thing is marked with. */
#ifndef WF_EXPORT_H
#define WF_EXPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct export_names {
	char **at;
	size_t len, cap;
};

struct export_xattrs {
	uint8_t bytes[1024 * 1024]; /* as a record has them */
	size_t len;
};

/* The names in a directory, in the order of their bytes; 0 or an errno. To be
 * forgotten in either case. */
int export_list(int dir, struct export_names *names);
void export_forget(struct export_names *names);
/* Of the open thing itself, or of a name in an open directory. */
int export_xattrs(struct export_xattrs *xattrs, int fd, const char *name, bool itself);

#endif
