"""What the store takes on disk, what for, and what of it nothing uses any more."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from worldfork.content.ids import with_ids
from worldfork.core.errors import OutOfSpace, StoreError, WorldforkError
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.store import Store

_NOTED_AT_ONCE = 64
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own is


class Size(NamedTuple):
    """Of a tree of files."""

    logical_bytes: int
    """What its files hold, holes included."""
    stored_bytes: int
    """What it takes on disk."""


@dataclass(frozen=True)
class SnapshotUsage:
    """What one snapshot takes. Layers that nobody has measured yet count as nothing, and are counted."""

    snapshot_id: str
    logical_bytes: int
    """What the files of its layers hold: what a copy of it would take, less what its layers hide of each other."""
    stored_bytes: int
    """What its layers take on disk."""
    own_bytes: int
    """What of that no other snapshot shares."""
    unmeasured_layers: int
    memory_bytes: int = 0
    """What its memory takes on disk that no earlier snapshot has; in none of the figures above."""


@dataclass(frozen=True)
class Reclaimable:
    """What is on disk and of no use: `prune`, without any rule, or `sweep` removes it."""

    unused_bytes: int
    """Of layers that no snapshot and nobody alive or dead uses."""
    trash_bytes: int
    """On its way out already."""
    dead_draft_bytes: int
    """Of layers whose maker died or stands still."""
    memory_bytes: int = 0
    """Of memory whose snapshot is gone, or was never published."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.unused_bytes + self.trash_bytes + self.dead_draft_bytes + self.memory_bytes


@dataclass(frozen=True)
class Usage:
    """What a store takes. Layers that nobody has measured yet count as nothing, and are counted."""

    snapshots: tuple[SnapshotUsage, ...]
    """In order of publication."""
    layers: int
    """How many layers are in use."""
    logical_bytes: int
    """What all snapshots would take if each were kept whole."""
    stored_bytes: int
    """What all layers in use take on disk, each counted once."""
    shared_bytes: int
    """What of that more than one snapshot uses."""
    held_bytes: int
    """What of that no snapshot uses, but a sandbox or a reader."""
    reclaimable: Reclaimable
    unmeasured_layers: int
    """How many of the layers, used or not, have no known size; they are measured when they are sealed."""
    ballast_bytes: int
    """Kept back by the store so that deletion works on a full disk."""
    free_bytes: int
    """Free on the disk of the layers, for whoever this process is."""
    memory_bytes: int = 0
    """What the memory of snapshots takes on disk, files of several counted once; not in `stored_bytes`."""


def usage(store: Store, *, measure: bool = False) -> Usage:
    """Add up what is known. Reads the metadata alone, but for the trash and what dead makers left.

    Args:
        measure: look at the layers that nobody has measured yet, too. Takes as long as walking their trees.
    Raises:
        StoreError: the metadata failed.
    """
    known = measure_layers(store) if measure else {}
    with store.database.view() as db:
        found = _add_up(db, known)
        drafts = db.execute("SELECT layer_id, owner_id, renewed_s FROM layers WHERE state = 'building'").fetchall()
    dead_draft_bytes = 0
    for layer_id, owner_id, renewed_s in drafts:
        if layer_id not in found.held and not store.is_going(owner_id, renewed_s):
            dead_draft_bytes += _stored_bytes(store.home.layers / layer_id)
    with typed("the free space cannot be looked at"):
        status = os.statvfs(store.home.layers)
    stored = {layer_id: size.stored_bytes for layer_id, size in found.sizes.items()}
    used = found.counts.keys() | (found.held & stored.keys())
    memories = store.memory_bytes()
    return Usage(
        snapshots=tuple(
            dataclasses.replace(one, memory_bytes=memories.kept.get(one.snapshot_id, 0)) for one in found.shares(stored)
        ),
        layers=len(used),
        logical_bytes=sum(share.logical_bytes for share in found.snapshots),
        stored_bytes=sum(stored.get(layer_id, 0) for layer_id in used),
        shared_bytes=sum(stored.get(layer_id, 0) for layer_id, count in found.counts.items() if count > 1),
        held_bytes=sum(stored.get(layer_id, 0) for layer_id in used - found.counts.keys()),
        reclaimable=Reclaimable(
            unused_bytes=sum(size for layer_id, size in stored.items() if layer_id not in used),
            trash_bytes=_stored_bytes(store.home.trash),
            dead_draft_bytes=dead_draft_bytes,
            memory_bytes=memories.stray_bytes,
        ),
        memory_bytes=memories.kept_bytes,
        unmeasured_layers=found.unmeasured_layers,
        ballast_bytes=_stored_bytes(store.home.scratch / "ballast"),
        free_bytes=status.f_bavail * status.f_frsize,
    )


