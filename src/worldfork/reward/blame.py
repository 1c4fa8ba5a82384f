"""Whose doing it was that a grading came to nothing: the code under test, or the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Sequence
from typing import Any

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import PathError, SandboxError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.death import DeathCause
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.priority import is_confined, stands_back
from worldfork.sandbox.command import CommandResult

STARVED_SHARE = 0.5
"""What waited for a CPU for so much of its wall time was starved."""

_GRACE_S = 5.0
"""Between the wall limit and the kill: time to ask whether what runs had a CPU."""

CROWDED_SHARE = 0.3
"""In so many of all looks more than one process wanted a CPU: it is its own processes that a sandbox waits for."""

_LOOK_S = 1.5
"""Between two looks, on average; their instants are drawn at random."""
_SHORTEST_S = 1.0
_MOST_LOOKS = 100
"""On average, in the time of a limit."""

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


class Looks:
    """What was seen of a sandbox's processes at instants that nobody in it can know beforehand.

    One look at the end would be told by processes that took the CPU until shortly before it: what they used is counted
    nowhere once they are gone, if nobody waited for them.
    """

    def __init__(self) -> None:
        self._ticks: dict[int, int] = {}
        self._looks = 0
        self._crowded = 0
        self.waited_s = 0.0
        """The longest time that a process was seen to have waited for a CPU."""
        self.stood_back = False
        """Whether a process was seen to leave the CPU to others by its own wish."""
        self.gone = False
        """Whether the sandbox could not be asked; it is the code under test that runs there."""

    async def look(self, sandbox: AsyncSandbox) -> int:
        """Look once; return how many processes want a CPU.

        Raises:
            SandboxError: the sandbox cannot be asked.
        """
        wanting = 0
        for entry in (await sandbox.list_directory("/proc")).entries:
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(PathError, ValueError, IndexError):
                fields = (await _read(sandbox, entry.name, "stat")).rpartition(b")")[2].split()
                number = int(entry.name)
                self._ticks[number] = max(self._ticks.get(number, 0), sum(map(int, fields[11:15])))
                wanting += fields[0] == b"R" and number != 1
                self.stood_back |= stands_back(fields)
            await self._look_at_wait(sandbox, entry.name)
        self._looks += 1
        self._crowded += wanting > 1
        return wanting

    async def _look_at_wait(self, sandbox: AsyncSandbox, pid: str) -> None:
        with contextlib.suppress(PathError, ValueError, IndexError):
            # The kernel's sched-stats: seconds on a CPU, seconds ready without one, number of turns.
            waited_s = int((await _read(sandbox, pid, "schedstat")).split()[1]) / 1e9
            if waited_s <= self.waited_s:
                return
            self.waited_s = waited_s
            group = b""
            with contextlib.suppress(PathError):
                group = await _read(sandbox, pid, "autogroup")
            self.stood_back |= is_confined(await _read(sandbox, pid, "status"), group)

    def busy(self, wall_s: float) -> bool:
        """Tell whether the sandbox itself took the CPU that something in it lacked, or left it to others."""
        if self.gone or self.stood_back:
            return True
        used_s = sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")
        return used_s >= STARVED_SHARE * wall_s or (self._looks > 0 and self._crowded >= CROWDED_SHARE * self._looks)


async def run_watched(
    sandbox: AsyncSandbox, wall_s: float, program: str, args: Sequence[str], looks: Looks | None = None, **options: Any
) -> tuple[CommandResult, float]:
    """Run a program with a wall limit; at the limit, ask how long its processes have waited for a CPU.

    Args:
        sandbox: where.
        wall_s: the limit; the program is killed a little later.
        program, args, options: as `AsyncSandbox.run` takes them.
        looks: gets what is seen meanwhile.

    Returns:
        (the result, the longest wait in seconds; 0 where the limit was not met, or what waited took the CPU itself).
    """
    watch = asyncio.create_task(_watch(sandbox, wall_s, looks or Looks()))
    try:
        result = await sandbox.run(program, args, timeout=wall_s + _GRACE_S, **options)
        return result, watch.result() if watch.done() else 0.0
    finally:
        watch.cancel()


def is_starved(result: CommandResult, waited_s: float) -> bool:
    """Tell whether a program met its wall limit because the machine had no CPU for it."""
    return result.timed_out and result.cpu_s < STARVED_SHARE * result.wall_s <= waited_s


async def _watch(sandbox: AsyncSandbox, wall_s: float, looks: Looks) -> float:
    await look_until(sandbox, wall_s, looks)
    return 0.0 if looks.busy(wall_s) else looks.waited_s


async def look_until(sandbox: AsyncSandbox, wall_s: float, looks: Looks, clock: Clock | None = None) -> None:
    """Look at a sandbox at random instants, and last at the end of some time. One that cannot be asked counts as busy.

    Args:
        sandbox: where something runs.
        wall_s: the time.
        looks: gets what is seen.
        clock: whose time it is.
    """
    clock = clock or SystemClock()
    ends_s = clock.monotonic_s() + wall_s
    mean_s = max(_LOOK_S, wall_s / _MOST_LOOKS)
    try:
        while (left_s := ends_s - clock.monotonic_s()) > 0:
            await clock.sleep_s(min(left_s, max(_SHORTEST_S, random.expovariate(1 / mean_s))))
            await looks.look(sandbox)
    except SandboxError:
        looks.gone = True


async def is_busy(sandbox: AsyncSandbox, wall_s: float, looks: Looks | None = None) -> bool:
    """Tell whether a sandbox itself took the CPU that its tests lacked: half of some time, or what runs in it now.

    Args:
        sandbox: where tests ran.
        wall_s: the time.
        looks: what was seen while they ran.
    """
    seen = looks or Looks()
    try:
        wanting = await seen.look(sandbox)
    except SandboxError:
        return True
    return wanting > 0 or seen.busy(wall_s)


async def _read(sandbox: AsyncSandbox, pid: str, name: str) -> bytes:
    return await sandbox.read_file(f"/proc/{pid}/{name}", max_bytes=4096)


def overload(task: Task) -> VerifierError:
    """Return the error of a wall limit that struck while the machine had no CPU for what it limits."""
    return VerifierError(
        f"a time limit of {task.task_id} struck while the machine had no CPU for its tests",
        remedy="run fewer rollouts at once",
        kind=FailureKind.OVERLOAD,
    )
