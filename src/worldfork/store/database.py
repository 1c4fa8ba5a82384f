"""The metadata: SQLite with a write-ahead log, two connections, and no wait for a disk where forks pass.

The *quick* connection serves the hot path with synchronous=NORMAL: a commit appends to the log and waits for nothing.
The *lasting* one has synchronous=FULL: its commits are on disk when they return, and with them all earlier ones of
everybody, since the log is sequential. Moving the log into the database waits for the disk too, so it never happens
by itself but only on the lasting connection.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldfork.core.errors import Corrupt, FormatUnsupported, OutOfSpace, StoreError
from worldfork.store import locks
from worldfork.store.failures import from_sqlite, from_system, typed
from worldfork.store.schema import APPLICATION, FORMAT, SCHEMA

_BUSY_MS = 10_000
_LOOK_EVERY = 256  # quick commits between two looks at the length of the log
_LONG_LOG_BYTES = 16 << 20


class Database:
    """Both connections to one database file. Thread-safe. Not to be used while the process forks: see `hold_still`."""

    def __init__(self, path: Path, *, lock_directory: Path) -> None:
        self.path = path
        self._lock_directory = lock_directory
        self._forget_connections()
        self._open()

    def _forget_connections(self) -> None:
        self._open_lock = threading.Lock()
        self._quick_lock = threading.RLock()
        self._lasting_lock = threading.RLock()
        self._quick: sqlite3.Connection | None = None
        self._lasting: sqlite3.Connection | None = None
        self._closed = False
        self._commits = 0
        self._checkpointing = False

    def _open(self) -> None:
        try:
            # Changing the journal mode and making the tables do not wait for each other as transactions do.
            with locks.turn(self._lock_directory / "schema"):
                self._quick = self._connect("NORMAL")
                self._lasting = self._connect("FULL")
                self._prepare(self._lasting)
        except BaseException as error:
            self._drop_connections()
            if isinstance(error, sqlite3.Error):
                raise from_sqlite(error, self.path) from error
            if isinstance(error, OSError):
                raise from_system(error, f"{self.path} cannot be opened") from error
            raise

    def _connect(self, synchronous: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        try:
            mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            if mode != "wal":
                raise StoreError(
                    f"SQLite cannot keep a write-ahead log at {self.path}",
                    remedy="set WORLDFORK_SCRATCH to a directory on a local disk or on tmpfs",
                )
            connection.execute(f"PRAGMA synchronous={synchronous}")
            connection.execute("PRAGMA wal_autocheckpoint=0")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute(f"PRAGMA journal_size_limit={4 * _LONG_LOG_BYTES}")
            # Sorting must not need a disk that may be full.
            connection.execute("PRAGMA temp_store=MEMORY")
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if application not in (0, APPLICATION):
            raise Corrupt(f"{self.path} is not a database of Worldfork", expected=APPLICATION, actual=application)
        if found > FORMAT:
            raise FormatUnsupported(
                f"{self.path} has format {found}; this version of Worldfork reads up to {FORMAT}",
                remedy="upgrade worldfork",
                expected=FORMAT,
                actual=found,
            )
        if found == 0:
            connection.execute("BEGIN IMMEDIATE")
            for statement in SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION}")
            connection.execute(f"PRAGMA user_version={FORMAT}")
            connection.execute("COMMIT")

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Give the quick connection for single statements.

        Raises:
            Locked, OutOfSpace, Corrupt, StoreError: what SQLite reported.
        """
        with self._quick_lock:
            connection = self._usable("_quick")
            try:
                yield connection
            except sqlite3.Error as error:
                raise from_sqlite(error, self.path) from error

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Give one transaction that survives a dead process, but not a dead machine. Waits for no disk.

        Raises:
            Locked, OutOfSpace, Corrupt, StoreError: what SQLite reported; nothing was changed.
        """
        with self._quick_lock:
            yield from self._transaction(self._usable("_quick"))
            self._commits += 1
            look = self._commits % _LOOK_EVERY == 0
        if look and self._log_bytes() > _LONG_LOG_BYTES:
            self._checkpoint_aside()

    @contextmanager
    def write_lasting(self) -> Iterator[sqlite3.Connection]:
        """Give one transaction that is on disk when the block has ended.

        Raises:
            Locked, OutOfSpace, Corrupt, StoreError: what SQLite reported; nothing was changed.
        """
        with self._lasting_lock:
            yield from self._transaction(self._usable("_lasting"))

    @contextmanager
    def view(self) -> Iterator[sqlite3.Connection]:
        """Give one moment of the metadata to long readers; writers on the quick connection go on meanwhile.

        Raises:
            Locked, Corrupt, StoreError: what SQLite reported.
        """
        with self._lasting_lock:
            yield from self._transaction(self._usable("_lasting"), kind="DEFERRED")

    def _transaction(self, connection: sqlite3.Connection, *, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        try:
            connection.execute(f"BEGIN {kind}")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise from_sqlite(error, self.path) from error

    def _usable(self, which: str) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self, which)
        if connection is None:
            with self._open_lock:
                if self._closed:
                    raise StoreError("the store is closed")
                if getattr(self, which) is None:
                    self._open()  # the first use in a forked child
                connection = getattr(self, which)
        assert connection is not None
        return connection

    def checkpoint(self) -> None:
        """Move the log into the database if it has grown long. Slow; writers go on meanwhile.

        Raises:
            StoreError and its kin: what SQLite reported; nothing is lost.
        """
        if self._log_bytes() > _LONG_LOG_BYTES:
            self._checkpoint()
            # Whoever writes first after a checkpoint starts the log anew and waits for the disk once: be it us.
            with self.write_lasting() as connection:
                connection.execute("UPDATE counters SET value = value + 1 WHERE name = 'checkpoints'")

    def reuse_log(self) -> None:
        """On a full disk: let the next transaction have the room of the log instead of new room, if that can be."""
        try:
            self._checkpoint()
        except (StoreError, OutOfSpace):
            pass  # the next transaction will tell

    def _checkpoint(self) -> None:
        with self._lasting_lock:
            connection = self._usable("_lasting")
            try:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            except sqlite3.Error as error:
                raise from_sqlite(error, self.path) from error

    def _log_bytes(self) -> int:
        with typed("the log of the store cannot be looked at"):
            try:
                return os.stat(f"{self.path}-wal").st_size
            except FileNotFoundError:
                return 0

    def _checkpoint_aside(self) -> None:
        if self._checkpointing:
            return
        self._checkpointing = True
        try:
            threading.Thread(target=self._checkpoint_quietly, name="worldfork-checkpoint").start()
        except RuntimeError:
            self._checkpointing = False  # the interpreter is shutting down; the log stays long

    def _checkpoint_quietly(self) -> None:
        try:
            self.checkpoint()
        except (StoreError, OutOfSpace):
            pass  # the log stays long, and the next one will try again
        finally:
            self._checkpointing = False

    def close(self) -> None:
        """Close both connections. Idempotent."""
        with self._lasting_lock, self._quick_lock, self._open_lock:
            self._closed = True
            self._drop_connections()

    def _drop_connections(self) -> None:
        for connection in (self._lasting, self._quick):
            if connection is not None:
                connection.close()
        self._lasting = self._quick = None

    def hold_still(self) -> None:
        """Before a fork: wait until no transaction is in progress."""
        self._lasting_lock.acquire()
        self._quick_lock.acquire()

    def resume(self) -> None:
        """After a fork, in the parent."""
        self._quick_lock.release()
        self._lasting_lock.release()

    def start_over(self) -> None:
        """After a fork, in the child: leave the parent's connections; the next use opens new ones.

        They are closed, not abandoned, because SQLite would otherwise take new ones in this process to be covered by
        their locks, which a child does not have. Closing cannot disturb the database: no transaction is open, and the
        parent's lock keeps SQLite from tidying up the log.
        """
        was_closed = self._closed
        self._drop_connections()
        self._forget_connections()
        self._closed = was_closed
