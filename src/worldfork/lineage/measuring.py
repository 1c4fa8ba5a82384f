"""How much disk a sandbox's difference takes, looked at while the sandbox writes it."""

from __future__ import annotations

import contextlib
import os
import stat
import sys

DEEPEST = 128
"""Directories below each other in a sandbox's difference that can be measured; each holds two descriptors."""
MOST = 500_000
"""Files and directories in a sandbox's difference that can be measured: empty ones take none of a disk's bytes, but its
places for files, and the time of whoever looks."""
IMMEASURABLE = sys.maxsize
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def uppers_bytes(run: str) -> int:
    """Return the bytes that the uppers in a sandbox's directory take on disk now."""
    # Which of them is in use may have changed with a checkpoint of another process.
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(run) if name.startswith("upper.")]
        return sum(tree_bytes(f"{run}/{name}") for name in names)
    return 0


def files_bytes(directory: str) -> int:
    """Return the bytes that the files of a directory of ours, such as the disks of a machine, take on disk now."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        infos = [entry.stat(follow_symlinks=False) for entry in entries]
        # What has other links belongs to a snapshot too, and would not go with the sandbox.
        return sum(info.st_blocks * 512 for info in infos if stat.S_ISREG(info.st_mode) and info.st_nlink == 1)
    return 0


def tree_bytes(top: str) -> int:
    """Return the bytes that a tree takes on disk now, links counted once; what vanishes meanwhile is left out.

    The tree is a running sandbox's, which may put a link in the place of a directory at any moment: each is opened
    in the one above it, and no link is followed. One that nests deeper than `DEEPEST`, or has more than `MOST` entries,
    counts as `IMMEASURABLE`, so that nothing can be hidden in what was not looked at.
    """
    total = entries = 0
    linked: set[int] = set()
    stack: list[_Level] = []
    try:
        _descend(stack, top)
        while stack:
            try:
                entry = next(stack[-1].entries, None)
                if entry is None:
                    stack.pop().close()
                    continue
                entries += 1
                if entries > MOST:
                    return IMMEASURABLE
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(info.st_mode):
                if len(stack) == DEEPEST:
                    return IMMEASURABLE
                _descend(stack, entry.name)
            elif info.st_nlink > 1:
                if info.st_ino in linked:
                    continue
                linked.add(info.st_ino)
            total += info.st_blocks * 512
    finally:
        for level in stack:
            level.close()
    return total


class _Level:
    """An open directory on the way down."""

    def __init__(self, name: str, above: int | None) -> None:
        self.fd = os.open(name, _DIRECTORY, dir_fd=above)
        try:
            self.entries = os.scandir(self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        self.entries.close()
        os.close(self.fd)


def _descend(stack: list[_Level], name: str) -> None:
    above = stack[-1].fd if stack else None
    with contextlib.suppress(OSError):  # gone, closed to this user, or no directory any more
        stack.append(_Level(name, above))
