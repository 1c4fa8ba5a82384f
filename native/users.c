#define _GNU_SOURCE
#include "users.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FILE_MAX_BYTES = 4 * 1024 * 1024, PASSWD_FIELDS = 7, GROUP_FIELDS = 4 };

/* Reads a whole regular file of bounded size; NULL with errno. */
static char *slurp(const char *path)
{
	struct stat st;
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0)
		return NULL;
	char *text = NULL;
	size_t len = 0;
	if (fstat(fd, &st) < 0)
		goto out;
	errno = S_ISREG(st.st_mode) ? EFBIG : EINVAL;
	if (!S_ISREG(st.st_mode) || st.st_size > FILE_MAX_BYTES)
		goto out;
	size_t size = (size_t)st.st_size;
	text = malloc(size + 1);
	while (text && len < size) {
		ssize_t n = read(fd, text + len, size - len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			break;
		len += (size_t)n;
	}
	if (text)
		text[len] = 0;
out:
	close(fd);
	return text;
}

static bool parse_id(const char *text, unsigned *id)
{
	char *end;
	if (*text < '0' || *text > '9')
		return false;
	errno = 0;
	unsigned long value = strtoul(text, &end, 10);
	if (errno || *end || value >= UINT_MAX) /* (uid_t)-1 means "leave alone" */
		return false;
	*id = (unsigned)value;
	return true;
}

/* Cuts the next line of *text into fields; returns how many, 0 at the end. */
static int next_line(char **text, char **fields, int max)
{
	while (*text && **text) {
		char *line = *text;
		char *end = strchr(line, '\n');
		*text = end ? end + 1 : NULL;
		if (end)
			*end = 0;
		int n = 0;
		for (char *field = line; field && n < max; n++) {
			fields[n] = field;
			field = strchr(field, ':');
			if (field)
				*field++ = 0;
		}
		if (n > 1)
			return n;
	}
	return 0;
}

/* Finds by name, or by number where `name` is one. */
static bool find_passwd(const char *name, struct user *user, char *login, size_t login_size)
{
	unsigned wanted = 0, uid, gid;
	bool by_id = parse_id(name, &wanted);
	bool found = false;
	char *text = slurp("/etc/passwd");
	char *at = text;
	char *f[PASSWD_FIELDS];
	for (int n; !found && (n = next_line(&at, f, PASSWD_FIELDS)) > 0;) {
		if (n < 4 || !parse_id(f[2], &uid) || !parse_id(f[3], &gid))
			continue;
		if (by_id ? uid != wanted : strcmp(f[0], name) != 0)
			continue;
		user->uid = uid;
		user->gid = gid;
		snprintf(login, login_size, "%s", f[0]);
		found = true;
	}
	free(text);
	return found;
}

static bool find_group(const char *name, gid_t *gid)
{
	unsigned id;
	if (parse_id(name, &id)) {
		*gid = id;
		return true;
	}
	bool found = false;
	char *text = slurp("/etc/group");
	char *at = text;
	char *f[GROUP_FIELDS];
	for (int n; !found && (n = next_line(&at, f, GROUP_FIELDS)) > 0;) {
		if (n >= 3 && strcmp(f[0], name) == 0 && parse_id(f[2], &id)) {
			*gid = id;
			found = true;
		}
	}
	free(text);
	return found;
}

static bool is_member(char *members, const char *login)
{
	char *save = NULL;
	for (char *one = strtok_r(members, ",", &save); one; one = strtok_r(NULL, ",", &save))
		if (strcmp(one, login) == 0)
			return true;
	return false;
}

static void add_groups(struct user *user, const char *login)
{
	unsigned id;
	char *text = slurp("/etc/group");
	char *at = text;
	char *f[GROUP_FIELDS];
	for (int n; (n = next_line(&at, f, GROUP_FIELDS)) > 0;) {
		if (n < 4 || user->n_groups == USER_MAX_GROUPS || !parse_id(f[2], &id))
			continue;
		if (id != user->gid && is_member(f[3], login))
			user->groups[user->n_groups++] = id;
	}
	free(text);
}

int user_resolve(const char *spec, struct user *user, char *why, size_t size)
{
	char name[256], login[256] = "";
	unsigned id;
	const char *colon = strchr(spec, ':');
	size_t len = colon ? (size_t)(colon - spec) : strlen(spec);
	memset(user, 0, sizeof *user);
	if (len == 0 || len >= sizeof name || (colon && !colon[1])) {
		snprintf(why, size,
			 "'%.80s' is not a user: give a name, a uid, or either with :group", spec);
		return EINVAL;
	}
	memcpy(name, spec, len);
	name[len] = 0;
	if (!find_passwd(name, user, login, sizeof login)) {
		if (parse_id(name, &id)) {
			user->uid = id;
		} else if (strcmp(name, "root") != 0) {
			snprintf(why, size, "no user '%.80s' in the sandbox's /etc/passwd", name);
			return EINVAL;
		}
	}
	if (colon && !find_group(colon + 1, &user->gid)) {
		snprintf(why, size, "no group '%.80s' in the sandbox's /etc/group", colon + 1);
		return EINVAL;
	}
	user->groups_known = true;
	user->groups[user->n_groups++] = user->gid;
	if (!colon && login[0])
		add_groups(user, login);
	return 0;
}
