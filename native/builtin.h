/* File operations, run in a process of their own with a command's user. */
#ifndef WF_BUILTIN_H
#define WF_BUILTIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* argv[0] names the operation. Returns 0 or an errno, after a line on stderr. */
int builtin_main(int argc, char **argv);

/* The rest is shared by the operations; each returns 0 or an errno. */

/* Says on stderr what went wrong with what, and returns errno. */
int builtin_fail(const char *what, const char *detail);
/* Buffered stdout; builtin_flush() at the end. */
int builtin_put(const void *data, size_t n);
int builtin_flush(void);
int builtin_write_all(int fd, const void *data, size_t n);
/* Makes every missing directory above the last name of path. */
int builtin_make_parents(const char *path);
/* A number in the given base that fills the whole word. */
bool builtin_number(const char *word, int base, uint64_t max, uint64_t *value);

/* Opens a directory in another: through no link, onto no mount. -1 with errno. */
int builtin_open_below(int dir, const char *name);
/* Removes what is in the open directory `parent`, which is closed. */
int builtin_delete_at(int parent, const char *name, bool recursive);

int builtin_read(int argc, char **argv);
int builtin_write(int argc, char **argv);
int builtin_list(int argc, char **argv);
int builtin_stat(int argc, char **argv);
int builtin_delete(int argc, char **argv);
int builtin_lay(int argc, char **argv);

#endif
