"""Freezing a sandbox into a snapshot: by taking its upper away, or a copy of it where processes run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from worldfork.core.errors import NotCapturable, NotFound, SandboxDied, SandboxError, WorldforkError
from worldfork.core.shielded import to_its_end
from worldfork.lineage.capture import is_untouched
from worldfork.lineage.copying import take_copy
from worldfork.lineage.durable import check_level, expect_quota
from worldfork.lineage.live import Live
from worldfork.lineage.moving import move, present_facts, put_right, turn
from worldfork.lineage.place import Place
from worldfork.lineage.starting import ground_of, holder_of
from worldfork.lineage.upper import move_upper
from worldfork.lineage.wanted import Wanted, record_of
from worldfork.records.sandbox import SandboxFacts
from worldfork.records.snapshot import SnapshotRecord, check_label
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.files import list_directory
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.store import LayerDraft

_HOLD_S = 300.0
_LOOK_S = 2.0
"""How long a look at what a snapshot will not hold may take."""
_log = logging.getLogger("worldfork")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Timing:
    """Where a checkpoint's time went, in seconds."""

    pause_s: float
    """How long nothing could run in the sandbox."""
    total_s: float
    copied: bool
    """Whether the upper was copied, because processes ran."""


async def checkpoint(
    live: Live,
    *,
    stop: bool = False,
    label: str | None = None,
    level: str = "local",
    ending: Callable[[], None] = lambda: None,
) -> tuple[SnapshotRecord, Timing]:
    """Freeze a sandbox's disk into a snapshot that can be forked at once; durability follows in the background.

    The sandbox goes on running. When only its init runs, its upper becomes the layer and it continues on a new
    one; when commands run, they are stopped while the upper is copied. With `stop` everything in it is killed
    and the sandbox ends, whether what it leaves could be stored or not; a caller who is cancelled before that keeps it
    as it was.

    Args:
        live: the sandbox.
        stop, label, level: as above, and what the caller says of the snapshot.
        ending: told before a sandbox is killed for `stop`. From there on the snapshot is all that is left of it, so
            that no time limit may end the call any more.

    Raises:
        ConfigError: there is nowhere to copy a snapshot of level `exported` to.
        Locked: another checkpoint of it does not come to an end.
        SandboxDied: it is gone; OutOfSpace, StoreError: nothing was stored and the sandbox is as before, or has ended
        if the disk failed after it was killed for `stop`.
    """
    began = time.monotonic()
    place, wanted = live.place, Wanted(label, level)
    check_level(level, place.settings.remote)
    check_label(label)
    if place.settings.quota_bytes:
        await place.work(lambda: expect_quota(place.store, place.settings.quota_bytes))
    try:
        with typed(f"{live.sandbox_id} cannot be captured"):
            if not stop:
                return await _take_live(live, wanted, began)
            if place.disk_on_host(live.facts):
                return await _stop_and_take(live, wanted, began, ending)
            return await _take_and_stop(live, wanted, began, ending)
    except BaseException:
        # Half a copy may be in the trash, on a disk that is full.
        live.place.tidy_soon()
        raise


async def _take_live(live: Live, wanted: Wanted, began: float) -> tuple[SnapshotRecord, Timing]:
    connection = await live.connection()
    # Before anything is captured: without a descriptor left, the sandbox stays as it is.
    sync_fd = live.sync_descriptor()
    try:
        # In this order: whoever waits for its turn keeps no command waiting.
        async with turn(live) as turn_fd, held(connection) as idle:
            fault("checkpoint:held")
            paused = time.monotonic()
            record, copied = await whole(live, take(live, connection, idle, turn_fd, wanted))
            timing = Timing(time.monotonic() - paused, time.monotonic() - began, copied)
    except BaseException:
        if sync_fd is not None:
            os.close(sync_fd)
        raise
    live.place.make_durable(record.snapshot_id, sync_fd, record.level)
    return record, timing