class _Sums:
    """What one look at the metadata gives."""

    def __init__(self, sizes: dict[str, Size], unmeasured_layers: int) -> None:
        self.sizes = sizes
        self.unmeasured_layers = unmeasured_layers
        self.snapshots: list[SnapshotUsage] = []
        self.counts: Counter[str] = Counter()
        """How many snapshots use a layer."""
        self.held: set[str] = set()
        """Layers that holders list."""
        self._user: dict[str, str] = {}

    def add(self, snapshot_id: str, layers: list[str]) -> None:
        """Count one snapshot."""
        sizes = [self.sizes[layer_id] for layer_id in layers if layer_id in self.sizes]
        logical, stored = (sum(size[column] for size in sizes) for column in (0, 1))
        self.snapshots.append(SnapshotUsage(snapshot_id, logical, stored, 0, len(layers) - len(sizes)))
        self.counts.update(layers)
        self._user.update(dict.fromkeys(layers, snapshot_id))

    def shares(self, stored: Mapping[str, int]) -> list[SnapshotUsage]:
        """Return the snapshots with what each has for itself."""
        own: Counter[str] = Counter()
        for layer_id, count in self.counts.items():
            if count == 1:
                own[self._user[layer_id]] += stored.get(layer_id, 0)
        return [dataclasses.replace(one, own_bytes=own[one.snapshot_id]) for one in self.snapshots]


def _add_up(db: sqlite3.Connection, measured: Mapping[str, Size]) -> _Sums:
    sizes, unmeasured_layers = {}, 0
    rows = db.execute("SELECT layer_id, logical_bytes, stored_bytes FROM layers WHERE state != 'building'")
    for layer_id, logical_bytes, stored_bytes in rows:
        if stored_bytes is not None:
            sizes[layer_id] = Size(logical_bytes or 0, stored_bytes)
        elif layer_id in measured:
            sizes[layer_id] = measured[layer_id]
        else:
            unmeasured_layers += 1
    found = _Sums(sizes, unmeasured_layers)
    for snapshot_id, text in db.execute(
        "SELECT snapshot_id, json_extract(record, '$.layers') FROM snapshots ORDER BY number"
    ):
        found.add(snapshot_id, json.loads(text or "[]"))
    found.held = {row[0] for row in db.execute("SELECT DISTINCT value FROM holders, json_each(holders.layers)")}
    return found


def measure_layers(store: Store) -> dict[str, Size]:
    """Walk the layers that nobody has measured yet, and write their sizes down; return those sizes.

    Sealing a layer measures it too. One that vanishes meanwhile, or is closed to this user, is left out.

    Raises:
        StoreError: the metadata cannot be read.
    """
    with store.database.read() as db:
        rows = db.execute(
            "SELECT layer_id FROM layers WHERE state IN ('ready', 'durable') AND stored_bytes IS NULL ORDER BY layer_id"
        ).fetchall()
    found: dict[str, Size] = {}
    noted: list[tuple[int, int, str]] = []
    for (layer_id,) in rows:
        place = store.layer_path(layer_id)
        try:
            size = with_ids([place], tree_size, place)
        except WorldforkError:
            size = None  # of a range of ids that this user has not got
        if size is not None:
            found[layer_id] = size
            noted.append((*size, layer_id))
        if len(noted) == _NOTED_AT_ONCE:
            _note(store, noted)
            noted = []
    _note(store, noted)
    return found


def _note(store: Store, sizes: list[tuple[int, int, str]]) -> None:
    if not sizes:
        return
    try:
        with store.database.write() as db:
            db.executemany(
                "UPDATE layers SET logical_bytes = ?, stored_bytes = ? WHERE layer_id = ? AND stored_bytes IS NULL",
                sizes,
            )
        fault("measure:written")
    except (StoreError, OutOfSpace):
        pass  # whoever asks next measures again; a look at a full disk must not fail for it


def tree_size(top: Path) -> Size | None:
    """Return the size of a tree that nobody writes to, hard links counted once; None where it cannot be walked."""
    logical_bytes = stored_bytes = 0
    linked: set[int] = set()
    waiting: list[str] = []

    def count(info: os.stat_result, path: str) -> None:
        nonlocal logical_bytes, stored_bytes
        if stat.S_ISDIR(info.st_mode):
            waiting.append(path)
        elif info.st_nlink > 1:
            if info.st_ino in linked:
                return
            linked.add(info.st_ino)
        if stat.S_ISREG(info.st_mode):
            logical_bytes += info.st_size
        stored_bytes += info.st_blocks * _BLOCK_BYTES

    try:
        count(os.lstat(top), str(top))
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count(entry.stat(follow_symlinks=False), entry.path)
    except OSError:
        return None
    return Size(logical_bytes, stored_bytes)


def _stored_bytes(path: Path) -> int:
    """Return what a file or a tree takes on disk, without the directory itself; what vanishes meanwhile is nothing."""
    try:
        if not path.is_dir():
            return os.lstat(path).st_blocks * _BLOCK_BYTES
        sizes = [tree_size(path / name) for name in os.listdir(path)]
    except OSError:
        return 0
    return sum(size.stored_bytes for size in sizes if size is not None)
