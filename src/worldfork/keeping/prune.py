"""Deleting snapshots by rules, while forks and checkpoints go on.

Snapshots go a few at a time, each few in a transaction that looks once more at who uses them and who has named them
since. Whatever moment this is stopped at, what is left is whole, and the next run goes on from there.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from worldfork.core.errors import WorldforkError
from worldfork.keeping.keep_rules import KeepRules, ancestors_of, by_snapshot, choose
from worldfork.keeping.usage import measure_layers
from worldfork.store.faultpoints import fault
from worldfork.store.memory import going_bytes
from worldfork.store.owner import frees_space
from worldfork.store.store import Store

_AT_ONCE = 16
"""Snapshots of one transaction. A fork waits for it, and sixteen take a fraction of a millisecond."""
_FAILURES_IN_A_ROW = 3
"""After so many the metadata is given up; what can be collected still is."""


@dataclass
class PruneReport:
    """What a prune has done, or with `dry_run` would do."""

    dry_run: bool
    kept: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Ids of the snapshots that stay, in order of publication, and why."""
    in_use: dict[str, list[str]] = field(default_factory=dict)
    """Ids of the snapshots that stay only because sandboxes use them, and the ids of those."""
    deleted: list[str] = field(default_factory=list)
    """Ids of the snapshots that are gone."""
    layers: list[str] = field(default_factory=list)
    """Ids of the layers that went with them, and of those that nothing used before."""
    freed_bytes: int = 0
    """What these layers took on disk, each counted once."""
    unmeasured_layers: int = 0
    """How many of them are not in `freed_bytes`, since nobody has measured them."""
    memory_bytes: int = 0
    """What went besides of the memory of these snapshots; files that another one has stay."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """What could not be removed, and why; the next prune tries again."""


def prune(store: Store, rules: KeepRules, *, dry_run: bool = False, measure: bool = False) -> PruneReport:
    """Delete the snapshots that no rule keeps and no living sandbox uses; then remove what nothing uses any more.

    Without a rule it removes what nothing uses, and no snapshot. Safe beside any number of writers, and to be killed at
    any instant.

    Args:
        rules: what is to stay.
        dry_run: change nothing, and tell what would be done.
        measure: walk layers that have not been measured yet, so that `freed_bytes` holds all.
    Raises:
        StoreError: the metadata cannot be read; nothing was done.
    """
    if measure:
        measure_layers(store)
    plan = _Plan(store, rules)
    report = PruneReport(dry_run, kept=dict(plan.kept), in_use=dict(plan.in_use))
    fault("prune:planned")
    if dry_run:
        report.deleted = list(plan.going)
        report.memory_bytes = going_bytes(plan.memories.values())
        _tell(report, plan.unused, plan.sizes)
        return report
    # Children first, where a child that has come to be kept keeps its parents; else the oldest first.
    done = delete_all(store, plan.going[::-1] if rules.ancestors else plan.going, plan.spared)
    report.deleted, report.failures = done.deleted, done.failures
    report.in_use.update(done.in_use)
    report.kept.update({snapshot_id: (why,) for snapshot_id, why in done.spared.items()})
    report.memory_bytes = going_bytes(plan.memories.get(one, ()) for one in done.deleted)
    _collect(store, plan, report)
    return report


class _Plan:
    """One look at the store: what goes and what that frees. It grows with the number of snapshots, not their depth."""

    def __init__(self, store: Store, rules: KeepRules) -> None:
        self.rules = rules
        with store.database.view() as db:
            records = [_Candidate(*row) for row in db.execute(_CANDIDATES)]
            names = dict(db.execute("SELECT name, snapshot_id FROM names").fetchall())
            self.seen: int = max((record.number for record in records), default=0)
            self.parents = {record.snapshot_id: record.parent_id for record in records}
            self.kept, dropped = choose(records, names, rules, store._clock.now_s())
            self.in_use = living_users(store, db, dropped)
            self.going = [snapshot_id for snapshot_id in dropped if snapshot_id not in self.in_use]
            self.unused, self.sizes = _unused(db, set(self.going))
        self.memories = store.memory_files(self.going)
        self._late: dict[str, str] = {}
        """Ancestors of what has come to be kept since."""

    def spared(self, db: sqlite3.Connection, chunk: Sequence[str]) -> dict[str, str]:
        """Return those of a chunk that the rules keep after all, by what has happened since; and why.

        With `ancestors`, children have to come before their parents.
        """
        found: dict[str, str] = {}
        for snapshot_id, names in named_among(db, chunk).items():
            name = self.rules.keeping_name(names)
            if name is not None:
                found[snapshot_id] = f"named {name}"
        if self.rules.ancestors:
            for number, snapshot_id, parent_id in db.execute(_PARENTS_AFTER, (self.seen,)):
                self.seen = number
                self.parents[snapshot_id] = parent_id
                self._late.update(ancestors_of([snapshot_id], self.parents))
            self._late.update(ancestors_of(found, self.parents))
            for snapshot_id in chunk:
                if snapshot_id in self._late:
                    found.setdefault(snapshot_id, f"ancestor of {self._late[snapshot_id]}")
        return found


class _Candidate(NamedTuple):
    """What the rules need of a snapshot; a whole record grows with the depth of its chain."""

    number: int
    snapshot_id: str
    created_s: float
    parent_id: str | None
    label: str | None


_CANDIDATES = (
    "SELECT number, snapshot_id, created_s, json_extract(record, '$.parent_id'), json_extract(record, '$.label')"
    " FROM snapshots ORDER BY number"
)
_PARENTS_AFTER = (
    "SELECT number, snapshot_id, json_extract(record, '$.parent_id') FROM snapshots WHERE number > ? ORDER BY number"
)
_RESTING = (
    "SELECT snapshot_id, json_extract(record, '$.facts.suspended.sandbox_id') AS resting FROM snapshots"
    " WHERE instr(record, '\"suspended\":') > 0 AND resting IS NOT NULL"
    " AND snapshot_id IN (SELECT value FROM json_each(?))"
)
_LAYERS = "SELECT snapshot_id, json_extract(record, '$.layers') FROM snapshots ORDER BY number"


def living_users(store: Store, db: sqlite3.Connection, snapshot_ids: Iterable[str]) -> dict[str, list[str]]:
    """Return which of these snapshots living sandboxes use, or suspended ones rest in, and who they are.

    Within a transaction.
    """
    asked = json.dumps(list(snapshot_ids))
    rows = db.execute(
        "SELECT DISTINCT snapshot_id FROM holders WHERE snapshot_id IN (SELECT value FROM json_each(?))", (asked,)
    ).fetchall()
    users = {row[0]: store._living(db, "snapshot_id = ?", row) for row in rows}
    for snapshot_id, sandbox_id in db.execute(_RESTING, (asked,)):
        users.setdefault(snapshot_id, []).append(sandbox_id)
    return {snapshot_id: sandboxes for snapshot_id, sandboxes in users.items() if sandboxes}


def named_among(db: sqlite3.Connection, snapshot_ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the names of those of these snapshots that have any, within a transaction."""
    rows = db.execute(
        "SELECT name, snapshot_id FROM names WHERE snapshot_id IN (SELECT value FROM json_each(?))",
        (json.dumps(snapshot_ids),),
    ).fetchall()
    return by_snapshot(dict(rows))


