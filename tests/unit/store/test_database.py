"""The metadata: formats, and what SQLite reports as errors with names."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

import pytest
from tests.stores import add_snapshot, home_at

from worldfork.core.errors import Corrupt, FormatUnsupported, Locked, OutOfSpace, StoreError
from worldfork.store import connections
from worldfork.store.failures import from_sqlite, from_system, typed
from worldfork.store.schema import FORMAT
from worldfork.store.store import Store


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    home = home_at(tmp_path)
    Store.open(home).close()
    raw = sqlite3.connect(home.database)
    raw.execute(f"PRAGMA user_version={FORMAT + 1}")
    raw.close()
    with pytest.raises(FormatUnsupported) as caught:
        Store.open(home)
    assert caught.value.fields["actual"] == FORMAT + 1
    assert os.listdir(home.locks) == []
    raw = sqlite3.connect(home.database)
    assert raw.execute("PRAGMA user_version").fetchone() == (FORMAT + 1,)
    raw.close()


@pytest.mark.parametrize("content", [b"not a database at all, but long enough for a header" * 100, b"short"])
def test_what_is_not_a_database_is_corrupt(tmp_path: Path, content: bytes) -> None:
    home = home_at(tmp_path)
    home.database.write_bytes(content)
    with pytest.raises(Corrupt):
        Store.open(home)
    assert home.database.read_bytes() == content


def test_somebody_elses_database_is_refused(tmp_path: Path) -> None:
    home = home_at(tmp_path)
    raw = sqlite3.connect(home.database)
    raw.execute("PRAGMA application_id=7")
    raw.execute("CREATE TABLE theirs (value)")
    raw.close()
    with pytest.raises(Corrupt):
        Store.open(home)


def test_a_writer_that_does_not_end_is_a_lock_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BUSY_S", 0.02)
    store = Store.open(home_at(tmp_path))
    raw = sqlite3.connect(store.home.database, isolation_level=None)
    raw.execute("BEGIN IMMEDIATE")
    with pytest.raises(Locked) as caught:
        store.begin_layer(form="trusted")
    assert caught.value.retryable
    raw.execute("ROLLBACK")
    raw.close()
    add_snapshot(store)
    store.close()


def add_a_row_and_fail(store: Store, error: Exception) -> None:
    with store.database.write() as db:
        db.execute("INSERT INTO holders VALUES ('x', 'x', 'x', NULL, '[]', '{}', 0, 0)")
        raise error


def test_an_error_inside_a_transaction_changes_nothing(tmp_path: Path) -> None:
    store = Store.open(home_at(tmp_path))
    with pytest.raises(ZeroDivisionError):
        add_a_row_and_fail(store, ZeroDivisionError())
    with pytest.raises(StoreError):
        add_a_row_and_fail(store, sqlite3.OperationalError("as SQLite put it"))
    assert store.holders() == []
    store.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_BUSY, Locked),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, Locked),
        (sqlite3.SQLITE_FULL, OutOfSpace),
        (sqlite3.SQLITE_IOERR_SHMSIZE, OutOfSpace),
        (sqlite3.SQLITE_IOERR_FSYNC, StoreError),
        (sqlite3.SQLITE_CORRUPT, Corrupt),
        (sqlite3.SQLITE_NOTADB, Corrupt),
        (sqlite3.SQLITE_READONLY, StoreError),
    ],
)
def test_codes_of_sqlite(code: int, kind: type[Exception]) -> None:
    error = sqlite3.OperationalError("as SQLite put it")
    error.sqlite_errorcode = code
    assert type(from_sqlite(error, Path("db.sqlite"))) is kind


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, OutOfSpace), (errno.EDQUOT, OutOfSpace), (errno.EIO, StoreError)]
)
def test_numbers_of_the_system(number: int, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        with typed("writing"):
            raise OSError(number, os.strerror(number))
    assert caught.value.errno == number  # type: ignore[attr-defined]
    assert "ulimit" in from_system(OSError(errno.EMFILE, "x"), "opening").remedy
