"""Whose doing it was that a grading came to nothing: the code under test, or the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import Any

from worldfork.core.clock import SystemClock
from worldfork.core.errors import PathError, SandboxError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.death import DeathCause
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.sandbox.command import CommandResult

STARVED_SHARE = 0.5
"""What waited for a CPU for so much of its wall time was starved."""

_GRACE_S = 5.0
"""Between the wall limit and the kill: time to ask whether what runs had a CPU."""

_HOST_CAUSES = {DeathCause.HOST_MEMORY: FailureKind.MEMORY, DeathCause.HOST_DISK: FailureKind.SPACE}


async def check_host(sandbox: AsyncSandbox) -> None:
    """Go on only if what ran in a sandbox is to blame for what befell it.

    Raises:
        VerifierError: the machine is; `kind` says how.
    """
    death = await sandbox.cause_of_death()
    if death is None:
        kind = FailureKind.MEMORY if (await sandbox.limit_hits()).host_memory else None
    else:
        kind = None if death.own else _HOST_CAUSES.get(death.cause, FailureKind.LOST)
    if kind is not None:
        raise VerifierError(
            f"a sandbox of the grading ended or lost a process: {death.detail if death else 'host memory'}",
            remedy="run fewer rollouts at once",
            kind=kind,
        )


async def run_watched(
    sandbox: AsyncSandbox, wall_s: float, program: str, args: Sequence[str], **options: Any
) -> tuple[CommandResult, float]:
    """Run a program with a wall limit; at the limit, ask how long its processes have waited for a CPU.

    Args:
        sandbox: where.
        wall_s: the limit; the program is killed a little later.
        program, args, options: as `AsyncSandbox.run` takes them.

    Returns:
        (the result, the longest wait in seconds; 0 where the limit was not met, or what waited took the CPU itself).
    """
    watch = asyncio.create_task(_watch(sandbox, wall_s))
    try:
        result = await sandbox.run(program, args, timeout=wall_s + _GRACE_S, **options)
        return result, watch.result() if watch.done() else 0.0
    finally:
        watch.cancel()


def is_starved(result: CommandResult, waited_s: float) -> bool:
    """Tell whether a program met its wall limit because the machine had no CPU for it."""
    return result.timed_out and result.cpu_s < STARVED_SHARE * result.wall_s <= waited_s


async def _watch(sandbox: AsyncSandbox, wall_s: float) -> float:
    await SystemClock().sleep_s(wall_s)
    longest = 0.0
    with contextlib.suppress(SandboxError):
        for entry in (await sandbox.list_directory("/proc")).entries:
            if entry.name.isdigit():
                with contextlib.suppress(PathError, ValueError, IndexError):
                    # The kernel's sched-stats: seconds on a CPU, seconds ready without one, number of turns.
                    counts = await sandbox.read_file(f"/proc/{entry.name}/schedstat", max_bytes=4096)
                    longest = max(longest, int(counts.split()[1]) / 1e9)
        if longest >= STARVED_SHARE * wall_s and await is_busy(sandbox, wall_s, running=1):
            return 0.0
    return longest


async def is_busy(sandbox: AsyncSandbox, wall_s: float, *, running: int = 0) -> bool:
    """Tell whether a sandbox itself took the CPU that its tests lacked: half of some time, or what runs in it now.

    What a program does in children that it does not wait for is counted nowhere else. A sandbox that cannot be asked
    is taken for busy: it is the code under test that runs there.

    Args:
        sandbox: where tests run or ran.
        wall_s: the time.
        running: how many processes may want a CPU now.
    """
    used_ticks = wanting = 0
    try:
        for entry in (await sandbox.list_directory("/proc")).entries:
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(PathError, ValueError, IndexError):
                stat = await sandbox.read_file(f"/proc/{entry.name}/stat", max_bytes=4096)
                fields = stat.rpartition(b")")[2].split()
                used_ticks += sum(map(int, fields[11:15]))
                wanting += fields[0] == b"R" and entry.name != "1"
    except SandboxError:
        return True
    return wanting > running or used_ticks / os.sysconf("SC_CLK_TCK") >= STARVED_SHARE * wall_s


def overload(task: Task) -> VerifierError:
    """Return the error of a wall limit that struck while the machine had no CPU for what it limits."""
    return VerifierError(
        f"a time limit of {task.task_id} struck while the machine had no CPU for its tests",
        remedy="run fewer rollouts at once",
        kind=FailureKind.OVERLOAD,
    )
