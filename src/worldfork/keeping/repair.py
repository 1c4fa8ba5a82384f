"""Repair of damaged layers: from a copy elsewhere, and only where the copy is proven to be what was lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worldfork.content.layer import walk
from worldfork.content.manifest import Sealed, write_manifest
from worldfork.core.errors import ConfigError, Corrupt, NotFound, OutOfSpace, StoreError, WorldforkError
from worldfork.keeping.findings import LAYER, CheckReport
from worldfork.keeping.layer_check import CONTENT, MANIFEST, check_layer
from worldfork.keeping.sealing import seal
from worldfork.records.snapshot import LayerRecord
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.leases import READING
from worldfork.store.store import LayerDraft, Reading, Store
from worldfork.store.syscalls import sync_directory, syncfs

Fetch = Callable[[str, Path, str], None]
"""Writes the tree of the layer with a digest to a path that does not exist, in a form; NotFound where there is none."""

_OF_ROWS = ("layer_id", "form", "digest", "level", "covers")


@dataclass(frozen=True)
class Repaired:
    """One layer that is whole again."""

    layer_id: str
    how: str
    """"sealed again": only its manifest was lost, and its content proved to be what had been sealed. "put in place":
    its content was missing, and is there again. "replaced": its snapshots stand on a new layer of the same content."""
    by: str | None = None
    """The new layer, where it was replaced."""
    snapshots: int = 0
    """How many snapshots stand on the new layer."""


@dataclass
class RepairReport:
    """What a repair has done, and what it could not do."""

    repaired: list[Repaired] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    """What stays damaged, and why."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {
            "repaired": [
                {"layer_id": one.layer_id, "how": one.how, "by": one.by, "snapshots": one.snapshots}
                for one in self.repaired
            ],
            "left": [{"what": what, "why": why} for what, why in self.left],
            "notes": self.notes,
        }


def repair(
    store: Store, report: CheckReport, fetch: Fetch, *, step: Callable[[str], None] | None = None
) -> RepairReport:
    """Repair what a check has found, as far as there is a copy of it. Safe beside everybody, and to be killed.

    Nothing is guessed: a layer's content comes from `fetch` or is still here, its digest is computed anew and has to
    be the one that the layer was sealed with. Metadata is not repaired.

    Args:
        store: the store that was checked.
        report: what the check found.
        fetch: where copies come from.
        step: called with each layer's id before it is looked at.
    Raises:
        StoreError: the repair could not begin.
    """
    done = RepairReport()
    with store.single_flight("repair"):
        for kind, subject in report.counts:
            if kind != LAYER or _is_of_its_row(report, subject):
                done.left.append((f"{kind} {subject}", "metadata is not repaired"))
                continue
            if step is not None:
                step(subject)
            try:
                _repair_layer(store, done, subject, fetch, report.read_data)
            except WorldforkError as error:
                done.left.append((f"{kind} {subject}", error.message))
    with suppress(WorldforkError):  # copies that were none; what stays is removed by whoever sweeps next
        store.empty_trash()
    return done


def _is_of_its_row(report: CheckReport, layer_id: str) -> bool:
    mine = [one.path for one in report.findings if (one.kind, one.subject) == (LAYER, layer_id)]
    return bool(mine) and all(path in _OF_ROWS for path in mine)


def _repair_layer(store: Store, done: RepairReport, layer_id: str, fetch: Fetch, read_data: bool) -> None:
    with store.reading(layers=[layer_id], purpose="repair") as lease:
        now = CheckReport()
        check_layer(store, now, layer_id, read_data)
        damaged = {one.path for one in now.findings}
        if now.sound:
            done.notes.append(f"layer {layer_id} is sound by now")
            return
        record = store.layer(layer_id)
        if record.digest is None:
            raise NotFound(f"{layer_id} was not sealed, so nothing says what it held")
        if damaged == {MANIFEST} and _seal_again(store, layer_id):
            done.repaired.append(Repaired(layer_id, "sealed again"))
            return
        done.repaired.append(_from_a_copy(store, done, lease, record, fetch))


def _seal_again(store: Store, layer_id: str) -> bool:
    """Write a manifest anew if the content still has the digest that it was sealed with."""
    store.trash(store.layer_path(layer_id).with_name(MANIFEST))
    fault("repair:manifest_gone")
    try:
        seal(store, layer_id)
    except OutOfSpace:
        raise
    except StoreError:
        return False  # it holds something else, or cannot be read
    return True


