"""Sandboxes that are virtual machines: what is asked before they start, and a checkpoint of the disk that they have."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from worldfork.content.ids import with_ids, write_ids
from worldfork.core.errors import ConfigError, NotCapturable, OutOfSpace, SandboxError, WorldforkError
from worldfork.core.remove import remove_tree
from worldfork.lineage.capture import Capture, Copied
from worldfork.lineage.copying import last_copy, notes_of, publish_copy
from worldfork.lineage.exported import difference_of, whole_copy
from worldfork.lineage.live import Live
from worldfork.lineage.place import Place
from worldfork.lineage.starting import StartOptions
from worldfork.lineage.wanted import Wanted
from worldfork.records.snapshot import CheckpointType, SnapshotRecord
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.microvm.ram import available_bytes
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.store import LayerDraft

FORK_BYTES = 32 << 20
"""What one more machine takes of the host's memory at least: QEMU's own, and the first pages that its guest changes."""
_SHARE = 0.9
"""Of what the kernel calls available."""
_log = logging.getLogger("worldfork")


def machine_options(place: Place, record: SnapshotRecord, options: StartOptions, n: int) -> StartOptions:
    """Return the options by which machines, or sandboxes of a memory snapshot, start; a memory decides on its driver.

    Args:
        place: where.
        record: what they start from.
        options: what the caller asked for.
        n: how many start.

    Raises:
        ConfigError: something that a memory, whose machine is what it is, cannot be given.
        OutOfSpace: the host has less memory than so many take at least; nothing was started.
    """
    memory_bytes = 0
    if record.kind == CheckpointType.MEMORY.value:
        saved = record.facts.get("memory", {})
        memory_bytes = int(saved.get("stored_bytes", 0))
        expect_unchanged(record.snapshot_id, options)
        options = replace(options, driver=str(saved.get("driver", "microvm")))
    expect_memory(n, memory_bytes)
    return options


def expect_unchanged(called: str, options: StartOptions) -> None:
    """Refuse options that would change a machine that runs.

    Args:
        called: what holds it: a snapshot with memory, or the sandbox itself.
        options: of what is to go on from there.

    Raises:
        ConfigError: they name limits or mounts.
    """
    given = [name for name, value in options.limits.items() if value is not None]
    if options.mounts:
        given.append("mounts")
    if given:
        raise ConfigError(
            f"{called} holds a machine that runs: {', '.join(given)} cannot be changed",
            remedy="leave that out, or restore a filesystem snapshot",
            field=given[0],
        )


def expect_memory(n: int, once_bytes: int = 0) -> None:
    """Refuse to start more machines than the host has memory for.

    Args:
        n: how many.
        once_bytes: what all of them share, at least.

    Raises:
        OutOfSpace: it has less; scope "host".
    """
    available = available_bytes()
    needed = n * FORK_BYTES + once_bytes
    if available is not None and needed > available * _SHARE:
        raise OutOfSpace(
            f"{n} machines need {needed >> 20} MiB of memory at least, and this host has {available >> 20} MiB left",
            remedy="fork fewer at a time, or end sandboxes first",
            scope="host",
            needed_bytes=needed,
            free_bytes=available,
        )


async def take_disk(live: Live, connection: Connection, idle: bool, wanted: Wanted) -> SnapshotRecord:
    """Copy what a held sandbox in a machine has written out of it, and publish the copy; the sandbox goes on.

    Args:
        live: the sandbox, whose facts are those of this moment.
        connection: the one that holds it.
        idle: whether nothing but init runs in it; else that stands still meanwhile.
        wanted: what the caller says of the snapshot.

    Raises:
        NotCapturable: it holds what a layer cannot.
        SandboxDied: it is gone. OutOfSpace, StoreError, SandboxError: nothing was stored.
    """
    place, facts = live.place, live.facts
    notes = notes_of(live)
    async with last_copy(place, notes) as last:
        draft = await place.work(
            lambda: place.store.begin_layer(form=facts.form, ids=facts.ids),
            undo=lambda made: place.store.abandon_layer(made.layer_id),
        )
        try:
            capture = await _copy_disk(live, connection, idle, last, draft)
            fault("checkpoint:copied")
            below = last if capture.changed or not capture.whole else Copied()
            return await place.work(lambda: publish_copy(live, capture, draft.layer_id, below, notes, wanted))
        except BaseException:
            with contextlib.suppress(WorldforkError):
                await asyncio.shield(place.work(lambda: place.store.abandon_layer(draft.layer_id)))
            raise


async def _copy_disk(live: Live, connection: Connection, idle: bool, last: Copied, draft: LayerDraft) -> Capture:
    """Copy what a machine has written into a draft, as a difference to the last copy where there is one.

    Returns:
        The copy; neither changed nor a difference if there is nothing to copy.
    """
    place, facts = live.place, live.facts
    room = Path(facts.run) / "exported"
    based = bool(last.entries)
    tree = room / draft.path.name if based else draft.path
    below = [place.store.layer_path(layer) for layer in last.layers]

    def make_room() -> None:
        remove_tree(room)  # of one who was killed
        room.mkdir(mode=0o700)
        write_ids(room, facts.ids)

    def compare(size_bytes: int) -> Capture:
        if not based:
            return with_ids([tree], whole_copy, tree, facts.form, size_bytes)
        return with_ids([tree], difference_of, tree, draft.path, last, facts.form, below)

    with typed(f"the disk of {facts.sandbox_id} cannot be copied"):
        try:
            if based:
                await place.work(make_room)
            async with _standing_still(connection, idle):
                driver = place.machines(facts.driver)
                size_bytes = await driver.copy_disk(facts, connection, tree, idle=idle)
            if size_bytes is None:
                return Capture(Copied(), changed=False, whole=True, size_bytes=0)
            return await place.work(lambda: compare(size_bytes))
        finally:
            if based:
                with contextlib.suppress(WorldforkError):  # it goes with the sandbox at the latest
                    await asyncio.shield(place.work(lambda: remove_tree(room)))


@contextlib.asynccontextmanager
async def _standing_still(connection: Connection, idle: bool) -> AsyncIterator[None]:
    if idle:
        yield
        return
    await connection.freeze()
    try:
        fault("checkpoint:frozen")
        yield
    finally:
        with contextlib.suppress(SandboxError):  # its machine is gone, and all in it with that
            await asyncio.shield(connection.thaw())


async def end_taken(live: Live, record: SnapshotRecord, began: float, ending: Callable[[], None]) -> float:
    """End a sandbox whose last snapshot is there; return how long all of it took since `began`, in seconds."""
    fault("checkpoint:ending")
    ending()
    try:
        await live.end()
    except (WorldforkError, OSError) as error:
        _log.warning("%s is in %s, but cannot be cleared away: %s", live.sandbox_id, record.snapshot_id, error)
    return time.monotonic() - began


def expect_disk_here(live: Live) -> None:
    """Refuse what only a sandbox can do whose disk is a directory of this host.

    Raises:
        NotCapturable: it is a machine.
    """
    if not live.place.disk_on_host(live.facts):
        raise NotCapturable(
            f"{live.sandbox_id} is a virtual machine, whose disk cannot be exchanged while it runs",
            remedy="start another sandbox from the snapshot",
            what="the disk",
            why="the machine has it mounted",
        )


def close_unused(sync_fd: int | None) -> None:
    """Close a descriptor that nothing came to need."""
    if sync_fd is not None:
        os.close(sync_fd)
