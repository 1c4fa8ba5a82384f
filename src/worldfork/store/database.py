"""The metadata: SQLite with a write-ahead log, and no wait for a disk where forks pass.

Three connections, each for one thread at a time:

- *quick* writes on the hot path, with synchronous=NORMAL: a commit appends to the log and waits for nothing;
- *reading* reads beside it;
- *lasting* has synchronous=FULL: its commits are on disk when they return, and with them all earlier ones of everybody,
  since the log is sequential. It also moves the log into the database, which waits for the disk too and therefore
  never happens by itself.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worldfork.core.errors import Locked, OutOfSpace, StoreError
from worldfork.store import connections, locks
from worldfork.store.failures import from_sqlite, from_system, typed

_LOOK_EVERY = 256  # quick commits between two looks at the length of the log
_PATIENCE_S = 60.0
"""How long an upgrade of the format by another process may take."""
_NAMES = ("lasting", "reading", "quick")  # in the order in which their locks are taken together


class Database:
    """All connections to one database file. Thread-safe. A fork has to keep to `hold_still` and its kin."""

    def __init__(self, path: Path, *, lock_directory: Path) -> None:
        self.path = path
        self._lock_directory = lock_directory
        self._closed = False
        self._forget_connections()
        self._open()

    def _forget_connections(self) -> None:
        self._open_lock = threading.Lock()
        self._locks = {name: threading.RLock() for name in _NAMES}
        self._connections: dict[str, sqlite3.Connection] = {}
        self._commits = 0
        self._checkpointing = False

    def _open(self) -> None:
        opened: dict[str, sqlite3.Connection] = {}
        try:
            # Changing the journal mode and making the tables do not wait for each other as transactions do.
            with locks.turn(self._lock_directory / "schema", wait_s=_PATIENCE_S):
                connections.make_private(self.path)
                connections.expect_room_for_index(self.path)
                connections.expect_readable_format(self.path)
                opened["lasting"] = connections.connect(self.path, synchronous="FULL")
                connections.make_tables(opened["lasting"], self.path)
                connections.allot_index(self.path)
                opened["reading"] = connections.connect(self.path, synchronous="NORMAL")
                opened["quick"] = connections.connect(self.path, synchronous="NORMAL", waits=False)
        except BaseException as error:
            for connection in opened.values():
                connection.close()
            if isinstance(error, sqlite3.Error):
                raise from_sqlite(error, self.path) from error
            if isinstance(error, OSError):
                raise from_system(error, f"{self.path} cannot be opened") from error
            if isinstance(error, locks.StillLocked):
                raise Locked(
                    f"{self.path} has been in the making by another process for {_PATIENCE_S:g} s",
                    remedy="try again; if one of Worldfork's processes was stopped or hangs, continue or end it",
                    holders=[],
                ) from error
            raise
        self._connections = opened

    def _connection(self, name: str) -> sqlite3.Connection:
        found = self._connections.get(name)
        if found is not None:
            return found
        with self._open_lock:
            if self._closed:
                raise StoreError("the store is closed")
            if not self._connections:
                self._open()  # the first use in a forked child
            return self._connections[name]

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Give a connection for single statements that read.

        Raises:
            Locked, Corrupt, StoreError: what SQLite reported.
        """
        with self._locks["reading"]:
            connection = self._connection("reading")
            try:
                yield connection
            except sqlite3.Error as error:
                raise from_sqlite(error, self.path) from error

    @contextmanager
    def view(self) -> Iterator[sqlite3.Connection]:
        """Give one moment of the metadata to long readers; all others go on meanwhile.

        Raises:
            Locked, Corrupt, StoreError: what SQLite reported.
        """
        with self._locks["lasting"]:
            yield from self._transaction("lasting", writes=False)

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Give one transaction that survives a dead process, but not a dead machine. Waits for no disk.

        Raises:
            Locked, OutOfSpace, Corrupt, StoreError: what SQLite reported; nothing was changed.
        """
        with self._locks["quick"]:
            yield from self._transaction("quick")
            self._commits += 1
            look = self._commits % _LOOK_EVERY == 0
        if look and self._log_bytes() > connections.LONG_LOG_BYTES:
            self._checkpoint_aside()

    @contextmanager
    def write_lasting(self) -> Iterator[sqlite3.Connection]:
        """Give one transaction that is on disk when the block has ended. All writers wait meanwhile.

        Raises:
            Locked, OutOfSpace, Corrupt, StoreError: what SQLite reported; nothing was changed.
        """
        with self._locks["lasting"]:
            yield from self._transaction("lasting")

    def _transaction(self, name: str, *, writes: bool = True) -> Iterator[sqlite3.Connection]:
        connection = self._connection(name)
        try:
            if writes:
                connections.begin_immediate(connection)
            else:
                connection.execute("BEGIN DEFERRED")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise from_sqlite(error, self.path) from error

    def sync_log(self) -> None:
        """Bring all that has been committed to disk, while writers go on.

        Raises:
            OutOfSpace, StoreError: the disk failed.
        """
        with typed("the log of the store cannot be brought to disk"):
            # SQLite has no lock on this file that closing it could drop; its locks are on the others.
            fd = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def checkpoint(self) -> None:
        """Move the log into the database if it has grown long. Slow; writers go on meanwhile.

        Raises:
            OutOfSpace, StoreError: what SQLite reported; nothing is lost.
        """
        if self._log_bytes() > connections.LONG_LOG_BYTES:
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
        with self._locks["lasting"]:
            connection = self._connection("lasting")
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
        """Close all connections. Idempotent."""
        self.hold_still()
        try:
            with self._open_lock:
                self._closed = True
                self._drop_connections()
        finally:
            self.resume()

    def _drop_connections(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def hold_still(self) -> None:
        """Before a fork: wait until no transaction is in progress."""
        for name in _NAMES:
            self._locks[name].acquire()

    def resume(self) -> None:
        """After a fork, in the parent."""
        for name in reversed(_NAMES):
            self._locks[name].release()

    def start_over(self) -> None:
        """After a fork, in the child: leave the parent's connections; the next use opens new ones.

        They are closed, not abandoned, because SQLite would otherwise take new ones in this process to be covered by
        their locks, which a child does not have. Closing cannot disturb the database: no transaction is open, and the
        parent's lock keeps SQLite from tidying up the log.
        """
        self._drop_connections()
        self._forget_connections()
