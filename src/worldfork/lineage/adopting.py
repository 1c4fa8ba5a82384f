"""Putting a live sandbox onto another snapshot: it stays who it is, and its disk is the snapshot's from then on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace

from worldfork.core.errors import ConfigError, NotCapturable, WorldforkError
from worldfork.core.shielded import to_its_end
from worldfork.lineage.checkpoint import drop_work, held, take
from worldfork.lineage.fitting import check_form, check_ids
from worldfork.lineage.live import Live
from worldfork.lineage.moving import move, put_right, turn
from worldfork.lineage.stacks import on_mountable
from worldfork.lineage.starting import holder_of
from worldfork.lineage.wanted import Wanted
from worldfork.records.sandbox import Base, SandboxFacts
from worldfork.records.snapshot import SnapshotRecord, expect_filesystem
from worldfork.sandbox.connection import Connection
from worldfork.store.failures import typed

_PAUSES_S = (0.01, 0.05, 0.2, 0.5)
"""Before another try: on a busy machine the kernel lets go of what an ended process had open a moment after its end."""


async def adopt(live: Live, record: SnapshotRecord, *, label: str | None = None) -> SnapshotRecord:
    """Make the disk of a live, idle sandbox what a snapshot holds; returns a snapshot of what it was before.

    Its id, environment, limits and mounts stay as they are.

    Args:
        live: the sandbox; nothing but its init may run in it.
        record: of a sandbox of this form, on this base.
        label: of the snapshot of before.

    Raises:
        NotCapturable: processes run in it, or it is a machine. ConfigError: the snapshot stands on another base.
        DriverUnavailable, FormatUnsupported: it was taken in another form, or with other ids.
        NotFound: it is gone. SandboxDied: the sandbox is.
        Locked, OutOfSpace, StoreError, LaunchFailed: nothing was changed.
    """
    if not live.place.disk_on_host(live.facts):
        from worldfork.lineage.machines import expect_disk_here

        expect_disk_here(live)
    expect_filesystem(record, "adopted")
    _expect_fit(live.facts, record)
    with typed(f"{live.sandbox_id} cannot be moved"):
        connection = await live.connection()
        sync_fd = live.sync_descriptor()
        exchange: asyncio.Future[SnapshotRecord] | None = None
        try:
            async with turn(live) as turn_fd, held(connection) as idle:
                if not idle:
                    raise _busy(live)
                exchange = _exchange(live, connection, turn_fd, record, label)
                return await to_its_end(exchange)
        finally:
            # A caller that was cancelled hears of no snapshot, but the sandbox has moved, and lists it.
            if exchange is not None and not exchange.cancelled() and exchange.exception() is None:
                before = exchange.result()
                live.place.make_durable(before.snapshot_id, sync_fd, before.level)
            elif sync_fd is not None:
                os.close(sync_fd)


def _exchange(
    live: Live, connection: Connection, turn_fd: int, record: SnapshotRecord, label: str | None
) -> asyncio.Future[SnapshotRecord]:
    async def exchange() -> SnapshotRecord:
        for pause_s in _PAUSES_S:
            with contextlib.suppress(NotCapturable):
                return await once()
            await asyncio.sleep(pause_s)
        return await once()

    async def once() -> SnapshotRecord:
        before, copied = await take(live, connection, True, turn_fd, Wanted(label))
        try:
            if copied:
                raise _busy(live)
            await on_mountable(live.place, record, lambda present: _move(live, connection, turn_fd, present))
        except BaseException:
            with contextlib.suppress(WorldforkError):
                await live.place.work(lambda: live.place.store.delete_snapshot(before.snapshot_id))
            raise
        return before

    return asyncio.ensure_future(exchange())


async def _move(live: Live, connection: Connection, turn_fd: int, record: SnapshotRecord) -> None:
    """Move the sandbox, whose upper is empty since it was taken, onto the snapshot's layers."""
    store, generation = live.place.store, live.facts.generation
    after, dropped = await move(live, connection, turn_fd, record.layers)
    after = replace(after, checkpoint_id=record.snapshot_id)

    def settle() -> None:
        store.adopt_layer(after.layers[0])
        store.hold_on(holder_of(after))

    try:
        live.place.quick(settle)
    except BaseException:
        await put_right(live, connection, after.layers[0])
        raise
    live.facts = after
    dropped.add_done_callback(lambda _: drop_work(live, generation))


def _expect_fit(facts: SandboxFacts, record: SnapshotRecord) -> None:
    check_form(record, facts.form)
    check_ids(record, facts.ids)
    base = Base.from_json(record.base)
    if (base.kind, base.path, base.fingerprint) != (
        facts.base.kind,
        facts.base.path,
        facts.base.fingerprint,
    ) or not record.layers:
        raise ConfigError(
            f"{record.snapshot_id} stands on another base than {facts.sandbox_id}",
            remedy="start a new sandbox of the snapshot",
            field="snapshot_id",
        )


def _busy(live: Live) -> NotCapturable:
    return NotCapturable(
        f"processes run in {live.sandbox_id}, which would go on with the disk that they know",
        remedy="end them first",
        what="processes",
        why="their files and directories are open",
    )
