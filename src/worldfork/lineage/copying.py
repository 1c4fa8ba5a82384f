"""A checkpoint of a sandbox in which processes run: they stand still while its upper is copied."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from worldfork.core import mapped
from worldfork.core.errors import NotFound, SandboxDied, SandboxError, WorldforkError
from worldfork.lineage.capture import Capture, Copied, copy_upper
from worldfork.lineage.live import Live
from worldfork.lineage.place import Place
from worldfork.lineage.starting import ground_of
from worldfork.lineage.wanted import Wanted, record_of
from worldfork.records.snapshot import SnapshotRecord
from worldfork.sandbox.cgroups import thaw_groups
from worldfork.sandbox.connection import Connection
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.store import LayerDraft


async def take_copy(live: Live, connection: Connection, wanted: Wanted) -> SnapshotRecord:
    """Copy the upper while its processes stand still, and publish the copy; the sandbox keeps its own upper.

    Raises:
        SandboxDied: it is gone; OutOfSpace, StoreError: nothing was stored.
    """
    place, facts = live.place, live.facts
    notes = notes_of(live)
    async with last_copy(place, notes) as last:
        draft = await place.work(lambda: place.store.begin_layer(form=facts.form, ids=facts.ids))
        try:
            capture = await _copy(live, connection, last, draft)
            fault("checkpoint:thawed")
            return await place.work(lambda: publish_copy(live, capture, draft.layer_id, last, notes, wanted))
        except BaseException:
            with contextlib.suppress(Exception):
                await asyncio.shield(place.work(lambda: place.store.abandon_layer(draft.layer_id)))
            raise


def notes_of(live: Live) -> Path:
    """Return where a sandbox's last copy is written down."""
    return Path(live.facts.run) / f"copied.{live.facts.generation}"


@contextlib.asynccontextmanager
async def last_copy(place: Place, notes: Path) -> AsyncIterator[Copied]:
    """Keep the layers of the last copy for the length of the block; a deleted snapshot may have taken them along."""
    lease = contextlib.ExitStack()

    def take() -> Copied:
        last = Copied.load(notes)
        if last.layers:
            try:
                lease.enter_context(place.store.reading(layers=last.layers, purpose="copy"))
            except NotFound:
                return Copied()
        return last

    def let_go() -> None:
        # Lost or not: what was published since stands on layers that were there at that moment, and so all the time.
        with contextlib.suppress(WorldforkError):
            lease.close()

    try:
        yield await place.work(take)
    finally:
        await asyncio.shield(place.work(let_go))


async def _copy(live: Live, connection: Connection, last: Copied, draft: LayerDraft) -> Capture:
    place, facts = live.place, live.facts
    upper = Path(ground_of(place, facts).upper)
    if facts.ids:
        await place.work(lambda: mapped.warm(copy_upper))  # not while all stands still
    await connection.freeze()
    try:
        fault("checkpoint:frozen")
        writable = await _still_writable(connection)
        below = [place.store.layer_path(layer) for layer in last.layers]

        def copy() -> Capture:
            with typed(f"the upper of {facts.sandbox_id} cannot be copied"):
                if facts.ids:
                    return mapped.run(copy_upper, upper, draft.path, last, writable, facts.form, below)
                return copy_upper(upper, draft.path, last, writable, facts.form, below)

        capture = await place.work(copy)
        fault("checkpoint:copied")
        return capture
    finally:
        try:
            await asyncio.shield(connection.thaw())
        except SandboxError:
            # Its init is dead, and what it has frozen could not die either.
            thaw_groups(facts.cgroups)


async def _still_writable(connection: Connection) -> set[tuple[int, int]] | None:
    """Return the files that frozen processes can still write; None where init may not look into one of them."""
    try:
        return set(await connection.mapped())
    except SandboxDied:
        raise
    except SandboxError:
        # A daemon that changed its user, for example. Then any file may be one: the next copy takes all again.
        return None


def publish_copy(
    live: Live, capture: Capture, layer_id: str, last: Copied, notes: Path, wanted: Wanted
) -> SnapshotRecord:
    """Publish a copy over the last one, and write down that it is the last one from now on. Blocking.

    Raises:
        OutOfSpace, StoreError: nothing was published.
    """
    place, facts = live.place, live.facts
    if not capture.changed:
        place.store.abandon_layer(layer_id)
        record = record_of(facts, (*last.layers, *facts.layers), wanted)
        place.store.publish(record, ())
        _remember(capture.copied, notes)
        return record
    chain = (layer_id,) if capture.whole else (layer_id, *last.layers)
    record = replace(record_of(facts, (*chain, *facts.layers), wanted), size_bytes=capture.size_bytes)
    place.store.publish(record, [layer_id])
    capture.copied.layers = chain
    _remember(capture.copied, notes)
    return record


def _remember(copied: Copied, notes: Path) -> None:
    # What was remembered before stays true of its own layers: without room for more the next copy is a larger one.
    with contextlib.suppress(OSError):
        copied.save(notes)
