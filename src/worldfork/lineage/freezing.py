"""Snapshots of a live sandbox: taken of its disk or with its memory, foretold, and gone back to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from worldfork.core.errors import ConfigError
from worldfork.lineage.adopting import adopt
from worldfork.lineage.arguments import check_outside
from worldfork.lineage.checkpoint import checkpoint, left_out
from worldfork.lineage.commands import Commands
from worldfork.lineage.handle import Handle
from worldfork.lineage.live import Live
from worldfork.lineage.snapshots import SnapshotInfo, snapshot_info, wait_durable
from worldfork.lineage.starting import StartOptions, start
from worldfork.lineage.verifying import check_command, checkpoint_verified
from worldfork.records.snapshot import CheckpointType, SnapshotLevel, SnapshotRecord, SnapshotWaitCondition
from worldfork.sandbox.command import CommandResult

if TYPE_CHECKING:
    from worldfork.lineage.explaining import CheckpointCosts


class Freezing(Handle):
    """The calls that freeze a sandbox, or are about what was frozen of it."""

    async def checkpoint(
        self,
        wait: bool = True,
        timeout: float = 300,
        poll_interval: float = 1.0,
        checkpoint_type: CheckpointType | str | None = None,
        wait_until: SnapshotWaitCondition | str = SnapshotWaitCondition.LOCAL_READY,
        *,
        stop: bool = False,
        label: str | None = None,
        level: SnapshotLevel | str = SnapshotLevel.LOCAL,
        verify: Sequence[str] | str | None = None,
        outside: str = "refuse",
    ) -> SnapshotInfo:
        """Freeze the disk into a snapshot, or the disk with memory. The sandbox goes on, unless `stop`.

        Args:
            checkpoint_type: "filesystem" (default), or "memory": with all processes, each where it is; see `fork`.
            outside: of a memory checkpoint: what becomes of connections that leave the sandbox. "refuse" it, "close"
                them first, in this sandbox too, or "keep" them, which a fork finds dead.
            verify: a command, as words or as a line for the shell. The snapshot is published only if that ends with 0
                in a fresh fork of it, without a network; with `stop` the sandbox ends only then.
            level: "local"; "volatile" for a throw-away, which no disk is made to wait for and a crash of the machine
                loses; "exported" to have it copied to WORLDFORK_REMOTE too.
            wait_until: "local_ready" returns when the snapshot can be forked; "completed" when it survives a crash of
                the machine too, which otherwise follows in the background.
            timeout: seconds to wait, for the whole. With `stop`, only until the sandbox is being ended: what is left of
                it then is taken, however long that takes.
            wait, poll_interval: as the mirrored SDK has them; the call always waits for the snapshot.

        Raises:
            NotCapturable: memory checkpoints need the microvm driver; or connections leave the sandbox.
            CommandFailed: `verify` did not pass; there is no snapshot, and the sandbox is as before.
        """
        del wait, poll_interval
        check_outside(outside)
        memory = CheckpointType(checkpoint_type or CheckpointType.FILESYSTEM) is CheckpointType.MEMORY
        if memory and verify is not None:
            raise ConfigError("a memory checkpoint cannot be verified", remedy="verify a filesystem checkpoint")
        if verify is not None:
            check_command(verify)
        until, kept = SnapshotWaitCondition(wait_until), SnapshotLevel(level)
        if until is SnapshotWaitCondition.COMPLETED and kept is SnapshotLevel.VOLATILE:
            raise ConfigError("a throw-away snapshot is never completed", remedy="use wait_until='local_ready'")
        async with asyncio.timeout(timeout) as limit:
            notes = () if memory else await left_out(self._live)
            wanted: dict[str, Any] = {"stop": stop, "label": label, "level": kept.value}
            if memory:
                from worldfork.lineage.memory import checkpoint_memory

                record, timing = await checkpoint_memory(
                    self._live, outside=outside, **wanted, ending=lambda: limit.reschedule(None)
                )
            elif verify is None:
                record, timing = await checkpoint(self._live, **wanted, ending=lambda: limit.reschedule(None))
            else:
                record, timing = await checkpoint_verified(
                    self._live, lambda found: _attempt(self._live, found, verify), **wanted
                )
            if until is SnapshotWaitCondition.COMPLETED:
                here = self._live.place
                await wait_durable(here.durability(record.snapshot_id))
                record = await here.work(lambda: here.store.snapshot(record.snapshot_id))
        return snapshot_info(record, warnings=notes, pause_s=timing.pause_s, total_s=timing.total_s)

    async def suspend(
        self,
        wait: bool = True,
        timeout: float = 300,
        poll_interval: float = 1.0,
        *,
        outside: str = "refuse",
        label: str | None = None,
    ) -> str:
        """Save this machine with its memory and end it; return the id of the snapshot in which it rests.

        `AsyncSandbox.resume` lets it go on as it was.

        Args:
            timeout: seconds to wait until it is saved; how long its end takes after that does not count.
            wait, poll_interval, outside, label: as of `checkpoint`.

        Raises:
            NotCapturable: its driver cannot save memory, or connections leave it; it goes on then.
            TimeoutError: it was not saved in time, and goes on.
        """
        from worldfork.lineage.suspending import suspend

        del wait, poll_interval
        async with asyncio.timeout(timeout) as limit:
            record = await suspend(self._live, outside=outside, label=label, ending=lambda: limit.reschedule(None))
        return record.snapshot_id

    async def explain(self) -> CheckpointCosts:
        """Return what a checkpoint of either kind would take now: bytes, and how long the sandbox would stand still."""
        from worldfork.lineage.explaining import explain

        return await explain(self._live)

    async def adopt(self, snapshot_id: str, *, label: str | None = None) -> SnapshotInfo:
        """Make the disk what a snapshot holds, and return a snapshot of what it was before, to go back by.

        The sandbox stays the one it is: id, name, environment, limits and mounts do not change.

        Args:
            snapshot_id: of a sandbox on the same base, as of a fork of this one.
            label: of the snapshot of before.

        Raises:
            NotCapturable: commands or other processes run in it; end them first.
            ConfigError: the snapshot stands on another base. NotFound: there is none of this id.
        """
        here = self._live.place
        wanted = await here.work(lambda: here.store.snapshot(snapshot_id))
        return snapshot_info(await adopt(self._live, wanted, label=label))

    async def list_snapshots(self) -> Sequence[SnapshotInfo]:
        """Return the snapshots taken of this sandbox, oldest first."""
        here = self._live.place
        records = await here.work(here.store.snapshots)
        return [snapshot_info(record) for record in records if record.sandbox_id == self._live.sandbox_id]


async def _attempt(source: Live, record: SnapshotRecord, verify: Sequence[str] | str) -> CommandResult:
    """Run a command in a fresh fork of what was frozen of a sandbox."""
    live = await start(source.place, record, StartOptions(driver=source.facts.driver))
    try:
        child = _Fork(live)
        return await (child.sh(verify) if isinstance(verify, str) else child.run(verify[0], verify[1:]))
    finally:
        await live.end()


class _Fork(Commands):
    """A sandbox that nobody is handed."""

    def __init__(self, live: Live) -> None:
        self._live = live
