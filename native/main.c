/* wf-init: one static program with several faces. `launch` makes a sandbox and
 * becomes its PID 1, `reroot` puts a live sandbox onto a new root, `keep` runs
 * a virtual machine, and `guest` is PID 1 of one, where it is called /init. */
#include "faces.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc == 2 && strcmp(argv[1], "launch") == 0)
		return launch_main();
	if (argc == 2 && strcmp(argv[1], "reroot") == 0)
		return reroot_main();
	if (argc == 2 && strcmp(argv[1], "keep") == 0)
		return keep_main();
	/* The kernel hands its own unknown words on as arguments. */
	if (getpid() == 1 && argc >= 1 && strcmp(argv[0], "/init") == 0)
		return guest_main();
	if (argc == 2 && strcmp(argv[1], "nothing") == 0)
		return 0;
	if (argc == 2 && strcmp(argv[1], "version") == 0)
		return puts("wf-init 1") < 0;
	fputs("usage: wf-init launch|reroot|keep|version\n", stderr);
	return 2;
}