async def whole(live: Live, taking: Coroutine[Any, Any, tuple[SnapshotRecord, _T]]) -> tuple[SnapshotRecord, _T]:
    """Take a snapshot in one piece: a caller that is cancelled meanwhile hears of it afterwards, and has none."""
    task = asyncio.ensure_future(taking)

    def hasten() -> None:
        # What a machine sends of its disk takes as long as its guest likes.
        if not live.place.disk_on_host(live.facts):
            live.place.machines(live.facts.driver).stop_copying(live.facts)

    try:
        return await to_its_end(task, hasten)
    except asyncio.CancelledError:
        if not task.cancelled() and task.exception() is None:
            with contextlib.suppress(WorldforkError):
                await live.place.work(lambda: live.place.store.delete_snapshot(task.result()[0].snapshot_id))
        raise


async def left_out(live: Live) -> tuple[str, ...]:
    """Return what a snapshot of the disk will not hold although it is there: /dev/shm is memory."""
    connection = await live.connection()
    try:
        async with asyncio.timeout(_LOOK_S):
            records = await list_directory(connection, "/dev/shm")
    except SandboxDied:
        raise
    except (SandboxError, TimeoutError):
        return ()  # no such directory, or processes inside that kill or stop whoever looks
    if not records:
        return ()
    return (f"/dev/shm holds {len(records)} entries, which are memory and not in a filesystem snapshot",)


@contextlib.asynccontextmanager
async def held(connection: Connection) -> AsyncIterator[bool]:
    """Keep new commands waiting; yields whether nothing but init runs."""
    report = await connection.hold(_HOLD_S)
    try:
        yield report.running_commands == 0 and report.other_processes == 0
    finally:
        with contextlib.suppress(SandboxError):
            await asyncio.shield(connection.release())


async def take(
    live: Live, connection: Connection, idle: bool, turn_fd: int, wanted: Wanted
) -> tuple[SnapshotRecord, bool]:
    """Take a snapshot of a held sandbox, in one's turn; returns whether the upper was copied for it.

    Raises:
        As `checkpoint`.
    """
    live.facts = await present_facts(live, connection)
    place, facts = live.place, live.facts
    if not place.disk_on_host(facts):
        from worldfork.lineage.machines import take_disk

        record = await take_disk(live, connection, idle, wanted)
        keep_parent(live, record.snapshot_id)
        return record, True
    ground = ground_of(place, facts)
    if is_untouched(ground.upper, ground.layers[0], facts.form):
        record = record_of(facts, facts.layers, wanted)
        place.quick(lambda: place.store.publish(record, ()))
        keep_parent(live, record.snapshot_id)
        return record, False
    if idle:
        with contextlib.suppress(NotCapturable):
            return await _take_upper(live, connection, turn_fd, wanted), False
    record = await take_copy(live, connection, wanted)
    keep_parent(live, record.snapshot_id)
    return record, True


def keep_parent(live: Live, snapshot_id: str | None) -> None:
    """Let the next snapshot of this sandbox know its parent, whoever takes it."""
    live.facts = replace(live.facts, checkpoint_id=snapshot_id)
    with contextlib.suppress(WorldforkError):  # it is taken, and only the lineage of the next would be less exact
        live.place.quick(lambda: live.place.store.update_facts(live.sandbox_id, live.facts.to_json()))


async def _take_upper(live: Live, connection: Connection, turn_fd: int, wanted: Wanted) -> SnapshotRecord:
    """Turn the upper into a layer and move the sandbox onto a new one over it."""
    place, before = live.place, live.facts
    after, dropped = await move(live, connection, turn_fd)
    record = record_of(before, after.layers, wanted)
    after = replace(after, checkpoint_id=record.snapshot_id)

    def publish() -> None:
        place.store.publish(record, [after.layers[0]])
        # It is taken. Without this its facts still say that it is moving, which whoever comes next finishes; the layers
        # are all held already.
        with contextlib.suppress(WorldforkError):
            place.store.hold_on(holder_of(after))

    try:
        place.quick(publish)
    except BaseException:
        await put_right(live, connection, after.layers[0])
        raise
    live.facts = after
    dropped.add_done_callback(lambda _: drop_work(live, before.generation))
    return record


def drop_work(live: Live, generation: int) -> None:
    """Clear away the work directory of an overlay that is gone for good."""
    if not live.over:
        with contextlib.suppress(OSError):
            live.place.store.trash(Path(live.facts.run) / f"work.{generation}")
        live.place.tidy_soon()


