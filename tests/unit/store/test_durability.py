"""Bytes first, then the word; and the word only when the bytes are there."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stores import add_snapshot, in_child, problems

from worldfork.core.errors import NotFound, OutOfSpace, StoreError
from worldfork.core.ids import new_id
from worldfork.store import durability
from worldfork.store.leases import Holder
from worldfork.store.store import Store


def test_a_snapshot_becomes_durable_with_all_its_layers(store: Store) -> None:
    first = add_snapshot(store)
    second = add_snapshot(store, below=first.layers)
    store.make_durable(second.snapshot_id)
    assert store.snapshot(second.snapshot_id).state == "durable"
    assert [store.layer(layer_id).state for layer_id in second.layers] == ["durable", "durable"]
    assert store.snapshot(first.snapshot_id).state == "ready"
    assert store.pending_durability() == [first.snapshot_id]
    store.make_durable(first.snapshot_id)
    store.make_durable(first.snapshot_id)
    assert store.pending_durability() == []
    assert problems(store) == []


def test_the_order_is_callers_descriptors_then_all_bytes_then_the_word(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = add_snapshot(store)
    steps: list[str] = []

    def see(fd: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), store.home.scratch)

    monkeypatch.setattr(durability, "syncfs", lambda fd: steps.append(f"syncfs {see(fd)}"))
    monkeypatch.setattr(durability.os, "fsync", lambda fd: steps.append(f"fsync {see(fd)}"))

    def note(name: str) -> None:
        if name in ("make_durable:noted", "make_durable:said"):
            steps.append(name)
            assert store.snapshot(record.snapshot_id).state == "ready" or name == "make_durable:said"

    monkeypatch.setattr(durability, "fault", note)
    fd = os.open(store.home.run, os.O_RDONLY)
    try:
        store.make_durable(record.snapshot_id, [fd])
    finally:
        os.close(fd)
    assert steps == [
        "syncfs run",
        "syncfs layers",
        f"fsync layers/{record.layers[0]}",
        "fsync layers",
        "make_durable:noted",
        "fsync db.sqlite-wal",
        "make_durable:said",
    ]


@pytest.mark.parametrize(("number", "error"), [(errno.EIO, StoreError), (errno.ENOSPC, OutOfSpace)])
def test_a_disk_that_fails_leaves_it_ready(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    record = add_snapshot(store)

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(durability, "syncfs", fail)
        with pytest.raises(error) as caught:
            store.make_durable(record.snapshot_id)
        assert caught.value.errno == number  # type: ignore[attr-defined]
    assert store.snapshot(record.snapshot_id).state == "ready"
    store.make_durable(record.snapshot_id)
    assert store.snapshot(record.snapshot_id).state == "durable"


def test_what_was_deleted_meanwhile_is_not_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record = add_snapshot(store)
    monkeypatch.setattr(durability, "syncfs", lambda _: store.delete_snapshot(record.snapshot_id))
    with pytest.raises(NotFound):
        store.make_durable(record.snapshot_id, [0])
    with pytest.raises(NotFound):
        store.make_durable(new_id("sn"))


def test_those_of_dead_owners_are_ours_and_those_of_living_ones_are_not(store: Store) -> None:
    mine = add_snapshot(store)
    assert in_child(lambda: add_snapshot(store)) == 0
    other = Store.open(store.home)
    theirs = add_snapshot(other)
    pending = store.pending_durability()
    assert mine.snapshot_id in pending
    assert theirs.snapshot_id not in pending
    assert len(pending) == 2
    other.close()
    assert len(store.pending_durability()) == 3


HOT = """
import os, sys
from pathlib import Path
from tests.stores import add_snapshot, home_at
from worldfork.core.ids import new_id
from worldfork.store.leases import Holder
from worldfork.store.store import Store
store = Store.open(home_at(Path(sys.argv[1])))
record = add_snapshot(store)
store.make_durable(record.snapshot_id)
os.access("/begin", os.F_OK)
for _ in range(20):
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, snapshot_id=record.snapshot_id)])
    store.release([sandbox])
    record = add_snapshot(store, below=record.layers)
os.access("/end", os.F_OK)
store.close()
"""


def test_forks_and_checkpoints_never_wait_for_the_disk(tmp_path: Path) -> None:
    calls = "trace=access,faccessat,fsync,fdatasync,syncfs,sync,sync_file_range,msync"
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed, so nobody can tell")
    subprocess.run(
        [strace, "-f", "-o", str(tmp_path / "calls"), "-e", calls, sys.executable, "-c", HOT, str(tmp_path / "home")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(durability.__file__).parents[2]), os.getcwd()])},
        check=True,
    )
    lines = (tmp_path / "calls").read_text().splitlines()
    begin, end = (next(at for at, line in enumerate(lines) if mark in line) for mark in ('"/begin"', '"/end"'))
    assert any("syncfs(" in line for line in lines[:begin])
    assert [line for line in lines[begin + 1 : end] if "sync" in line] == []


def test_a_long_log_is_moved_aside_without_the_hot_path(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worldfork.store.connections.LONG_LOG_BYTES", 100_000)
    monkeypatch.setattr("worldfork.store.database._LOOK_EVERY", 8)
    for _ in range(400):
        store.hold([Holder(new_id("sb"), facts=f'"{"x" * 200}"')])
    store.database.checkpoint()
    assert len(store.holders()) == 400
    with store.database.view() as db:
        checkpoints = db.execute("SELECT value FROM counters WHERE name = 'checkpoints'").fetchone()[0]
    assert checkpoints >= 1
    other = sqlite3.connect(store.home.database)
    assert other.execute("SELECT count(*) FROM holders").fetchone() == (400,)
    other.close()
