"""Calls of the system that fail, one at a time: each place in the code that makes one, in turn."""

from __future__ import annotations

import builtins
import errno
import os
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from worldfork.core import beneath
from worldfork.store import syscalls
from worldfork.store.database import Database

OPENING = ("open", "dup", "listdir", "scandir")
WRITING = (
    *("chmod", "chown", "copy_file_range", "fchmod", "fchown", "fsync", "ftruncate", "link", "mkdir", "mknod", "open"),
    *("posix_fallocate", "rename", "replace", "setxattr", "symlink", "truncate", "utime", "write"),
)
ALL = (
    *OPENING,
    *WRITING,
    *("access", "fstat", "getxattr", "listxattr", "lseek", "lstat", "pread", "read", "readlink", "removexattr"),
    *("rmdir", "stat", "statvfs", "unlink"),
)
_OURS = f"{os.sep}worldfork{os.sep}"
_TESTS = f"{os.sep}tests{os.sep}"

Site = tuple[str, str, int]
"""A call and the line of ours that leads to it."""


class Failing:
    """While it is in force, one chosen call fails, and all are noted.

    Args:
        number: an errno.
        calls: names of calls that count; "sqlite" is the end of a transaction.
        site: the place whose first call fails; None for none.
    """

    def __init__(self, number: int, calls: tuple[str, ...], site: Site | None = None) -> None:
        self._number = number
        self._calls = calls
        self._site = site
        self._thread = threading.get_ident()
        self._active = False
        self.seen: dict[Site, int] = {}
        """All places that were passed, in order."""

    @contextmanager
    def in_force(self) -> Iterator[None]:
        with mock.patch.multiple(
            os, **{name: self._wrapped(name, getattr(os, name)) for name in {*self._calls} - {"sqlite"}}
        ):
            with (
                mock.patch.object(builtins, "open", self._wrapped("open", builtins.open)),
                mock.patch.object(beneath._OpenAt2, "__call__", self._wrapped("open", beneath._OpenAt2.__call__)),
                mock.patch.object(syscalls, "syncfs", self._wrapped("fsync", syscalls.syncfs)),
                mock.patch("worldfork.store.durability.syncfs", self._wrapped("fsync", syscalls.syncfs)),
                mock.patch.object(Database, "_transaction", self._transaction(Database._transaction)),
            ):
                self._active = True
                try:
                    yield
                finally:
                    self._active = False

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._fails(name):
                raise OSError(self._number, os.strerror(self._number))
            return call(*args, **kwargs)

        return wrapper

    def _fails(self, name: str) -> bool:
        if name not in self._calls or not self._active or threading.get_ident() != self._thread:
            return False
        self._active = False
        try:
            site = self._place(name)
        finally:
            self._active = True
        if site is None:
            return False
        count = self.seen[site] = self.seen.get(site, 0) + 1
        return site == self._site and count == 1

    def _place(self, name: str) -> Site | None:
        """Return where in the code of ours the call is made; None where it is a test that makes it."""
        frame = sys._getframe(3)
        while frame is not None:
            file = frame.f_code.co_filename
            if _TESTS in file:
                return None
            if _OURS in file:
                return (name, file.partition(_OURS)[2], frame.f_lineno)
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def _transaction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(database: Database, name: str, *, writes: bool = True) -> Iterator[Any]:
            inner = original(database, name, writes=writes)
            connection = next(inner)
            try:
                yield connection
                if writes and self._fails("sqlite"):
                    raise _failure(self._number)
            except BaseException as error:
                inner.throw(error)
                raise
            else:
                next(inner, None)

        return wrapper


def _failure(number: int) -> sqlite3.Error:
    full = number == errno.ENOSPC
    error = sqlite3.OperationalError("database or disk is full" if full else "disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL if full else sqlite3.SQLITE_IOERR
    return error
