/* export DIRECTORY: its records on stdout, as a guest's worker writes them. */
#define _GNU_SOURCE
#include "../guest.h"

#include <fcntl.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	int dir = argc == 2 ? open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
	return export_tree(dir, STDOUT_FILENO) ? 1 : 0;
}
