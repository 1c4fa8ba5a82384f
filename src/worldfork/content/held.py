"""Open directories on the way down a tree: few of them, however deep it is."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST = 32
"""Directories above the one at hand that stay open; the rest is found again from below."""


class Held:
    """A directory on the way, whose descriptor may be let go and found again.

    Args:
        fd: its descriptor, which is this one's from now on.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        info = os.fstat(fd)
        self._identity = (info.st_dev, info.st_ino)

    def let_go(self) -> None:
        """Close it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def find_again(self, below: int) -> None:
        """Open it, if it was let go, from a directory that is right in it.

        Raises:
            OSError: ESTALE where that has been moved elsewhere.
        """
        if self.fd >= 0:
            return
        self.fd = os.open("..", DIRECTORY, dir_fd=below)
        info = os.fstat(self.fd)
        if (info.st_dev, info.st_ino) != self._identity:
            raise OSError(errno.ESTALE, "a directory was moved away from it")


def spare(stack: Sequence[Held]) -> None:
    """Let one go that is far above, after a directory came onto the stack."""
    if len(stack) > _MOST:
        stack[-1 - _MOST].let_go()
