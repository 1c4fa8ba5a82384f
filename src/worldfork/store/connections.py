"""Single connections to the metadata: how they are set up, and how they get their turn to write."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import threading
import time
from contextlib import closing
from pathlib import Path

from worldfork.core.errors import Corrupt, FormatUnsupported, StoreError
from worldfork.store.faultpoints import fault
from worldfork.store.schema import APPLICATION, FORMAT, SCHEMA, UPGRADES
from worldfork.store.syscalls import allot

BUSY_S = 10.0
"""Seconds after which waiting for other writers is an error."""
LONG_LOG_BYTES = 16 << 20
"""Length of the log, in bytes, from which on it is worth moving into the database."""

_INDEX_BYTES = 32 << 10
"""By so much the index of the log grows at a time; the first is enough for 4062 pages of log."""
_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.001
_nothing = threading.Event()


def connect(path: Path, *, synchronous: str, waits: bool = True) -> sqlite3.Connection:
    """Open a connection with a write-ahead log that is never moved into the database by itself.

    Args:
        path: the database; made if it is missing.
        synchronous: SQLite's word for which commits wait for the disk: "NORMAL" none, "FULL" all.
        waits: let SQLite wait for other processes; otherwise `begin_immediate` does.
    Raises:
        FormatUnsupported: a newer version of Worldfork wrote it; it is left as it is.
        Corrupt: it is not a database of Worldfork; it is left as it is.
        StoreError: the file system cannot carry a write-ahead log.
        sqlite3.Error: SQLite failed.
    """
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=256
    )
    try:
        _check_format(connection, path)
        if connection.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
            raise StoreError(
                f"SQLite cannot keep a write-ahead log at {path}",
                remedy="set WORLDFORK_SCRATCH to a directory on a local disk or on tmpfs",
            )
        connection.execute(f"PRAGMA synchronous={synchronous}")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute(f"PRAGMA journal_size_limit={4 * LONG_LOG_BYTES}")
        # Sorting must not need a disk that may be full.
        connection.execute("PRAGMA temp_store=MEMORY")
        if not waits:
            connection.execute("PRAGMA busy_timeout=0")
    except BaseException:
        connection.close()
        raise
    return connection


def expect_readable_format(path: Path) -> None:
    """Look at an existing database with a connection that cannot write.

    Any other, when it is closed again, moves the log of a process that died into the database, which is not ours to
    do to a format that we do not know.

    Raises:
        FormatUnsupported, Corrupt: as `connect`.
        sqlite3.Error: SQLite failed.
    """
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
        _check_format(connection, path)


def make_private(path: Path) -> None:
    """Make the database readable by its owner alone, and its log with it: it holds the variables of sandboxes.

    Its own mode counts, since the directory may be one that others made. The file is never opened here when it is
    there already: closing it would drop the locks that SQLite has on it in this process.

    Raises:
        OSError: it cannot be made.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            os.chmod(path, 0o600)


def _check_format(connection: sqlite3.Connection, path: Path) -> int:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if application not in (0, APPLICATION):
        raise Corrupt(f"{path} is not a database of Worldfork", expected=APPLICATION, actual=application)
    if found > FORMAT:
        raise FormatUnsupported(
            f"{path} has format {found}; this version of Worldfork reads up to {FORMAT}",
            remedy="upgrade worldfork",
            expected=FORMAT,
            actual=found,
        )
    return found


def make_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables where they are missing, and bring those of an older format up to this. One process at a time.

    An upgrade is one transaction, so that a kill leaves the old format or the new one; it only adds, so that a process
    of an older version that has the store open goes on.
    """
    found = _check_format(connection, path)
    if found == FORMAT:
        return
    connection.execute("BEGIN IMMEDIATE")
    statements = SCHEMA if found == 0 else [one for number in range(found, FORMAT) for one in UPGRADES[number]]
    for statement in statements:
        connection.execute(statement)
        fault("upgrade:statement")
    connection.execute(f"PRAGMA application_id={APPLICATION}")
    connection.execute(f"PRAGMA user_version={FORMAT}")
    connection.execute("COMMIT")
    fault("upgrade:committed")


def expect_room_for_index(path: Path) -> None:
    """Refuse to open a database whose index of the log cannot be made.

    SQLite writes to the index through memory. It writes one byte of each page beforehand, which is not enough where the
    disk's blocks are smaller than a page: on a full disk it would end the process with SIGBUS.

    Raises:
        OSError: the disk is full, or cannot be looked at.
    """
    try:
        if os.stat(f"{path}-shm").st_blocks * 512 >= _INDEX_BYTES:
            return
    except FileNotFoundError:
        pass
    status = os.statvfs(path.parent)
    if status.f_bavail * status.f_frsize < 2 * _INDEX_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def allot_index(path: Path) -> None:
    """Give the index of the log its room on disk, once a connection has opened it.

    Raises:
        OSError: the disk is full.
    """
    wanted = f"{path}-shm"
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            try:
                found = os.readlink(entry.path)
            except FileNotFoundError:
                continue
            if found == wanted:
                # SQLite's own descriptor: opening and closing another one would drop its locks.
                allot(int(entry.name), _INDEX_BYTES)
                return


def begin_immediate(connection: sqlite3.Connection) -> None:
    """Begin a transaction that writes, as soon as no other process does.

    SQLite itself looks again after 1, 2, 5, 10 and more milliseconds: longer than a fork takes. Other transactions
    are over in a fraction of one.

    Raises:
        sqlite3.OperationalError: SQLITE_BUSY, after `BUSY_S`; or what else SQLite reported.
    """
    pause_s = _FIRST_PAUSE_S
    deadline = 0.0
    while True:
        try:
            connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError as error:
            now = time.monotonic()
            deadline = deadline or now + BUSY_S
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or now > deadline:
                raise
        _nothing.wait(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
