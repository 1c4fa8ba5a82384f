"""The calls of Linux that the standard library lacks."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path

_STATFS_BYTES = 256  # struct statfs has 120 on 64-bit machines


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def syncfs(fd: int) -> None:
    """Write all of one file system to disk: the one that `fd` lies on.

    `os.sync` is no substitute: it waits for every disk of the machine and reports no error.

    Raises:
        OSError: EIO where a write-back failed since `fd` was opened (kernel 5.8 and newer).
    """
    if _libc().syncfs(ctypes.c_int(fd)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def sync_directory(directory: Path, call: Callable[[int], None] | None = None) -> None:
    """Bring the names in a directory to disk, or do with a descriptor of it what `call` says.

    Raises:
        OSError: it cannot be opened, or the disk failed.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        (call or os.fsync)(fd)
    finally:
        os.close(fd)


def allot(fd: int, size_bytes: int) -> bool:
    """Give the first bytes of a file their room on disk; false where the file system cannot do that.

    `os.posix_fallocate` is no substitute: where there is no such call it writes, be it under another process's hands.

    Raises:
        OSError: the disk is full, or failed.
    """
    if _libc().fallocate(ctypes.c_int(fd), 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number))


def file_system_magic(path: Path) -> int:
    """Return `f_type` of statfs(2): which kind of file system `path` lies on.

    Raises:
        OSError: the path cannot be looked at.
    """
    buffer = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    if _libc().statfs(ctypes.c_char_p(os.fsencode(path)), ctypes.byref(buffer)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return int(buffer[0]) & 0xFFFFFFFF
