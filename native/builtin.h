/* File operations, run in a process of their own with a command's user. */
#ifndef WF_BUILTIN_H
#define WF_BUILTIN_H

/* argv[0] names the operation. Returns 0 or an errno, after a line on stderr. */
int builtin_main(int argc, char **argv);

#endif
