"""The lineage of snapshots: which came from which, what each takes, and who stands on it now."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from worldfork.keeping.keep_rules import by_snapshot
from worldfork.store.store import Store

_SNAPSHOTS = """
    SELECT snapshot_id, state, level, exported, created_s, json_extract(record, '$.parent_id'),
        json_extract(record, '$.label'), json_extract(record, '$.layers'), json_extract(record, '$.kind')
    FROM snapshots ORDER BY number
"""


@dataclass(frozen=True)
class Member:
    """One snapshot in the tree."""

    snapshot_id: str
    parent_id: str | None
    depth: int
    """How many of its ancestors are there."""
    parent_is_gone: bool
    """Its parent was deleted, or never was in this store: a root only for that."""
    children: int
    state: str
    """"ready", "durable" or "exported"."""
    level: str
    created_s: float
    """Seconds since the epoch."""
    label: str | None
    names: tuple[str, ...]
    live_forks: int
    """How many living sandboxes started from it."""
    stored_bytes: int | None
    """What its layers take on disk; None where one of them has not been measured."""
    added_bytes: int | None
    """What of that is in layers that its parent does not have."""
    kind: str = "filesystem"
    """Or "memory"; the sizes are those of layers alone."""


class _Row(NamedTuple):
    snapshot_id: str
    state: str
    level: str
    exported: str | None
    created_s: float
    parent_id: str | None
    label: str | None
    layers: str | None
    kind: str | None

    def parsed(self) -> tuple[str, ...]:
        return tuple(json.loads(self.layers or "[]"))


def state_of(state: str, exported: str | None) -> str:
    """Return the one word for how safe a snapshot is: ready (forkable), durable, or exported too."""
    return "exported" if exported else "durable" if state == "durable" else "ready"


def family(store: Store) -> list[Member]:
    """Return all snapshots in the order of the tree: each followed by its children, the oldest of them first.

    Raises:
        StoreError: the metadata or a lock failed.
    """
    with store.database.view() as db:
        rows = {row[0]: _Row(*row) for row in db.execute(_SNAPSHOTS)}
        names = by_snapshot(dict(db.execute("SELECT name, snapshot_id FROM names").fetchall()))
        sizes = dict(db.execute("SELECT layer_id, stored_bytes FROM layers WHERE stored_bytes IS NOT NULL").fetchall())
    forks = _live_forks(store)
    below: dict[str, list[str]] = {}
    roots = []
    for row in rows.values():
        if row.parent_id is not None and row.parent_id in rows:
            below.setdefault(row.parent_id, []).append(row.snapshot_id)
        else:
            roots.append(row.snapshot_id)
    found = []
    for snapshot_id, depth in _in_order(roots, below, rows):
        row = rows[snapshot_id]
        layers = row.parsed()
        parent = rows.get(row.parent_id or "")
        beneath = set(parent.parsed()) if parent is not None else set()
        found.append(
            Member(
                snapshot_id=snapshot_id,
                parent_id=row.parent_id,
                depth=depth,
                parent_is_gone=row.parent_id is not None and parent is None,
                children=len(below.get(snapshot_id, ())),
                state=state_of(row.state, row.exported),
                level=row.level,
                created_s=row.created_s,
                label=row.label,
                names=tuple(names.get(snapshot_id, ())),
                live_forks=forks[snapshot_id],
                stored_bytes=_sum(layers, sizes),
                added_bytes=_sum(tuple(layer for layer in layers if layer not in beneath), sizes),
                kind=row.kind or "filesystem",
            )
        )
    return found


def _live_forks(store: Store) -> Counter[str]:
    found: Counter[str] = Counter()
    for holder in store.holders():
        if holder.snapshot_id is not None and store.is_living(holder):
            found[holder.snapshot_id] += 1
    return found


def _in_order(roots: list[str], below: dict[str, list[str]], rows: dict[str, _Row]) -> Iterator[tuple[str, int]]:
    """Yield ids and depths, parents first; those of a circle, which only a forged import can make, at the end."""
    seen: set[str] = set()
    for start in (roots, rows):
        waiting = [(snapshot_id, 0) for snapshot_id in reversed(list(start)) if snapshot_id not in seen]
        while waiting:
            snapshot_id, depth = waiting.pop()
            if snapshot_id in seen:
                continue
            seen.add(snapshot_id)
            yield snapshot_id, depth
            waiting += [(child, depth + 1) for child in reversed(below.get(snapshot_id, ()))]


def _sum(layers: tuple[str, ...], sizes: dict[str, int]) -> int | None:
    if any(layer_id not in sizes for layer_id in layers):
        return None
    return sum(sizes[layer_id] for layer_id in layers)
