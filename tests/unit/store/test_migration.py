"""A store of format 1 goes on under this version; one of a newer format is left alone."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.stores import add_snapshot, exit_code_of, home_at, in_child, problems, start_child

from worldfork.core.clock import boot_id
from worldfork.core.errors import FormatUnsupported
from worldfork.core.ids import new_id
from worldfork.keeping.check import check
from worldfork.store import faultpoints
from worldfork.store.home import Home
from worldfork.store.schema import APPLICATION, FORMAT
from worldfork.store.store import Store

FORMAT_1 = (
    """
    CREATE TABLE layers (
        layer_id TEXT PRIMARY KEY,
        form TEXT NOT NULL CHECK (form IN ('trusted', 'user')),
        state TEXT NOT NULL CHECK (state IN ('building', 'ready', 'durable', 'condemned')),
        owner_id TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        size_bytes INTEGER,
        digest TEXT,
        created_s REAL NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE INDEX layers_unsettled ON layers (state) WHERE state IN ('building', 'condemned')",
    """
    CREATE TABLE snapshots (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        snapshot_id TEXT NOT NULL UNIQUE,
        state TEXT NOT NULL CHECK (state IN ('ready', 'synced', 'durable')),
        owner_id TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        created_s REAL NOT NULL,
        record TEXT NOT NULL
    )
    """,
    "CREATE INDEX snapshots_pending ON snapshots (state) WHERE state != 'durable'",
    """
    CREATE TABLE names (
        name TEXT PRIMARY KEY,
        snapshot_id TEXT NOT NULL REFERENCES snapshots (snapshot_id) ON DELETE CASCADE
    ) WITHOUT ROWID
    """,
    "CREATE INDEX names_by_snapshot ON names (snapshot_id)",
    """
    CREATE TABLE holders (
        holder_id TEXT PRIMARY KEY,
        kind TEXT NOT NULL,
        owner_id TEXT NOT NULL,
        snapshot_id TEXT,
        layers TEXT NOT NULL,
        facts TEXT NOT NULL,
        created_s REAL NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO counters VALUES ('checkpoints', 0), ('collections', 0)",
)
"""The statements that made a database of format 1. They are never changed: such databases are out there."""

ADD_LAYER = (
    "INSERT INTO layers (layer_id, form, state, owner_id, boot_id, created_s)"
    " VALUES (?, 'trusted', ?, ?, ?, 1700000000.0)"
)
ADD_SNAPSHOT = (
    "INSERT INTO snapshots (snapshot_id, state, owner_id, boot_id, created_s, record) VALUES (?, ?, ?, ?, ?, ?)"
)
ADD_HOLDER = (
    "INSERT INTO holders (holder_id, kind, snapshot_id, layers, facts, owner_id, created_s)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (holder_id) DO UPDATE SET kind = excluded.kind, snapshot_id = excluded.snapshot_id,"
    " layers = excluded.layers, facts = excluded.facts"
)
STOPPED = 42
DEAD = "ow-aaaaaaaaaaaaaaaa"


class Old:
    """A home that a version of format 1 has left: two snapshots, a name, the holder and the draft of a dead process."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.base, self.top, self.draft = (new_id("ly") for _ in range(3))
        self.durable, self.ready, self.sandbox = new_id("sn"), new_id("sn"), new_id("sb")
        with closing(connect(home)) as db:
            for statement in FORMAT_1:
                db.execute(statement)
            db.execute(f"PRAGMA application_id={APPLICATION}")
            db.execute("PRAGMA user_version=1")
            for layer_id, state in ((self.base, "durable"), (self.top, "ready"), (self.draft, "building")):
                db.execute(ADD_LAYER, (layer_id, state, DEAD, boot_id()))
                (home.layers / layer_id / "fs").mkdir(parents=True)
                (home.layers / layer_id / "fs" / "file").write_text(layer_id)
            self.add_snapshot(db, self.durable, "durable", [self.base])
            self.add_snapshot(db, self.ready, "ready", [self.top, self.base])
            db.execute("INSERT INTO names VALUES ('main', ?)", (self.ready,))
            db.execute(ADD_HOLDER, (self.sandbox, "sandbox", self.ready, "[]", "{}", DEAD, 1_700_000_000.0))

    def add_snapshot(self, db: sqlite3.Connection, snapshot_id: str, state: str, layers: list[str]) -> None:
        record = {
            "snapshot_id": snapshot_id,
            "parent_id": None,
            "sandbox_id": None,
            "created_s": 1_700_000_000.0,
            "kind": "filesystem",
            "state": "ready",
            "form": "trusted",
            "base": {"kind": "host"},
            "layers": layers,
            "facts": {"env": {"A": "b"}},
            "size_bytes": 7,
            "label": "first",
        }
        values = (snapshot_id, state, DEAD, boot_id(), 1_700_000_000.0, json.dumps(record))
        db.execute(ADD_SNAPSHOT, values)


def connect(home: Home) -> sqlite3.Connection:
    db = sqlite3.connect(home.database, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA wal_autocheckpoint=0")
    db.execute("PRAGMA foreign_keys=ON")
    return db


def columns(home: Home) -> dict[str, list[str]]:
    with closing(connect(home)) as db:
        return {
            table: [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            for table in ("layers", "snapshots", "names", "holders", "counters")
        }


def version(home: Home) -> int:
    with closing(connect(home)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


@pytest.fixture
def old(tmp_path: Path) -> Old:
    return Old(home_at(tmp_path / "home"))


def test_everything_of_format_1_can_be_read(old: Old) -> None:
    assert version(old.home) == 1
    store = Store.open(old.home)
    assert version(old.home) == FORMAT
    first, second = store.snapshots()
    assert (first.snapshot_id, first.state, first.layers) == (old.durable, "durable", (old.base,))
    assert (second.snapshot_id, second.state, second.layers) == (old.ready, "ready", (old.top, old.base))
    assert (first.label, first.size_bytes, first.facts) == ("first", 7, {"env": {"A": "b"}})
    assert (first.level, first.digest, first.exported) == ("local", None, None)
    assert store.names() == {"main": old.ready}
    assert [holder.holder_id for holder in store.holders()] == [old.sandbox]
    for layer_id, state in ((old.base, "durable"), (old.top, "ready"), (old.draft, "building")):
        layer = store.layer(layer_id)
        assert (layer.state, layer.digest, layer.covers, layer.level) == (state, None, (), 0)
    report = check(store)
    assert report.findings == []
    assert (report.snapshots, report.unsealed, report.moving) == (2, 2, 1)
    store.close()


def test_a_store_of_format_1_goes_on(old: Old) -> None:
    store = Store.open(old.home)
    added = add_snapshot(store, below=(old.top, old.base))
    store.make_durable(added.snapshot_id)
    store.make_durable(old.ready)
    store.set_name("other", old.durable)
    swept = store.sweep(grace_s=0)
    assert swept.failures == []
    assert (swept.holders, swept.drafts) == ([old.sandbox], [old.draft])
    store.delete_snapshot(old.ready)
    store.delete_snapshot(added.snapshot_id)
    collected = store.collect()
    assert collected.failures == []
    assert set(collected.layers) == {old.top, added.layers[0]}
    assert check(store, read_data=True).findings == []
    assert store.names() == {"other": old.durable}
    assert problems(store) == []
    store.close()


def test_its_tables_end_up_as_those_of_a_new_store(old: Old, tmp_path: Path) -> None:
    Store.open(old.home).close()
    new = home_at(tmp_path / "new")
    Store.open(new).close()

    def indexes(home: Home) -> set[str]:
        with closing(connect(home)) as db:
            return {
                row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
            }

    def counters(home: Home) -> set[str]:
        with closing(connect(home)) as db:
            return {row[0] for row in db.execute("SELECT name FROM counters")}

    assert {table: set(names) for table, names in columns(old.home).items()} == {
        table: set(names) for table, names in columns(new).items()
    }
    assert indexes(old.home) == indexes(new)
    assert counters(old.home) == counters(new)


def test_many_processes_open_it_at_once(old: Old) -> None:
    start, go = os.pipe()

    def open_it() -> None:
        os.close(go)
        os.read(start, 1)
        store = Store.open(old.home)
        assert [record.snapshot_id for record in store.snapshots()][:2] == [old.durable, old.ready]
        add_snapshot(store, below=(old.base,))
        store.close()

    children = [start_child(open_it) for _ in range(8)]
    os.close(start)
    os.close(go)
    assert [exit_code_of(child) for child in children] == [0] * 8
    store = Store.open(old.home)
    assert len(store.snapshots()) == 10
    assert check(store).findings == []
    store.close()


def test_a_stop_at_any_step_of_the_upgrade_leaves_one_format_or_the_other(tmp_path: Path) -> None:
    versions = set()
    step = 0
    while True:
        step += 1
        old = Old(home_at(tmp_path / f"home-{step}"))
        before = columns(old.home)

        def upgrade(step: int = step, old: Old = old) -> None:
            passed: list[str] = []

            def hook(name: str) -> None:
                passed.append(name)
                if len(passed) == step and name.startswith("upgrade:"):
                    os._exit(STOPPED)

            faultpoints.install(hook)
            Store.open(old.home)
            os._exit(0)

        code = in_child(upgrade)
        assert code in (0, STOPPED)
        found = version(old.home)
        versions.add(found)
        assert found in (1, FORMAT)
        assert (columns(old.home) == before) == (found == 1), f"step {step}"
        store = Store.open(old.home)
        assert [record.snapshot_id for record in store.snapshots()] == [old.durable, old.ready], f"step {step}"
        assert check(store).findings == [], f"step {step}"
        store.close()
        if code == 0:
            break
    assert step > 10
    assert versions == {1, FORMAT}


def test_a_kill_from_outside_during_the_upgrade(tmp_path: Path) -> None:
    for step in (1, 5):
        old = Old(home_at(tmp_path / f"home-{step}"))
        told, tell = os.pipe()

        def upgrade(step: int = step, old: Old = old, tell: int = tell) -> None:
            passed: list[str] = []

            def hook(name: str) -> None:
                passed.append(name)
                if len(passed) == step:
                    os.write(tell, b"x")
                    signal.pause()

            faultpoints.install(hook)
            Store.open(old.home)

        child = start_child(upgrade)
        assert os.read(told, 1) == b"x"
        os.kill(child, signal.SIGKILL)
        assert exit_code_of(child) == -signal.SIGKILL
        os.close(told)
        os.close(tell)
        assert version(old.home) == 1
        store = Store.open(old.home)
        assert len(store.snapshots()) == 2
        assert check(store).findings == []
        store.close()


def digests(home: Home) -> dict[str, str]:
    """The database and its log. An empty log says nothing; the index of one is made anew by whoever opens it."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.scratch.glob("db.sqlite*"))
        if not path.name.endswith("-shm") and path.stat().st_size > 0
    }


def refuse(home: Home) -> None:
    with pytest.raises(FormatUnsupported) as caught:
        Store.open(home)
    assert (caught.value.fields["expected"], caught.value.fields["actual"]) == (FORMAT, FORMAT + 1)
    assert "upgrade" in caught.value.remedy
    assert str(FORMAT + 1) in caught.value.message


def test_a_newer_format_is_refused_and_left_as_it_is(old: Old) -> None:
    with closing(connect(old.home)) as db:
        db.execute(f"PRAGMA user_version={FORMAT + 1}")
    before = digests(old.home)
    assert set(before) == {"db.sqlite"}
    refuse(old.home)
    assert digests(old.home) == before


def test_the_log_of_a_newer_version_that_was_killed_is_left_as_it_is(old: Old) -> None:
    def be_newer() -> None:
        db = connect(old.home)
        db.execute("CREATE TABLE of_the_future (value)")
        db.execute(f"PRAGMA user_version={FORMAT + 1}")
        os._exit(0)

    assert in_child(be_newer) == 0
    before = digests(old.home)
    assert set(before) == {"db.sqlite", "db.sqlite-wal"}
    refuse(old.home)
    assert digests(old.home) == before


def test_a_process_of_the_older_version_that_has_it_open_goes_on(old: Old) -> None:
    """What it does, in its own statements, which SQLite prepared before the tables changed."""
    layer_id, snapshot_id, owner_id, sandbox = new_id("ly"), new_id("sn"), new_id("ow"), new_id("sb")
    with closing(connect(old.home)) as db:
        db.execute("SELECT state, record FROM snapshots ORDER BY number").fetchall()
        store = Store.open(old.home)
        lock = store.home.locks / owner_id

        db.execute("BEGIN IMMEDIATE")
        db.execute(ADD_LAYER, (layer_id, "building", owner_id, boot_id()))
        db.execute("COMMIT")
        (old.home.layers / layer_id / "fs").mkdir(parents=True)
        (old.home.layers / layer_id / "fs" / "file").write_text(layer_id)
        told, tell = os.pipe()

        def live() -> None:
            import fcntl

            fcntl.lockf(os.open(lock, os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
            os.write(tell, b"x")
            time.sleep(60)

        owner = start_child(live)
        assert os.read(told, 1) == b"x"
        # It sends no signs of life, for it knows of none: its lock alone has to count.
        assert layer_id not in store.sweep(grace_s=0).drafts
        assert layer_id not in store.collect().layers
        assert store.layer(layer_id).state == "building"
        db.execute("BEGIN IMMEDIATE")
        changed = db.execute(
            "UPDATE layers SET state = 'ready' WHERE layer_id = ? AND state = 'building' AND owner_id = ?",
            (layer_id, owner_id),
        ).rowcount
        assert changed == 1
        old.add_snapshot(db, snapshot_id, "ready", [layer_id, old.base])
        db.execute(ADD_HOLDER, (sandbox, "sandbox", snapshot_id, "[]", "{}", owner_id, 1_700_000_000.0))
        db.execute("COMMIT")
        db.execute("UPDATE snapshots SET state = 'synced' WHERE snapshot_id = ? AND state != 'durable'", (snapshot_id,))
        assert len(db.execute("SELECT state, record FROM snapshots ORDER BY number").fetchall()) == 3
        os.kill(owner, signal.SIGKILL)
        exit_code_of(owner)
        os.close(told)
        os.close(tell)

        assert store.snapshot(snapshot_id).layers == (layer_id, old.base)
        assert check(store).findings == []
        store.sweep(grace_s=0)
        assert store.collect().failures == []
        assert check(store).findings == []
        assert problems(store) == []
        store.close()
