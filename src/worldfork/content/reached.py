"""Files of a tree opened in the order of its manifest: by descriptors beneath its root, at any depth."""

from __future__ import annotations

import os
from pathlib import Path

from worldfork.content.closed import ClosedFiles
from worldfork.content.ids import is_seen_whole
from worldfork.core import mapped
from worldfork.core.beneath import open_beneath

_HELD = 32
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY


class Reached:
    """The directories on the way to the last file that was opened. Use it as a context.

    Args:
        root: the top of the tree, whose parents are trusted.
    Raises:
        DriverUnavailable: it holds files of a range of ids that this user has not got.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path: list[str] = []
        self._held: dict[int, int] = {}
        """Descriptors by depth; the root always, and the nearest of the others."""
        self._closed: ClosedFiles | None = None

    def __enter__(self) -> Reached:
        if not is_seen_whole(self._root):
            self._closed = ClosedFiles(self._root, mapped.namespace())
            return self
        try:
            self._held[0] = os.open(self._root, _DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except PermissionError:
            if os.geteuid() == 0:
                raise
            self._closed = ClosedFiles(self._root)
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()
        if self._closed is not None:
            self._closed.close()

    def open(self, path: str) -> int:
        """Open a file to read it, also one that is closed to this user; never through a link, never on another mount.

        Raises:
            OSError: it cannot be opened.
        """
        if self._closed is None:
            try:
                return self._open(path)
            except PermissionError:
                if os.geteuid() == 0:
                    raise
            self._closed = ClosedFiles(self._root)
        return self._closed.open(path)

    def _open(self, path: str) -> int:
        *above, name = path.split("/")
        directory = self._held[len(above)] if above == self._path else self._enter(above)
        try:
            return open_beneath(directory, name, _READ | os.O_NOATIME)
        except PermissionError:
            return open_beneath(directory, name, _READ)  # somebody else's, whose access time is not ours to spare

    def _enter(self, wanted: list[str]) -> int:
        shared = 0
        for one, other in zip(self._path, wanted, strict=False):
            if one != other:
                break
            shared += 1
        for depth in [depth for depth in self._held if depth > shared]:
            os.close(self._held.pop(depth))
        depth = max(self._held)
        self._path = wanted[:depth]
        while depth < len(wanted):
            fd = open_beneath(self._held[depth], wanted[depth], _DIRECTORY)
            depth += 1
            self._held[depth] = fd
            self._path = wanted[:depth]
            if len(self._held) > _HELD:
                os.close(self._held.pop(min(held for held in self._held if held)))
        return self._held[depth]
