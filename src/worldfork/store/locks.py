"""POSIX record locks on whole files: how everybody sees who is alive.

Unlike flock, a record lock is not inherited by fork; unlike a pid, it is seen across pid namespaces and containers,
and is never reused. Its price: closing *any* descriptor of a file drops all locks of this process on it. So every open
and close of a lock file goes through this module, which knows the files that this process has locked.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_BUSY = (errno.EAGAIN, errno.EACCES)
_FIRST_POLL_S = 0.0005
_POLL_S = 0.02

_Inode = tuple[int, int]

_mutex = threading.Lock()
"""Guards `_files` and `_turns`, and every open and close of a lock file."""
_files: dict[_Inode, int] = {}
"""Descriptors of the lock files that this process holds or waits for."""
_turns: dict[str, _Turn] = {}


class _Turn:
    """Whose turn it is among the threads that wait for one file."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0


class RecordLock:
    """A record lock that this process holds until `release`."""

    def __init__(self, path: Path, fd: int, inode: _Inode) -> None:
        self.path = path
        self._fd = fd
        self._inode = inode
        self._pid = os.getpid()

    def release(self) -> None:
        """Remove the file and drop the lock. Idempotent; in a forked child, which never had the lock, nothing."""
        if self._pid != os.getpid():
            return
        with _mutex:
            if _files.get(self._inode) != self._fd:
                return
            try:
                self.path.unlink(missing_ok=True)
            finally:
                del _files[self._inode]
                os.close(self._fd)


def take(path: Path) -> RecordLock | None:
    """Create and lock a file at once; None if it is locked already, be it by this process.

    Raises:
        OSError: the file cannot be made, or its file system has no record locks (ENOLCK and others).
    """
    while True:
        with _mutex:
            if _inode_of(path) in _files:
                return None
            fd = _open(path)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken = _register_if_current(path, fd)
            except OSError as error:
                os.close(fd)
                if error.errno in _BUSY:
                    return None
                raise
            if taken is not None:
                return taken
            os.close(fd)


class StillLocked(Exception):
    """Somebody kept a lock for longer than anybody wants to wait."""


def wait(path: Path, *, until_s: float = math.inf) -> RecordLock:
    """Create and lock a file, waiting for other threads and processes to release it.

    Args:
        path: the file.
        until_s: the moment of `time.monotonic()` at which to give up.
    Raises:
        StillLocked: that moment has come.
        OSError: as `take`.
    """
    while True:
        with _mutex:
            busy = _inode_of(path) in _files
            if not busy:
                fd = _open(path)
                inode = _inode(os.fstat(fd))
                _files[inode] = fd
        if busy:
            _pause(until_s)
            continue
        try:
            _lock_blocking(fd, until_s)
        except BaseException:
            _forget(inode)
            raise
        if _inode_of(path) == inode:
            return RecordLock(path, fd, inode)
        # The one before us removed the file on its way out; what we locked is no longer at that path.
        _forget(inode)


@contextmanager
def turn(path: Path, *, wait_s: float = math.inf) -> Iterator[None]:
    """Hold a file's lock against all other threads and processes for the length of the block.

    Args:
        path: the file.
        wait_s: how long to wait for it, in seconds.
    Raises:
        StillLocked: that was not enough.
        OSError: as `take`.
    """
    key = str(path)
    until_s = time.monotonic() + wait_s
    with _mutex:
        mine = _turns.setdefault(key, _Turn())
        mine.users += 1
    try:
        if not mine.lock.acquire(timeout=min(wait_s, threading.TIMEOUT_MAX)):
            raise StillLocked(str(path))
        try:
            lock = wait(path, until_s=until_s)
            try:
                yield
            finally:
                lock.release()
        finally:
            mine.lock.release()
    finally:
        with _mutex:
            mine.users -= 1
            if not mine.users and _turns.get(key) is mine:
                del _turns[key]


def is_locked(path: Path) -> bool:
    """Tell whether anybody, this process included, holds the lock. A file that does not exist is not locked.

    Raises:
        OSError: the file cannot be looked at.
    """
    with _mutex:
        inode = _inode_of(path)
        if inode is None:
            return False
        known = _files.get(inode)
        # A file that this process merely waits for is locked by another: yes either way.
        if known is not None:
            return True
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return _holder_of(fd) is not None
        finally:
            os.close(fd)


def remove_if_free(path: Path) -> bool:
    """Remove a lock file that nobody holds; True if it is gone.

    It is locked for the moment of its removal, so that nobody takes it just then and is left with a lock on a file
    that no longer has a name.

    Raises:
        OSError: the file cannot be looked at or removed.
    """
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    lock = take(path)
    if lock is None:
        return False
    lock.release()
    return True


def hold_still() -> None:
    """Before a fork: wait until no other thread is in the middle of a change here."""
    _mutex.acquire()


def resume() -> None:
    """After a fork, in the parent."""
    _mutex.release()


def start_over() -> None:
    """After a fork, in the child, which has none of its parent's locks: forget them."""
    global _mutex
    _mutex = threading.Lock()
    for fd in _files.values():
        os.close(fd)
    _files.clear()
    _turns.clear()


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _inode(status: os.stat_result) -> _Inode:
    return status.st_dev, status.st_ino


def _inode_of(path: Path) -> _Inode | None:
    try:
        return _inode(os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return None


def _register_if_current(path: Path, fd: int) -> RecordLock | None:
    inode = _inode(os.fstat(fd))
    if _inode_of(path) != inode:
        return None
    _files[inode] = fd
    return RecordLock(path, fd, inode)


def _forget(inode: _Inode) -> None:
    with _mutex:
        os.close(_files.pop(inode))


def _lock_blocking(fd: int, until_s: float) -> None:
    if until_s == math.inf:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX)
            return
        except OSError as error:
            # The kernel takes a process for one thread: two processes whose threads wait for each other's other
            # threads look like a deadlock to it.
            if error.errno != errno.EDEADLK:
                raise
    pause_s = _FIRST_POLL_S
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in _BUSY:
                raise
        _pause(until_s, pause_s)
        pause_s = min(pause_s * 2, _POLL_S)


def _pause(until_s: float, pause_s: float = _POLL_S) -> None:
    if time.monotonic() > until_s:
        raise StillLocked
    threading.Event().wait(pause_s)


def _holder_of(fd: int) -> int | None:
    """Return the pid that holds a lock on the file, as this pid namespace sees it (0 if it does not)."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else int(pid)
