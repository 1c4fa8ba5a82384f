"""Snapshots that are published only once a command has passed in a fresh fork of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from worldfork.core.errors import CommandFailed, ConfigError, WorldforkError
from worldfork.core.ids import new_id
from worldfork.lineage.checkpoint import Timing, checkpoint, keep_parent
from worldfork.lineage.durable import check_level
from worldfork.lineage.live import Live
from worldfork.records.snapshot import SnapshotRecord, check_label
from worldfork.sandbox.command import CommandResult

CANDIDATE = "not verified"
"""Label of a snapshot for as long as its command runs; one that a killed program leaves is a throw-away."""
_SHOWN = 500
"""Characters of the end of what a command printed, in the error."""


def check_command(verify: object) -> None:
    """Refuse what cannot be run.

    Raises:
        ConfigError: no words, or words that are no text.
    """
    if isinstance(verify, str):
        words: tuple[object, ...] = (verify,)
    else:
        words = tuple(verify) if isinstance(verify, list | tuple) else ()
    if not words or not all(isinstance(word, str) for word in words) or not words[0]:
        raise ConfigError(f"{verify!r} is no command", remedy="give a line for the shell, or a list of words")


async def checkpoint_verified(
    live: Live,
    attempt: Callable[[SnapshotRecord], Awaitable[CommandResult]],
    *,
    stop: bool,
    label: str | None,
    level: str,
) -> tuple[SnapshotRecord, Timing]:
    """Freeze a sandbox's disk, and publish the snapshot only if a command passes in a fresh fork of it.

    The sandbox goes on meanwhile. With `stop` it ends afterwards, but only if the command has passed.

    Args:
        live: the sandbox.
        attempt: runs the command in a fork of a snapshot, which is gone when it returns.
        stop, label, level: as of `checkpoint`.
    Raises:
        CommandFailed: it did not pass; `result` has what it printed. There is no snapshot, and the sandbox is as it
        was. Otherwise as `checkpoint`.
    """
    place, began = live.place, time.monotonic()
    check_level(level, place.settings.remote)
    check_label(label)
    parent_id = live.facts.checkpoint_id
    candidate, timing = await checkpoint(live, label=CANDIDATE, level="volatile")
    kept: str | None = parent_id
    sync_fd = None
    try:
        _expect_passed(await attempt(candidate))
        sync_fd = live.sync_descriptor()
        record = replace(candidate, snapshot_id=new_id("sn"), label=label, level=level)
        # Before the candidate goes: its layers are always somebody's.
        await place.work(
            lambda: place.store.publish(record, ()), undo=lambda _: place.store.delete_snapshot(record.snapshot_id)
        )
        kept = record.snapshot_id
    except BaseException:
        if sync_fd is not None:
            os.close(sync_fd)
        raise
    else:
        # Before the wait below, at which a caller may give up: it closes the descriptor.
        place.make_durable(record.snapshot_id, sync_fd, level)
    finally:
        await asyncio.shield(_forget(live, candidate, kept))
    if stop:
        await live.end()
    return record, replace(timing, total_s=time.monotonic() - began)


def _expect_passed(result: CommandResult) -> None:
    if result.ok:
        return
    said = (result.stderr or result.stdout).strip()[-_SHOWN:]
    raise CommandFailed(
        f"the snapshot was not kept: the command that verifies it ended with {result.exit_code}, {result.reason.value}"
        f"{': ' + said if said else ''}",
        remedy="the sandbox is as it was; mend it and take the checkpoint again",
        result=result,
    )


async def _forget(live: Live, candidate: SnapshotRecord, kept: str | None) -> None:
    place = live.place
    if live.facts.checkpoint_id == candidate.snapshot_id:
        keep_parent(live, kept)
    with contextlib.suppress(WorldforkError):  # somebody who forked it meanwhile keeps it, as the throw-away that it is
        await place.work(lambda: place.store.delete_snapshot(candidate.snapshot_id))
    place.upkeep.want()
