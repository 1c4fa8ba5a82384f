"""Opening by name inside a directory, never through a link and never onto another mount."""

from __future__ import annotations

import ctypes
import errno
import functools
import os

_OPENAT2 = 437  # the same number on every architecture
_RESOLVE_NO_XDEV = 0x01  # refuses bind mounts of the same device too
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_FIXED = os.O_NOFOLLOW | os.O_CLOEXEC


def open_beneath(above: int, name: str, flags: int) -> int:
    """Open `name` in the directory `above`, refusing links and mounts.

    Args:
        above: descriptor of a directory.
        name: one name, or a path of names.
        flags: of open(2), to open what is there; O_NOFOLLOW and O_CLOEXEC are added.
    Raises:
        OSError: EXDEV where something is mounted there, ELOOP or ENOTDIR for a link.
    Source: openat2(2).
    """
    openat2 = _openat2()
    if openat2 is not None:
        return openat2(above, name, flags | _FIXED)
    fd = os.dup(above)
    try:
        *directories, last = name.split("/")
        for each in directories:
            fd = _step(fd, each, os.O_PATH | os.O_DIRECTORY)
        return _step(fd, last, flags)
    except BaseException:
        os.close(fd)
        raise


def _step(above: int, name: str, flags: int) -> int:
    """Open one name and close the directory that it is in; after an error that stays open."""
    if name == "..":
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    fd = os.open(name, flags | _FIXED, dir_fd=above)
    try:
        if _mount_of(fd) != _mount_of(above):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), name)
    except BaseException:
        os.close(fd)
        raise
    os.close(above)
    return fd


def _mount_of(fd: int) -> str:
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
        return next(line for line in lines if line.startswith("mnt_id:"))


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


class _OpenAt2:
    def __init__(self) -> None:
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self._syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]
        self._hows: dict[int, _OpenHow] = {}

    def __call__(self, above: int, name: str, flags: int) -> int:
        how = self._hows.get(flags)
        if how is None:  # the kernel only reads it, so that all calls may share one
            resolve = _RESOLVE_NO_XDEV | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
            how = self._hows[flags] = _OpenHow(flags, 0, resolve)
        while True:
            fd = int(self._syscall(_OPENAT2, above, os.fsencode(name), ctypes.addressof(how), ctypes.sizeof(how)))
            if fd >= 0:
                return fd
            number = ctypes.get_errno()
            # EAGAIN: a rename elsewhere on the machine raced with the check of RESOLVE_BENEATH.
            if number not in (errno.EAGAIN, errno.EINTR):
                raise OSError(number, os.strerror(number), name)


@functools.cache
def _openat2() -> _OpenAt2 | None:
    """Return the call, or None where a seccomp filter of the host forbids it (Docker before 20.10)."""
    call = _OpenAt2()
    try:
        probe = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.close(call(probe, ".", os.O_PATH | os.O_DIRECTORY | _FIXED))
        finally:
            os.close(probe)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return None
        raise
    return call