def _unused(db: sqlite3.Connection, without: set[str]) -> tuple[list[str], dict[str, int | None]]:
    """Return the layers that nothing uses once some snapshots are gone, and what each takes if that is known."""
    used = {row[0] for row in db.execute("SELECT DISTINCT value FROM holders, json_each(holders.layers)")}
    for snapshot_id, text in db.execute(_LAYERS):
        if snapshot_id not in without:
            used.update(json.loads(text or "[]"))
    rows = db.execute("SELECT layer_id, stored_bytes FROM layers WHERE state != 'building' ORDER BY layer_id")
    sizes = {layer_id: stored_bytes for layer_id, stored_bytes in rows if layer_id not in used}
    return list(sizes), sizes


def _tell(report: PruneReport, layers: Iterable[str], sizes: dict[str, int | None]) -> None:
    report.layers = sorted(layers)
    known = [size for layer_id in report.layers if (size := sizes.get(layer_id)) is not None]
    report.freed_bytes = sum(known)
    report.unmeasured_layers = len(report.layers) - len(known)


Spared = Callable[[sqlite3.Connection, Sequence[str]], dict[str, str]]
"""Says, within a transaction, which of a few snapshots must not go after all, and why."""


@dataclass
class Deletion:
    """What became of snapshots that were to go."""

    deleted: list[str] = field(default_factory=list)
    """Those that this process has deleted; what another one had deleted before is not among them."""
    in_use: dict[str, list[str]] = field(default_factory=dict)
    """Those that living sandboxes have come to use, and who they are."""
    spared: dict[str, str] = field(default_factory=dict)
    """Those that must not go after all, and why."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """Those that the metadata failed for."""


def delete_all(store: Store, snapshot_ids: Sequence[str], spared: Spared) -> Deletion:
    """Delete snapshots, a few at a time, in this order; those that living sandboxes use stay. Raises nothing typed."""
    done = Deletion()
    in_a_row = 0
    for start in range(0, len(snapshot_ids), _AT_ONCE):
        chunk = snapshot_ids[start : start + _AT_ONCE]
        if in_a_row == _FAILURES_IN_A_ROW:
            done.failures += [(snapshot_id, "the metadata failed before its turn came") for snapshot_id in chunk]
            continue
        try:
            some = _delete_some(store, chunk, spared)
        except WorldforkError as error:
            in_a_row += 1
            done.failures += [(snapshot_id, str(error)) for snapshot_id in chunk]
        else:
            in_a_row = 0
            done.deleted += some.deleted
            done.in_use.update(some.in_use)
            done.spared.update(some.spared)
    return done


@frees_space
def _delete_some(store: Store, chunk: Sequence[str], spared: Spared) -> Deletion:
    """Delete a few snapshots in one transaction, but those that somebody has come to need."""
    asked = json.dumps(chunk)
    with store.database.write() as db:
        rows = db.execute(
            "SELECT snapshot_id FROM snapshots WHERE snapshot_id IN (SELECT value FROM json_each(?))", (asked,)
        ).fetchall()
        there = {row[0] for row in rows}
        left = [snapshot_id for snapshot_id in chunk if snapshot_id in there]
        wanted = spared(db, left)
        left = [snapshot_id for snapshot_id in left if snapshot_id not in wanted]
        in_use = living_users(store, db, left)
        deleted = [snapshot_id for snapshot_id in left if snapshot_id not in in_use]
        db.executemany("DELETE FROM snapshots WHERE snapshot_id = ?", [(snapshot_id,) for snapshot_id in deleted])
        fault("prune:written")
    fault("prune:committed")
    return Deletion(deleted, in_use, wanted)


def _collect(store: Store, plan: _Plan, report: PruneReport) -> None:
    collected: list[str] = []
    try:
        found = store.collect()
    except WorldforkError as error:
        report.failures.append(("collect", str(error)))
    else:
        collected = found.layers
        report.failures += found.failures
    fault("prune:collected")
    # Another process may have collected some of them before this one came to it.
    with store.database.read() as db:
        left = {row[0] for row in db.execute("SELECT layer_id FROM layers")}
    _tell(report, {*collected, *(layer_id for layer_id in plan.unused if layer_id not in left)}, plan.sizes)
