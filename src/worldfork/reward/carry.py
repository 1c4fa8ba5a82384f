"""What leaves a policy's sandbox: the declared files, as plain bytes, and nothing else.

The sandbox is stopped first, with every process in it, and what it wrote becomes a layer. That is read on the host, by
the rules of an overlay and without a mount, so that nothing of the policy's stands beside whoever reads, and the cost
follows what changed.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial

from worldfork.core.errors import NotFound, SandboxError, WorldforkError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.place import place
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.changes import read_edits
from worldfork.store.faultpoints import fault


@dataclass(frozen=True)
class Carried:
    """What a policy left."""

    edits: Edits
    end_snapshot_id: str
    """The state at the end, everything in it stopped; for throwing away. The caller deletes it."""

    async def drop(self) -> None:
        """Delete the state at the end; its bytes go later, so that nobody waits for them. Idempotent."""
        here = place()
        with contextlib.suppress(NotFound):
            await here.work(lambda: here.store.delete_snapshot(self.end_snapshot_id))
        here.collect_soon()


async def carry_out(
    sandbox: AsyncSandbox,
    task: Task,
    *,
    start_snapshot_id: str,
    level: str = "volatile",
    label: str | None = None,
    holds: bool = False,
) -> Carried:
    """End a policy's sandbox and every process in it, then read what it made of the task's editable files.

    An editable path that is anything but a regular file, or lies below a link, counts as removed. What is more, or
    larger, than `task.limits` let be carried stays as the start has it, and `Edits.dropped` says what and why.

    Args:
        sandbox: ends in any case.
        task: the problem.
        start_snapshot_id: the starting state that the sandbox was forked from.
        level, label: of the state at the end; one that is to be kept is `local`.
        holds: whether the state at the end stays where it could not be read; the caller finds it by its label.

    Raises:
        SandboxDied: the sandbox did not live to be stopped. OutOfSpace: it was ended for its disk, or the host is full.
        SandboxError, StoreError, ForkError: it could not be stopped or read.
    """
    try:
        # How long reading takes is bounded by what is read, not by the clock: a policy decides how much it left.
        end = await sandbox.checkpoint(timeout=task.limits.stop_wall_s, stop=True, level=level, label=label)
    except TimeoutError:
        raise SandboxError(
            f"ending a sandbox took more than {task.limits.stop_wall_s:g} s",
            remedy="run fewer rollouts at once, or raise the task's stop_wall_s",
            kind=FailureKind.LIMIT,
        ) from None
    try:
        return await read_out(end.snapshot_id, task, start_snapshot_id=start_snapshot_id)
    except BaseException:
        if not holds:
            with contextlib.suppress(WorldforkError):
                await asyncio.shield(Carried(Edits(), end.snapshot_id).drop())
        raise


async def read_out(end_snapshot_id: str, task: Task, *, start_snapshot_id: str) -> Carried:
    """Read what a policy made of the task's editable files out of the state at its end.

    Raises:
        StoreError, OutOfSpace: it could not be read.
    """
    fault("carry:read")
    here = place()
    edits = await here.work(partial(read_edits, here.store, start_snapshot_id, end_snapshot_id, task))
    return Carried(edits, end_snapshot_id)
