/* Names to ids, from the sandbox's own /etc/passwd and /etc/group. Read by
 * hand: a static program has no name service. */
#ifndef WF_USERS_H
#define WF_USERS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum { USER_MAX_GROUPS = 256 };

struct user {
	uid_t uid;
	gid_t gid;
	bool groups_known; /* else the groups stay as they are */
	size_t n_groups;
	gid_t groups[USER_MAX_GROUPS];
};

/* "name", "uid", "name:group" or "uid:gid", where a group may be a name too.
 * A uid without an entry gets group 0. Returns 0 or an errno with a sentence
 * in `why`. */
int user_resolve(const char *spec, struct user *user, char *why, size_t size);

#endif
