"""Stores to test with: small snapshots, children that die, and a look at what must always hold."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
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


def make_memory(path: Path, token: str, hole_bytes: int = 64 << 30) -> None:
    """Write what stands for a machine's memory: one file of its own, and one that holes make larger than it is."""
    path.mkdir(mode=0o700)
    (path / "state").write_text(token)
    with (path / "disk").open("wb") as disk:
        disk.truncate(hole_bytes)
    (path / "state").chmod(0o400)


def add_memory(store: Store, *, below: tuple[str, ...] = (), form: str = "trusted", **facts: object) -> SnapshotRecord:
    """Publish a snapshot with memory on layers that are there; its file "state" holds its id."""
    record = replace(record_of(below, form=form), kind="memory", facts={"memory": {"driver": "microvm"}, **facts})
    try:
        make_memory(store.begin_memory(record.snapshot_id), record.snapshot_id)
        store.publish(record, ())
    except BaseException:
        store.abandon_memory(record.snapshot_id)
        raise
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
        if record.kind == "memory" and (
            (store.memory_path(record.snapshot_id) / "state").read_text() != record.snapshot_id
        ):
            found.append(f"{record.snapshot_id} has the wrong memory")
    memories = {record.snapshot_id for record in store.snapshots() if record.kind == "memory"}
    found += [f"stray memory {path.name}" for path in store.home.memory.iterdir() if path.name not in memories]
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


FORM = "trusted" if os.geteuid() == 0 else "user"
"""What this user's layers can be."""


def world_of(token: str) -> dict[str, bytes]:
    """Return the files of a layer that `add_world` makes, by path."""
    data = (token.encode() + b"\n") * 500
    return {"file": token.encode(), f"at-{token}/data": data, f"at-{token}/twin": data, f"at-{token}/empty": b""}


def write_world(path: Path, token: str) -> None:
    """Write a small tree that can be told from all others, and whole from torn."""
    (path / f"at-{token}").mkdir(parents=True)
    for name, data in world_of(token).items():
        if name.endswith("/twin"):
            os.link((path / name).with_name("data"), path / name)
        else:
            (path / name).write_bytes(data)
    (path / f"at-{token}" / "link").symlink_to(f"to-{token}")


def add_world(
    store: Store, token: str, *, below: SnapshotRecord | None = None, level: str = "local", publish: bool = True
) -> SnapshotRecord:
    """Publish a snapshot with one new layer that holds `world_of(token)`; it says itself what it is to show."""
    draft = store.begin_layer(form=FORM)
    write_world(draft.path, token)
    layers = (draft.layer_id, *(below.layers if below else ()))
    tokens = [token, *(tokens_of(below) if below else ())]
    parent_id = below.snapshot_id if below else None
    base = {"kind": "host", "fingerprint": "of the tests"}
    record = replace(record_of(layers, form=FORM, parent_id=parent_id), base=base, level=level)
    record = replace(record, facts=facts_of(tokens))
    if publish:
        store.publish(record, [draft.layer_id])
    return record


def facts_of(tokens: list[str]) -> dict[str, object]:
    """Say in a variable, which travels with a snapshot, what it is to show, the topmost first."""
    return {"env": {"TOKENS": " ".join(tokens)}}


def tokens_of(record: SnapshotRecord) -> list[str]:
    """Return what a snapshot of `add_world` is to show."""
    return str(record.facts.get("env", {}).get("TOKENS", "")).split()


def torn(store: Store, record: SnapshotRecord) -> list[str]:
    """Return what a snapshot of `add_world` or `add_snapshot` lacks or has too much, with eyes of the test's own."""
    expected: dict[str, bytes] = {}
    tokens = tokens_of(record)
    if not tokens:
        expected["file"] = record.layers[0].encode()
    for token in reversed(tokens):
        expected |= world_of(token) | {f"at-{token}/link": f"to-{token}".encode()}
    found: dict[str, bytes] = {}
    for layer_id in reversed(record.layers):
        top = os.fspath(store.layer_path(layer_id))
        if not os.path.isdir(top):
            return [f"{record.snapshot_id}: {layer_id} is not there"]
        for directory, names, files in os.walk(top):
            for path in (os.path.join(directory, name) for name in (*names, *files)):
                if os.path.islink(path):
                    found[path[len(top) + 1 :]] = os.fsencode(os.readlink(path))
                elif os.path.isfile(path):
                    with open(path, "rb") as file:
                        found[path[len(top) + 1 :]] = file.read()
    if record.kind == "memory":
        expected["memory/state"] = record.snapshot_id.encode()
        state = store.memory_path(record.snapshot_id) / "state"
        found["memory/state"] = state.read_bytes() if state.exists() else b""
    wrong = sorted(path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path))
    return [f"{record.snapshot_id}: {path} is wrong" for path in wrong]


def strays(store: Store) -> list[str]:
    """Return what lies about in a store that nobody else is using, and that has been swept and collected."""
    used = {layer_id for record in store.snapshots() for layer_id in record.layers}
    home = store.home
    found = [f"layer {path.name}" for path in home.layers.iterdir() if path.name not in used]
    for layer_id in used:
        names = set(os.listdir(home.layers / layer_id)) - {"fs", "manifest"}
        found += [f"{name} beside layer {layer_id}" for name in sorted(names)]
    memories = {record.snapshot_id for record in store.snapshots() if record.kind == "memory"}
    found += [f"memory {path.name}" for path in home.memory.iterdir() if path.name not in memories]
    found += [f"trash {path.name}" for path in home.trash.iterdir()]
    found += [f"lock {path.name}" for path in home.locks.iterdir() if path.name != store.owner_id]
    found += [str(path) for path in home.tmp.parent.iterdir() if path != home.tmp]
    found += [str(path) for path in home.tmp.iterdir()] if home.tmp.exists() else []
    found += [f"holder {holder.holder_id}" for holder in store.holders()]
    with store.database.read() as db:
        found += [f"row of {row[0]}" for row in db.execute("SELECT layer_id FROM layers") if row[0] not in used]
        found += [f"SQLite: {row[0]}" for row in db.execute("PRAGMA integrity_check") if row[0] != "ok"]
    return found