def _from_a_copy(store: Store, done: RepairReport, lease: Reading, record: LayerRecord, fetch: Fetch) -> Repaired:
    assert record.digest is not None
    with store.watching_disk() as disk:
        return _from_the_copy(store, done, lease, record, fetch, disk)


def _from_the_copy(
    store: Store, done: RepairReport, lease: Reading, record: LayerRecord, fetch: Fetch, disk: int
) -> Repaired:
    draft = store.begin_layer(form=record.form, size_hint_bytes=record.stored_bytes or 0)
    try:
        fetch(str(record.digest), draft.path, record.form)
        fault("repair:fetched")
        sealed = _proven(draft, record)
        with typed(f"the layer {record.layer_id} cannot be looked at"):
            is_there = store.layer_path(record.layer_id).is_dir()
        if is_there:
            return _replace(store, done, lease, record, (draft, sealed), disk)
        _put_in_place(store, lease, record.layer_id, draft)
        return Repaired(record.layer_id, "put in place")
    finally:
        with suppress(ConfigError):  # it was published
            store.abandon_layer(draft.layer_id)


def _proven(draft: LayerDraft, record: LayerRecord) -> Sealed:
    with typed(f"the manifest of {draft.layer_id} cannot be written"):
        sealed = write_manifest(walk(draft.path, record.form), draft.path.with_name(MANIFEST))
    if sealed.digest != record.digest:
        raise Corrupt(
            f"what was fetched for {record.layer_id} is not what it held",
            expected=record.digest,
            actual=sealed.digest,
            layer_id=record.layer_id,
        )
    return sealed


def _put_in_place(store: Store, lease: Reading, layer_id: str, draft: LayerDraft) -> None:
    """Give a layer back the content that it lost; nobody can have it mounted."""
    place = store.layer_path(layer_id).parent
    with typed(f"the content of {layer_id} cannot be put in place"):
        sync_directory(store.home.layers, syncfs)
        lease.check()
        place.mkdir(mode=0o700, exist_ok=True)
        os.replace(draft.path.with_name(MANIFEST), place / MANIFEST)
        fault("repair:manifest_placed")
        if os.path.lexists(place / CONTENT):
            store.trash(place / CONTENT)
        os.rename(draft.path, place / CONTENT)
        fault("repair:placed")
        for directory in (place, store.home.layers):
            sync_directory(directory)


def _replace(
    store: Store,
    done: RepairReport,
    lease: Reading,
    record: LayerRecord,
    copy: tuple[LayerDraft, Sealed],
    disk: int,
) -> Repaired:
    """Let all durable snapshots stand on the copy, so that live sandboxes go on with what they have mounted."""
    old, (draft, sealed) = record.layer_id, copy
    # Only these can be put onto another layer.
    store.make_all_durable(_users(store, old, "state != 'durable'"))
    # Who shares equal layers prefers the oldest, which is the damaged one until its digest is taken back.
    with store.single_flight("upkeep"):
        store.publish_merge(lease, draft.layer_id, covers=record.covers, level=record.level)
        store.sealed(draft.layer_id, sealed)
        fault("repair:published")
        store.make_layers_durable([draft.layer_id], [disk])
        count = store.rewrite((old,), (draft.layer_id,))
        fault("repair:rewritten")
        users = _users(store, old)
        if not users:
            _take_back_digest(store, old)
    if users:
        done.left.append((f"layer {old}", f"these still stand on it; repair again: {', '.join(users)}"))
    _note_holders(store, done, old)
    return Repaired(old, "replaced", draft.layer_id, count)


def _users(store: Store, layer_id: str, condition: str = "true") -> list[str]:
    """Return the snapshots that stand on a layer, whatever else their records are like."""
    with store.database.read() as db:
        query = f"SELECT snapshot_id FROM snapshots WHERE {condition} AND instr(record, ?) > 0 ORDER BY number"
        return [row[0] for row in db.execute(query, (f'"{layer_id}"',)).fetchall()]


def _take_back_digest(store: Store, layer_id: str) -> None:
    with store.database.write_lasting() as db:
        db.execute(
            "UPDATE layers SET digest = NULL, entries = NULL, logical_bytes = NULL, stored_bytes = NULL,"
            " covers = NULL, level = 0 WHERE layer_id = ?",
            (layer_id,),
        )
    fault("repair:forgotten")


def _note_holders(store: Store, done: RepairReport, layer_id: str) -> None:
    held = [one.holder_id for one in store.holders() if layer_id in one.layers and one.kind != READING]
    if held:
        done.notes.append(f"{', '.join(held)} go on with the damaged layer {layer_id} until they end")
