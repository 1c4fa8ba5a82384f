"""Files that are closed to this user although sandboxes of its own wrote them, opened all the same, and unchanged.

A process that is root of a user namespace opens them and passes the descriptors on: see `content/mapped.py`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from worldfork.content.mapped import become_root
from worldfork.core.beneath import open_beneath
from worldfork.core.errors import StoreError
from worldfork.core.mapped_server import join

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_PATH_BYTES = 1 << 20
_ANSWER_BYTES = 16
_WAIT_S = 60.0
_PROGRAM = (
    "import json, sys\n"
    "sys.path[:] = json.loads(sys.argv[1])\n"
    "from worldfork.content.closed import _serve\n"
    "_serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])\n"
)


class ClosedFiles:
    """Opens files of one tree, in a process of its own that ends with `close`.

    Args:
        root: the top of the tree.
        namespace: descriptor of a user namespace that has the ids of its files; by default one that knows this user
            alone.
    """

    def __init__(self, root: Path, namespace: int = -1) -> None:
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking.settimeout(_WAIT_S)
        passed = [theirs.fileno(), *([namespace] if namespace >= 0 else [])]
        command = [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path)]
        command += [str(theirs.fileno()), str(namespace), str(root)]
        with theirs:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed)

    def open(self, path: str) -> int:
        """Open a file to read it.

        Raises:
            OSError: it cannot be opened.
            StoreError: the process ended.
        """
        try:
            self._asking.send(os.fsencode(path))
            answer, fds, _, _ = socket.recv_fds(self._asking, _ANSWER_BYTES, 1)
        except OSError as error:
            raise StoreError(f"the process that opens what is closed to this user is gone: {error}") from error
        if fds:
            os.set_inheritable(fds[0], False)
            return fds[0]
        if not answer:
            raise StoreError("this user cannot have a user namespace, and a file is closed to it")
        number = int(answer)
        raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """End the process."""
        self._asking.close()
        self._process.wait()


def _serve(fd: int, namespace: int, root: str) -> None:
    with socket.socket(fileno=fd) as asked:
        if namespace < 0:
            become_root()
        else:
            join(namespace)
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        while path := asked.recv(_PATH_BYTES):
            try:
                found = _open(top, os.fsdecode(path))
            except OSError as error:
                asked.send(str(error.errno).encode("ascii"))
                continue
            socket.send_fds(asked, [b"0"], [found])
            os.close(found)


def _open(top: int, path: str) -> int:
    *above, name = path.split("/")
    at = os.dup(top)
    try:
        for directory in above:
            below = open_beneath(at, directory, os.O_RDONLY | os.O_DIRECTORY)
            os.close(at)
            at = below
        return open_beneath(at, name, _READ)
    finally:
        os.close(at)
