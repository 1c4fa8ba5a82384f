"""Stacks of layers that the kernel takes: not too deep, and shorter where merges stand for some of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from worldfork.core.errors import NotFound
from worldfork.lineage.place import Place
from worldfork.records.snapshot import SnapshotRecord

DEEPEST = 480
"""Layers that a sandbox may stand on: the kernel takes 500, of which a base is one and some are left for copies."""
TRIES = 3
"""How often to look for a stack anew whose merges were collected before anybody held them."""
_WORTH_A_LOOK = 32
"""Layers; with fewer there are no merges."""
_T = TypeVar("_T")


async def on_mountable(place: Place, record: SnapshotRecord, call: Callable[[SnapshotRecord], Awaitable[_T]]) -> _T:
    """Call with a record whose stack the kernel takes, and which holds its layers.

    Once more if the snapshot has come to stand on other layers since it was looked up, or if what stood for them was
    collected before anybody held it.

    Raises:
        NotFound: the snapshot is gone, or a layer of it. Whatever `call` raises.
    """
    present = record
    for left in reversed(range(TRIES)):
        try:
            return await call(await _mountable(place, present))
        except NotFound:
            found = place.store.snapshot(record.snapshot_id)
            if not left or (found.layers == present.layers and len(present.layers) <= DEEPEST):
                raise
            present = found
    raise AssertionError("the last try returns or raises")


async def _mountable(place: Place, record: SnapshotRecord) -> SnapshotRecord:
    """Return a record whose stack the kernel takes; where it is too deep, some of its layers are merged now."""
    if len(record.layers) <= DEEPEST or record.kind == "memory":  # a machine has mounted what it stands on
        return record
    from worldfork.keeping.squash import squash_now

    layers = await place.work(lambda: squash_now(place.store, record.layers, DEEPEST))
    return replace(record, layers=layers)


async def next_layers_of(place: Place, layers: tuple[str, ...]) -> tuple[str, ...]:
    """Return fewer layers of the same content for a sandbox to stand on from now on; none where it is well as it is.

    Merges that upkeep has made are used when they are there; on its own it makes some only where the kernel would not
    take one layer more. Nobody holds them: do it at once.

    Raises:
        NotFound: a merge was collected meanwhile; ask again. OutOfSpace, StoreError: one could not be made.
    """
    if len(layers) < _WORTH_A_LOOK:
        return ()
    from worldfork.keeping.squash import shortest, squash_now

    fewer = place.quick(lambda: shortest(place.store, layers))
    if len(fewer) >= DEEPEST:
        fewer = await place.work(lambda: squash_now(place.store, fewer, DEEPEST // 2))
    return () if fewer == layers else fewer
