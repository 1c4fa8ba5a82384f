"""Squash: runs of layers of deep chains are merged into one layer each, and snapshots come to stand on that.

Merges begin at the bottom of a stack and always take the same number, so that all snapshots of a chain share them:
32 layers make one of level 1, then 16 of a level one of the next. A layer that is large is not written once more; it
ends a run. So is the lowest of a stack, which holds what its base lacks: over nothing a deletion would show.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from worldfork.content.ids import widest, with_ids
from worldfork.core.errors import NotFound, WorldforkError
from worldfork.records.snapshot import LayerRecord
from worldfork.store.faultpoints import fault
from worldfork.store.readings import Reading
from worldfork.store.snapshots import exchanged
from worldfork.store.store import Store

DEEP = 64
"""Layers of a snapshot up to which nothing is merged."""
LARGE_BYTES = 64 << 20
"""A layer that takes more than this is not merged in the background."""
HUGE_BYTES = 1 << 30
"""A layer that takes more than this is not merged while somebody waits, as long as there is another way."""
_FIRST = 32
_FURTHER = 16
_USABLE = ("ready", "durable", "condemned")
"""States of merges that can be put to use again, if the claim is in time."""


class Run(NamedTuple):
    """Layers to be merged."""

    layers: tuple[str, ...]
    """Their ids, top first."""
    level: int
    """Of the merge."""


@dataclass
class SquashReport:
    """What `squash_deep` has done."""

    merged: list[str] = field(default_factory=list)
    """Ids of new layers that stand for many."""
    reused: list[str] = field(default_factory=list)
    """Ids of merges that were there already."""
    snapshots: int = 0
    """How often a snapshot was put onto a merge."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """The topmost layers of runs that could not be merged, and why; the next time tries again."""


def plan(stack: Sequence[str], known: Mapping[str, LayerRecord]) -> list[Run]:
    """Return which runs of a stack to merge in the background, the lowest first.

    Args:
        stack: ids of the layers of one snapshot, top first.
        known: what is known of layers. One that is not in it, or whose size is not known, is left alone.
    """
    return _runs(stack, known, unknown_bytes=None) if len(stack) > DEEP else []


def _runs(stack: Sequence[str], known: Mapping[str, LayerRecord], *, unknown_bytes: int | None) -> list[Run]:
    runs: list[Run] = []
    for neighbours in _neighbours(stack, known, LARGE_BYTES, unknown_bytes=unknown_bytes):
        gathered: list[str] = []
        level = 0
        for layer_id in neighbours:
            if known[layer_id].level != level:
                gathered, level = [], known[layer_id].level
            gathered.append(layer_id)
            if len(gathered) == (_FIRST if level == 0 else _FURTHER):
                runs.append(Run(tuple(reversed(gathered)), level + 1))
                gathered = []
    return runs


def _neighbours(
    stack: Sequence[str], known: Mapping[str, LayerRecord], most_bytes: float, *, unknown_bytes: int | None
) -> Iterator[list[str]]:
    """Yield what lies between layers that are not to be merged: ids from the bottom up, the lowest group first.

    Args:
        stack: top first; its lowest layer is never yielded.
        known: what is known of layers; those that are not in it are not to be merged.
        most_bytes: nor is one that takes more.
        unknown_bytes: what counts as the size of one that has not been measured; None leaves it alone.
    """
    group: list[str] = []
    for layer_id in reversed(stack[:-1]):
        record = known.get(layer_id)
        size_bytes = unknown_bytes if record is None else _size_bytes(record, unknown_bytes)
        if record is not None and size_bytes is not None and size_bytes <= most_bytes:
            group.append(layer_id)
            continue
        yield group
        group = []
    yield group


def _size_bytes(record: LayerRecord, unknown_bytes: int | None = 0) -> int | None:
    for size_bytes in (record.stored_bytes, record.size_bytes):
        if size_bytes is not None:
            return size_bytes
    return unknown_bytes


def squash_deep(store: Store) -> SquashReport:
    """Merge what is deep enough of all durable snapshots, and let them stand on the merges. Slow.

    Ids of snapshots stay, and nobody who lives on the old layers notices. Safe to be killed at any instant: a merge
    that no snapshot uses yet is found again by the next squash, or collected.

    Raises:
        StoreError: the metadata cannot be read.
    """
    report = SquashReport()
    tried: set[tuple[str, ...]] = set()
    while True:
        waiting = [run for run in _planned(store) if run.layers not in tried]
        if not waiting:
            return report
        for run in waiting:
            tried.add(run.layers)
            try:
                _squash(store, run, report)
            except NotFound:
                continue  # its snapshots were deleted meanwhile, and its layers collected
            except WorldforkError as error:
                report.failures.append((run.layers[0], str(error)))


def _planned(store: Store) -> list[Run]:
    known = {record.layer_id: record for record in store.layers_known() if record.state == "durable"}
    stacks = {record.layers for record in store.snapshots() if record.state == "durable" and len(record.layers) > DEEP}
    runs = dict.fromkeys(run for stack in sorted(stacks, key=len) for run in plan(stack, known))
    return list(runs)


def _squash(store: Store, run: Run, report: SquashReport) -> None:
    with store.reading(layers=run.layers, purpose="squash") as lease, store.watching_disk() as disk:
        merged = _existing(store, lease, run.layers)
        if merged is None:
            merged = _merge(store, lease, run)
            report.merged.append(merged)
        else:
            report.reused.append(merged)
        fault("squash:published")
        store.make_layers_durable([merged], [disk])
        fault("squash:durable")
        lease.check()
        report.snapshots += store.rewrite(run.layers, (merged,))
        fault("squash:rewritten")


def shortest(store: Store, layers: Sequence[str]) -> tuple[str, ...]:
    """Return a stack with merges in the place of the runs that they cover; the same one where there is none.

    Only merges that survive a crash of the machine. Quick enough for a checkpoint to wait for.

    Raises:
        StoreError: the metadata cannot be read.
    """
    return _shortened(tuple(layers), _merges(store, layers, ("durable",)))


def squash_now(store: Store, layers: Sequence[str], at_most: int) -> tuple[str, ...]:
    """Return at most so many layers that show what these show; merges are made now where there are none. Slow.

    The new ones are ready, not durable, and nobody holds them when this returns: hold them at once.

    Args:
        store: whose.
        layers: ids, top first; at most two of them have to stay.
        at_most: what is asked for. Where large layers stand in the way they are merged too, the largest last.
    Raises:
        NotFound: a layer does not exist.
        OutOfSpace, StoreError: a merge could not be made.
    """
    present = tuple(layers)
    with store.reading(layers=present, purpose="squash") as lease:
        while True:
            shorter = _shortened(present, _claimed(lease, _merges(store, present, _USABLE)))
            if len(shorter) <= at_most:
                return shorter
            run = _next_run(shorter, {layer_id: store.layer(layer_id) for layer_id in shorter})
            if run is None:
                return shorter
            present = exchanged(shorter, run.layers, (_merge(store, lease, run),))
            fault("squash_now:merged")


def _next_run(stack: tuple[str, ...], known: Mapping[str, LayerRecord]) -> Run | None:
    """Return what to merge first when somebody waits; None if nothing is left to be merged."""
    # The same runs as in the background, which then finds them done.
    runs = _runs(stack, known, unknown_bytes=0)
    if runs:
        return runs[0]
    for most_bytes in (LARGE_BYTES, HUGE_BYTES, float("inf")):
        longest = max(_neighbours(stack, known, most_bytes, unknown_bytes=0), key=len)
        if len(longest) > 1:
            return Run(tuple(reversed(longest)), max(known[layer_id].level for layer_id in longest) + 1)
    return None


def _shortened(stack: tuple[str, ...], merges: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Put merges into a stack, as long as any fits: one may cover others."""
    while True:
        before = stack
        for layer_id, covers in merges.items():
            stack = exchanged(stack, covers, (layer_id,))
        if stack == before:
            return stack


