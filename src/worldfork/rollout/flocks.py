"""Locks on files of a run or a rollout, seen by all processes, which no forked child takes along.

A flock belongs to what was opened and not to who opened it: a child of a bare `os.fork` would keep it for as long as
it lives, whatever the parent does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

_held: set[int] = set()
"""Descriptors that this process has opened to be locked."""


def open_lock(path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> int:
    """Open a file that is to be locked; `close_lock` closes it.

    Raises:
        OSError: it cannot be opened.
    """
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    _held.add(fd)
    return fd


def try_lock(fd: int) -> bool:
    """Be the only one who has the file's lock; False where somebody else has it.

    Raises:
        OSError: its file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def close_lock(fd: int) -> None:
    """Let go of the lock, whoever has a copy of the descriptor; in a forked child, which never had it, nothing."""
    if fd not in _held:
        return
    _held.discard(fd)
    # Said aloud: a child that was forked by something else than Python keeps its copy open.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _forked() -> None:
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forked)