async def _take_and_stop(
    live: Live, wanted: Wanted, began: float, ending: Callable[[], None]
) -> tuple[SnapshotRecord, Timing]:
    """Take the disk of a machine, which is gone with it, and then end it."""
    from worldfork.lineage.machines import end_taken

    record, timing = await _take_live(live, wanted, began)
    return record, replace(timing, total_s=await end_taken(live, record, began, ending))


async def _stop_and_take(
    live: Live, wanted: Wanted, began: float, ending: Callable[[], None]
) -> tuple[SnapshotRecord, Timing]:
    """End everything in the sandbox, then its upper is the layer."""
    place, expect_wanted = live.place, _not_given_up()

    def begin_end() -> None:
        fault("checkpoint:ending")
        expect_wanted()
        ending()

    connection = await live.connection()
    sync_fd = live.sync_descriptor()
    try:
        async with turn(live):
            live.facts = facts = await present_facts(live, connection)
            # Before anything ends: on a full disk the sandbox lives on.
            draft = await place.work(
                lambda: place.store.begin_layer(form=facts.form, ids=facts.ids),
                undo=lambda made: place.store.abandon_layer(made.layer_id),
            )
            try:
                record, _ = await whole(live, _end_and_take(live, facts, draft, wanted, begin_end))
            except BaseException:
                with contextlib.suppress(WorldforkError):
                    await asyncio.shield(place.work(lambda: place.store.abandon_layer(draft.layer_id)))
                raise
    except BaseException:
        if sync_fd is not None:
            os.close(sync_fd)
        raise
    place.make_durable(record.snapshot_id, sync_fd, record.level)
    total = time.monotonic() - began
    return record, Timing(total, total, copied=False)


def _not_given_up() -> Callable[[], None]:
    """Return what raises CancelledError once the caller, who waits beside, was cancelled."""
    caller = asyncio.current_task()
    before = caller.cancelling() if caller else 0

    def expect() -> None:
        if caller and caller.cancelling() > before:
            raise asyncio.CancelledError

    return expect


async def _end_and_take(
    live: Live, facts: SandboxFacts, draft: LayerDraft, wanted: Wanted, begin_end: Callable[[], None]
) -> tuple[SnapshotRecord, bool]:
    """Kill a sandbox, publish what it leaves, and clear the rest away."""
    place = live.place
    begin_end()
    try:
        # From its death to the move of its upper it looks like one that anybody may clear away.
        await place.work(lambda: place.store.vouch(facts.sandbox_id, (draft.layer_id, *facts.layers)))
    except NotFound as error:
        raise live.gone("somebody ended it") from error
    try:
        with live.being_taken():
            await live.kill()
            await live.see_out()
            fault("checkpoint:stopped")
            record = await place.work(
                lambda: _take_last(place, facts, draft, wanted),
                undo=lambda taken: place.store.delete_snapshot(taken.snapshot_id),
            )
    except BaseException:
        await live.end()
        # An end that came before may have left it to us.
        await place.work(lambda: place.dispose(facts))
        raise
    try:
        await live.end()
    except (WorldforkError, OSError) as error:
        _log.warning("%s is in %s, but cannot be cleared away: %s", facts.sandbox_id, record.snapshot_id, error)
    return record, False


def _take_last(place: Place, facts: SandboxFacts, draft: LayerDraft, wanted: Wanted) -> SnapshotRecord:
    """Publish the upper of a sandbox that has ended. Blocking."""
    ground = ground_of(place, facts)
    if is_untouched(ground.upper, ground.layers[0], facts.form):
        place.store.abandon_layer(draft.layer_id)
        record = record_of(facts, facts.layers, wanted)
        place.store.publish(record, ())
        return record
    with typed(f"the upper of {facts.sandbox_id} cannot be taken"):
        move_upper(ground.upper, draft.path)
    fault("checkpoint:taken")
    record = record_of(facts, (draft.layer_id, *facts.layers), wanted)
    place.store.publish(record, [draft.layer_id])
    return record
