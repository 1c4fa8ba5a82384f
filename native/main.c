/* wf-init: one static program with three faces. `launch` makes a sandbox and
 * becomes its PID 1, `reroot` puts a live sandbox onto a new root. */
#include "faces.h"

#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
	if (argc == 2 && strcmp(argv[1], "launch") == 0)
		return launch_main();
	if (argc == 2 && strcmp(argv[1], "reroot") == 0)
		return reroot_main();
	if (argc == 2 && strcmp(argv[1], "version") == 0)
		return puts("wf-init 1") < 0;
	fputs("usage: wf-init launch|reroot|version\n", stderr);
	return 2;
}
