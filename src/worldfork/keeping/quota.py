"""Keeping what layers and memory take within a quota: throw-away snapshots go, and nothing else ever does."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from worldfork.core.errors import WorldforkError
from worldfork.keeping.prune import delete_all, living_users, named_among
from worldfork.keeping.usage import Size, measure_layers
from worldfork.records.snapshot import SnapshotLevel
from worldfork.store.faultpoints import fault
from worldfork.store.store import Store

_SETTLED = "state IN ('ready', 'durable')"
_FRESH_S = 1.0
_known: WeakKeyDictionary[Store, tuple[float, int]] = WeakKeyDictionary()
"""When this process added up last, on the monotonic clock, and what it found."""


@dataclass
class QuotaReport:
    """What was done for the quota."""

    over_bytes: int = 0
    """By how much it is still exceeded: nothing more can go by itself."""
    deleted: list[str] = field(default_factory=list)
    """Ids of the throw-away snapshots that are gone."""
    layers: list[str] = field(default_factory=list)
    """Ids of the layers that are gone."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """What could not be removed, and why."""


def over_quota(store: Store, quota_bytes: int) -> int:
    """Return by how many bytes layers and memory exceed the quota: 0 if they do not, or there is none (0).

    For the path of a checkpoint: what was within the quota is taken to be so for a second, since adding up ten thousand
    layers takes longer than a checkpoint. Layers count once they have been measured, which sealing them does.

    Raises:
        StoreError: the metadata cannot be read.
    """
    if quota_bytes <= 0:
        return 0
    now_s = store._clock.monotonic_s()
    added_up_s, stored_bytes = _known.get(store, (-_FRESH_S, 0))
    if now_s - added_up_s >= _FRESH_S or stored_bytes > quota_bytes:
        with store.database.read() as db:
            row = db.execute(f"SELECT ifnull(sum(stored_bytes), 0) FROM layers WHERE {_SETTLED}").fetchone()
        stored_bytes = int(row[0]) + store.memory_bytes().kept_bytes
        _known[store] = (now_s, stored_bytes)
    return max(0, stored_bytes - quota_bytes)


def enforce_quota(store: Store, quota_bytes: int) -> QuotaReport:
    """Where layers and memory exceed the quota, remove unused ones, and then throw-away snapshots, the oldest first.

    Those with a name or a living sandbox stay, as do all of another level. Measures layers, so it takes long. Safe
    beside any number of writers, and to be killed at any instant.

    Args:
        quota_bytes: what the layers may take on disk; 0 is no limit.
    Raises:
        StoreError: the metadata cannot be read.
    """
    report = QuotaReport()
    if quota_bytes <= 0:
        return report
    # On a full disk they may not have been written down.
    measured = measure_layers(store)
    report.over_bytes = _over(store, quota_bytes, measured)
    if report.over_bytes:
        _collect(store, report)
        report.over_bytes = _over(store, quota_bytes, measured)
    if report.over_bytes:
        with store.database.view() as db:
            going = _going(store, db, _sizes(db, measured), report.over_bytes, store.memory_bytes().kept)
        fault("quota:planned")
        done = delete_all(store, going, _named_since)
        report.deleted = done.deleted
        report.failures += done.failures
        if done.deleted:
            _collect(store, report)
            report.over_bytes = _over(store, quota_bytes, measured)
    return report


def _sizes(db: sqlite3.Connection, measured: Mapping[str, Size]) -> dict[str, int]:
    """Return what each layer takes on disk; nothing where nobody could measure it."""
    found = {}
    for layer_id, stored_bytes in db.execute(f"SELECT layer_id, stored_bytes FROM layers WHERE {_SETTLED}"):
        if stored_bytes is None:
            stored_bytes = measured[layer_id].stored_bytes if layer_id in measured else 0
        found[layer_id] = stored_bytes
    return found


def _over(store: Store, quota_bytes: int, measured: Mapping[str, Size]) -> int:
    with store.database.read() as db:
        layers_bytes = sum(_sizes(db, measured).values())
    return max(0, layers_bytes + store.memory_bytes().kept_bytes - quota_bytes)


def _collect(store: Store, report: QuotaReport) -> None:
    try:
        found = store.collect()
    except WorldforkError as error:
        report.failures.append(("collect", str(error)))
        return
    report.layers += found.layers
    report.failures += found.failures


def _named_since(db: sqlite3.Connection, snapshot_ids: Sequence[str]) -> dict[str, str]:
    return {snapshot_id: f"named {names[0]}" for snapshot_id, names in named_among(db, snapshot_ids).items()}


def _going(
    store: Store,
    db: sqlite3.Connection,
    sizes: Mapping[str, int],
    wanted_bytes: int,
    memories: Mapping[str, int],
) -> list[str]:
    """Return the fewest of the oldest throw-away snapshots that free so much, or all that free anything.

    Args:
        store, db: at one moment.
        sizes: of layers, by id.
        wanted_bytes: to be freed.
        memories: what the memory of a snapshot takes, by its id.
    """
    rows = db.execute(
        "SELECT snapshot_id FROM snapshots WHERE level = ? AND snapshot_id NOT IN (SELECT snapshot_id FROM names)",
        (SnapshotLevel.VOLATILE.value,),
    )
    volatile = [row[0] for row in rows]
    in_use = living_users(store, db, volatile)
    candidates = dict.fromkeys(one for one in volatile if one not in in_use)
    users: Counter[str] = Counter(row[0] for row in db.execute("SELECT value FROM holders, json_each(holders.layers)"))
    others = set(users)
    stacks: dict[str, list[str]] = {}
    for snapshot_id, text in db.execute(
        "SELECT snapshot_id, json_extract(record, '$.layers') FROM snapshots ORDER BY number"
    ):
        layers = json.loads(text or "[]")
        users.update(layers)
        if snapshot_id in candidates:
            stacks[snapshot_id] = layers
        else:
            others.update(layers)
    going, freed_bytes = [], 0
    for snapshot_id, layers in stacks.items():
        if freed_bytes >= wanted_bytes:
            break
        if others.issuperset(layers) and not memories.get(snapshot_id):
            continue  # all that it has stays anyway
        users.subtract(layers)
        freed_bytes += memories.get(snapshot_id, 0)
        freed_bytes += sum(sizes.get(layer_id, 0) for layer_id in layers if users[layer_id] == 0)
        going.append(snapshot_id)
    return going
