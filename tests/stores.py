"""Stores to test with: small snapshots, children that die, and a look at what must always hold."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from worldfork.core.ids import new_id
from worldfork.core.settings import Settings
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store.home import Home, open_home
from worldfork.store.store import Store


def home_at(directory: Path) -> Home:
    return open_home(Settings(home=directory, scratch=directory))


def record_of(layers: tuple[str, ...], *, form: str = "trusted", parent_id: str | None = None) -> SnapshotRecord:
    return SnapshotRecord(
        snapshot_id=new_id("sn"),
        parent_id=parent_id,
        sandbox_id=None,
        created_s=1_700_000_000.0,
        kind="filesystem",
        state="ready",
        form=form,
        base={"kind": "host"},
        layers=layers,
        facts={"env": {"A": "b"}},
    )


def add_snapshot(store: Store, *, below: tuple[str, ...] = (), form: str = "trusted") -> SnapshotRecord:
    """Publish a snapshot with one new layer, whose only file holds the layer's id."""
    draft = store.begin_layer(form=form)
    draft.path.mkdir()
    (draft.path / "file").write_text(draft.layer_id)
    record = record_of((draft.layer_id, *below), form=form)
    store.publish(record, [draft.layer_id])
    return record


def problems(store: Store) -> list[str]:
    """Return what is wrong with a store that nobody is using: empty if all that it announces is there, and no more."""
    found = []
    used: set[str] = set()
    for record in store.snapshots():
        for layer_id in record.layers:
            used.add(layer_id)
            state = store.layer(layer_id).state
            if state not in ("ready", "durable") or (record.state == "durable" and state != "durable"):
                found.append(f"{record.snapshot_id} is {record.state}, its layer {layer_id} is {state}")
            if (store.layer_path(layer_id) / "file").read_text() != layer_id:
                found.append(f"{layer_id} has the wrong content")
    found += [f"stray layer {path.name}" for path in store.home.layers.iterdir() if path.name not in used]
    found += [f"stray trash {path.name}" for path in store.home.trash.iterdir()]
    found += [f"stray lock {path.name}" for path in store.home.locks.iterdir() if path.name != store.owner_id]
    found += [f"stray {path}" for path in store.home.tmp.parent.iterdir() if path != store.home.tmp]
    found += [f"stray holder {holder.holder_id}" for holder in store.holders()]
    with store.database.read() as db:
        found += [f"stray row of {row[0]}" for row in db.execute("SELECT layer_id FROM layers") if row[0] not in used]
        found += [f"SQLite: {row[0]}" for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
    return found


def start_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child, which exits with 0, or 1 after an exception; return its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def exit_code_of(child: int) -> int:
    """Wait for a child; return its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child and return its exit code."""
    return exit_code_of(start_child(work))