def _merges(store: Store, layers: Sequence[str], states: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the merges that may stand for runs of a stack, and what each covers; what covers most comes first."""
    found: dict[str, tuple[str, ...]] = {}
    tops = set(layers)
    with store.database.read() as db:
        while tops:
            rows = db.execute(
                "SELECT layer_id, covers FROM layers WHERE covers IS NOT NULL"
                " AND json_extract(covers, '$[0]') IN (SELECT value FROM json_each(?))"
                " AND state IN (SELECT value FROM json_each(?))",
                (json.dumps(list(tops)), json.dumps(list(states))),
            ).fetchall()
            tops = {row[0] for row in rows} - found.keys()  # a merge of merges begins with one of them
            found |= {layer_id: tuple(json.loads(covers)) for layer_id, covers in rows}
    return dict(sorted(found.items(), key=lambda merge: (-len(merge[1]), merge[0])))


def _claimed(lease: Reading, merges: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    held = lease.claim(merges) if merges else set()
    return {layer_id: covers for layer_id, covers in merges.items() if layer_id in held}


def _existing(store: Store, lease: Reading, run: tuple[str, ...]) -> str | None:
    """Return a merge of these very layers, held by the lease; None if there is none."""
    merges = {layer_id: covers for layer_id, covers in _merges(store, run[:1], _USABLE).items() if covers == run}
    return next(iter(_claimed(lease, merges)), None)


def _merge(store: Store, lease: Reading, run: Run) -> str:
    """Make a merge and publish it; it is held by the lease and not durable yet."""
    from worldfork.content.merge import merge_layers

    records = [store.layer(layer_id) for layer_id in run.layers]
    form = records[0].form
    paths = [store.layer_path(layer_id) for layer_id in run.layers]
    size_bytes = sum(_size_bytes(record) or 0 for record in records)
    draft = store.begin_layer(form=form, size_hint_bytes=size_bytes, ids=widest(paths))
    fault("squash:begun")
    try:
        with_ids(paths, merge_layers, paths, draft.path, form)
        fault("squash:merged")
        store.publish_merge(lease, draft.layer_id, covers=run.layers, level=run.level)
    except BaseException:
        with suppress(WorldforkError):
            store.abandon_layer(draft.layer_id)
        raise
    return draft.layer_id
