"""A checkpoint of a running machine with its memory: processes, open files and all, at one moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from worldfork.core.errors import ConfigError, NotCapturable, WorldforkError
from worldfork.lineage.arguments import check_outside
from worldfork.lineage.checkpoint import Timing, keep_parent, whole
from worldfork.lineage.durable import check_level, expect_quota
from worldfork.lineage.live import Live
from worldfork.lineage.machines import close_unused, end_taken
from worldfork.lineage.moving import present_facts, turn
from worldfork.lineage.wanted import Wanted, record_of
from worldfork.records.sandbox import SandboxFacts
from worldfork.records.snapshot import CheckpointType, SnapshotLevel, SnapshotRecord, check_label
from worldfork.sandbox.microvm.manifest import read_saved
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault

if TYPE_CHECKING:
    from worldfork.sandbox.microvm.driver import MicrovmDriver


def expect_memory_driver(live: Live) -> MicrovmDriver:
    """Return the driver of a sandbox whose memory can be saved.

    Raises:
        NotCapturable: its driver cannot do that.
    """
    driver = live.place.driver_of(live.facts)
    if not driver.capabilities().memory_checkpoint:
        raise NotCapturable(
            f"the memory of {live.sandbox_id} cannot be saved: its driver is {driver.name}",
            remedy="use CheckpointType.FILESYSTEM, or create the sandbox with driver='microvm'",
            what="memory",
            why=f"the {driver.name} driver stores file systems only",
        )
    return live.place.machines(live.facts.driver)


async def checkpoint_memory(
    live: Live,
    *,
    outside: str = "refuse",
    stop: bool = False,
    label: str | None = None,
    level: str = "local",
    suspends: bool = False,
    ending: Callable[[], None] = lambda: None,
) -> tuple[SnapshotRecord, Timing]:
    """Save a machine with its memory into a snapshot that can be forked at once; durability follows.

    The sandbox goes on, unless `stop`: then it ends once that is stored.

    Args:
        live: the sandbox.
        outside: what becomes of connections that leave the sandbox: "refuse" the checkpoint, "close" them first, or
            "keep" them as they are, which a fork finds dead.
        stop, label, level, ending: as of `checkpoint`.
        suspends: the snapshot is what the sandbox itself will go on from.

    Raises:
        NotCapturable: the driver saves no memory; or there are such connections, and they are refused: `connections`
            has them.
        ConfigError: as of `checkpoint`. Locked: another checkpoint of it does not come to an end.
        SandboxDied: it is gone. OutOfSpace, StoreError, SandboxError: nothing was stored; the sandbox goes on.
    """
    began = time.monotonic()
    place, wanted = live.place, Wanted(label, level)
    check_outside(outside)
    check_level(level, place.settings.remote)
    if level == SnapshotLevel.EXPORTED.value:
        raise ConfigError("a snapshot with memory stays on this machine", remedy="use level 'local'")
    check_label(label)
    driver = expect_memory_driver(live)
    if place.settings.quota_bytes:
        await place.work(lambda: expect_quota(place.store, place.settings.quota_bytes))
    await live.connection()
    sync_fd = live.sync_descriptor()
    try:
        with typed(f"{live.sandbox_id} cannot be captured"):
            async with turn(live):
                record, pause_s = await whole(live, _take(live, driver, outside, wanted, suspends))
    except BaseException:
        close_unused(sync_fd)
        raise
    place.make_durable(record.snapshot_id, sync_fd, record.level)
    total_s = time.monotonic() - began
    if stop:
        total_s = await end_taken(live, record, began, ending)
    return record, Timing(pause_s, total_s, copied=True)


async def _take(
    live: Live, driver: MicrovmDriver, outside: str, wanted: Wanted, suspends: bool
) -> tuple[SnapshotRecord, float]:
    place = live.place
    live.facts = facts = await present_facts(live, await live.connection())
    found = [asdict(one) for one in await driver.outside(facts)]
    if found and outside == "refuse":
        raise refused(facts, found)
    record = replace(record_of(facts, facts.layers, wanted), kind=CheckpointType.MEMORY.value)
    target = place.store.begin_memory(record.snapshot_id)
    try:
        saved = await driver.save_memory(facts, target, drop_outside=outside == "close")
        fault("checkpoint:saved")
        sizes = asdict(saved)
        sizes["stored_bytes"] = sizes.pop("ram_bytes")
        # A program may have connected since the look above.
        found = list(sizes.pop("outside")) or found
        if found and outside == "refuse":
            raise refused(facts, found)
        more: dict[str, Any] = {"memory": {"driver": driver.name, **sizes, **asdict(read_saved(target).build)}}
        if found:
            more["connections"] = {"decided": outside, "found": found}
        if suspends:
            more["suspended"] = suspended_facts(facts)
        record = replace(record, facts={**record.facts, **more}, size_bytes=saved.added_bytes)
        await place.work(lambda: place.store.publish(record, ()))
    except BaseException:
        with contextlib.suppress(WorldforkError):
            await asyncio.shield(place.work(lambda: place.store.abandon_memory(record.snapshot_id)))
        raise
    keep_parent(live, record.snapshot_id)
    return record, saved.pause_s


def refused(facts: SandboxFacts, found: Sequence[dict[str, Any]]) -> NotCapturable:
    """Return the error for connections that a copy of the sandbox would share with it."""
    shown = ", ".join(f"{one['protocol']} {one['local']} to {one['remote']}" for one in found[:4])
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return NotCapturable(
        f"{facts.sandbox_id} has connections that leave it: {shown}{more}",
        remedy="close them, or take the checkpoint with outside='close' or outside='keep'",
        what=f"{shown}{more}",
        why="a fork would go on with connections that are another's",
        connections=list(found),
    )


def suspended_facts(facts: SandboxFacts) -> dict[str, Any]:
    """Return what a suspended sandbox is to be again; of what came with the host's network, the names alone."""
    names = dict.fromkeys(facts.network_env, "")
    return dict(json.loads(replace(facts, network_env=names, cgroups=(), owner_id="").to_json()))
