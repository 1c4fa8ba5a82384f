"""What the operating system and SQLite report, as errors of the house."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldfork.core.errors import Corrupt, Locked, OutOfSpace, StoreError, WorldforkError

_FULL = (errno.ENOSPC, errno.EDQUOT)
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE)
"""No descriptor is free, of this process or of the whole host."""
FIND_DAMAGE = "run `worldfork store check`, which names what is damaged"
_MAKE_ROOM = "delete snapshots or free disk space; deletion works on a full disk"


def from_system(error: OSError, doing: str) -> WorldforkError:
    """Turn an OSError into `OutOfSpace` (full disk or quota) or `StoreError`, with its `errno` as a field."""
    text = f"{doing}: {error.strerror or error}"
    if error.errno in _FULL:
        return OutOfSpace(text, remedy=_MAKE_ROOM, scope="host", errno=error.errno)
    remedy = "raise the limit of open files (ulimit -n)" if error.errno in OUT_OF_FILES else ""
    return StoreError(text, remedy=remedy, errno=error.errno)


def from_sqlite(error: sqlite3.Error, database: Path) -> WorldforkError:
    """Turn an error of SQLite into `Locked`, `OutOfSpace`, `Corrupt` or `StoreError`."""
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    text = f"{database}: {error}"
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Locked(text, remedy="try again; another process is writing to the store", holders=[])
    if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
        return OutOfSpace(text, remedy=_MAKE_ROOM, scope="host", errno=errno.ENOSPC)
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return Corrupt(text, expected="a database of Worldfork", actual=str(error))
    if "malformed JSON" in str(error):
        return Corrupt(
            f"{database}: a record is damaged", remedy=FIND_DAMAGE, expected="a record in JSON", actual=str(error)
        )
    return StoreError(text, sqlite_errorcode=code)


@contextmanager
def typed(doing: str) -> Iterator[None]:
    """Let no OSError of the block out untyped.

    Args:
        doing: what the message starts with.
    Raises:
        OutOfSpace: the disk or a quota is full.
        StoreError: any other OSError.
    """
    try:
        yield
    except WorldforkError:
        raise
    except OSError as error:
        raise from_system(error, doing) from error
