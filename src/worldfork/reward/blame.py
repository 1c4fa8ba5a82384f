"""Whose doing it was that a grading came to nothing: the code under test, or the machine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
from collections.abc import Sequence
from typing import Any

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import PathError, SandboxError, VerifierError
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.death import DeathCause
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.needs import ROOM
from worldfork.reward.priority import is_confined, stands_back
from worldfork.reward.starving import Counts
from worldfork.sandbox.accounting import machine_used_s
from worldfork.sandbox.command import CommandResult

STARVED_SHARE = 0.5
"""What waited for a CPU for so much of its wall time was starved."""

_WHOLE_SHARE = 0.9
"""What had a CPU for so much of its wall time had the machine, as far as anybody can tell."""

GRACE_S = 5.0
"""Between the wall limit and the kill: time to ask whether what runs had a CPU."""

CROWDED_SHARE = 0.3
"""In so many of all looks more than one process wanted a CPU: it is its own processes that a sandbox waits for."""

_LOOK_S = 1.5
"""Between two looks, on average; their instants are drawn at random."""
_SHORTEST_S = 1.0
_MOST_LOOKS = 100
"""On average, in the time of a limit."""
_COUNTS = 200
"""The same where a cgroup counts: those take next to no time, and a share that they find is to be sure."""
_MOST_COUNTS = 1000

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

    Where a cgroup counts their CPU use that is asked, outside. Elsewhere they are looked at one by one: one look at the
    end would be told by processes that took the CPU until shortly before it, since what they used is counted nowhere
    once they are gone, if nobody waited for them.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._counts = Counts()
        self._ticks: dict[int, int] = {}
        self._looks = 0
        self._crowded = 0
        self._waited_s = 0.0
        self.counted = False
        """Whether a cgroup counts."""
        self.stood_back = False
        """Whether a process was seen to leave the CPU to others by its own wish; only where none counts."""
        self.gone = False
        """Whether the sandbox could not be asked; it is the code under test that runs there."""

    async def count(self, *sandboxes: AsyncSandbox) -> int | None:
        """Look where cgroups count, at one sandbox or some that take turns; return how many threads want a CPU."""
        uses = [use for each in sandboxes if (use := await each.cpu_use()) is not None]
        if len(uses) < len(sandboxes):
            # Its group goes with a sandbox.
            self.gone |= self.counted
            return None
        self.counted = True
        return self._counts.take(self._clock.monotonic_s(), uses, machine_used_s())

    async def look(self, sandbox: AsyncSandbox, *others: AsyncSandbox) -> int:
        """Look once; return how many processes want a CPU.

        Args:
            sandbox: where they run.
            others: those that take turns with it; looked at only where cgroups count.

        Raises:
            SandboxError: the sandbox cannot be asked.
        """
        counted = await self.count(sandbox, *others)
        if counted is not None or self.counted:
            return counted or 0
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
            if waited_s <= self._waited_s:
                return
            self._waited_s = waited_s
            group = b""
            with contextlib.suppress(PathError):
                group = await _read(sandbox, pid, "autogroup")
            self.stood_back |= is_confined(await _read(sandbox, pid, "status"), group)

    def missed_s(self, over_s: float, since_s: float = -math.inf, needed_cpu_s: float = 0.0) -> float:
        """Return how long something in the sandbox had no CPU that others had: the most in any time of some length.

        Args:
            over_s: that length, in seconds.
            since_s: what was before, on the clock, does not count; nor can it be left out where no cgroup counts.
            needed_cpu_s: CPU seconds that the reference needs of it; 0 where nobody knows.
        """
        if self.gone:
            return 0.0
        if self.counted:
            return self._counts.missed_s(over_s, since_s, ROOM * needed_cpu_s)
        return 0.0 if self.took_it_all(over_s) else self._waited_s

    def took_it_all(self, wall_s: float) -> bool:
        """Tell where no cgroup counts whether the sandbox took the CPU that it lacked, or left it to others."""
        if self.gone or self.stood_back:
            return True
        used_s = sum(self._ticks.values()) / os.sysconf("SC_CLK_TCK")
        return used_s >= STARVED_SHARE * wall_s or (self._looks > 0 and self._crowded >= CROWDED_SHARE * self._looks)


async def run_watched(
    sandbox: AsyncSandbox,
    wall_s: float,
    program: str,
    args: Sequence[str],
    looks: Looks | None = None,
    part_wall_s: float | None = None,
    measured: bool = False,
    needed_cpu_s: float = 0.0,
    **options: Any,
) -> tuple[CommandResult, float]:
    """Run a program with a wall limit; at the limit, ask how long there was no CPU for it.

    Args:
        sandbox: where.
        wall_s: the limit; the program is killed a little later.
        program, args, options: as `AsyncSandbox.run` takes them.
        looks: gets what is seen meanwhile.
        part_wall_s: a shorter time, of which it will be asked whether there was a CPU in it.
        measured: ask of a program that did not meet the limit, too, where a cgroup counts.
        needed_cpu_s: CPU seconds that the reference needs in its place; 0 where nobody knows.

    Returns:
        (the result, for how many seconds others had the CPU; 0 where the limit was not met, unless `measured`).
    """
    looks = looks or Looks()
    watch = asyncio.create_task(_watch(sandbox, wall_s, looks, part_wall_s, needed_cpu_s))
    try:
        result = await sandbox.run(program, args, timeout=wall_s + GRACE_S, **options)
        if not watch.done() and measured and looks.counted:
            watch.cancel()
            await looks.count(sandbox)
            return result, await in_thread(looks.missed_s, result.wall_s)
        if not watch.done() or (not looks.counted and result.cpu_s >= STARVED_SHARE * (result.wall_s - GRACE_S)):
            return result, 0.0
        return result, watch.result()
    finally:
        watch.cancel()


def is_starved(result: CommandResult, missed_s: float, needed_s: float = 0.0) -> bool:
    """Tell whether a program met its wall limit because the machine had no CPU for it."""
    return result.timed_out and is_most(missed_s, result.wall_s - GRACE_S, needed_s)


def is_most(missed_s: float, wall_s: float, needed_s: float = 0.0) -> bool:
    """Tell whether so much of a wall time was missed that it might not have struck otherwise.

    Whoever had at least half of it, and twice what the reference needs, was late by itself. Where the reference needs
    so much that there is no such time, nine tenths are enough: code that sleeps misses nothing, and code that spins on
    a machine that is free misses next to nothing, so that what the reference needs never excuses either.

    Args:
        missed_s: for how long of it others had the CPU.
        wall_s: that time, in seconds.
        needed_s: of it the reference needs so much on a machine of its own; 0 where nobody knows.
    """
    enough_s = max(STARVED_SHARE * wall_s, min(ROOM * needed_s, _WHOLE_SHARE * wall_s))
    return missed_s > 0 and missed_s >= wall_s - enough_s


async def _watch(
    sandbox: AsyncSandbox, wall_s: float, looks: Looks, part_wall_s: float | None, needed_cpu_s: float
) -> float:
    await look_until((sandbox,), wall_s, looks, part_wall_s=part_wall_s)
    # In a thread: how many looks and threads there were is up to the code under test.
    return await in_thread(looks.missed_s, wall_s, -math.inf, needed_cpu_s)


async def look_until(
    sandboxes: Sequence[AsyncSandbox],
    wall_s: float,
    looks: Looks,
    clock: Clock | None = None,
    part_wall_s: float | None = None,
) -> None:
    """Look at random instants, and last at the end of some time. A sandbox that cannot be asked counts as busy.

    Args:
        sandboxes: where something runs, the code under test in the first.
        wall_s: the time.
        looks: gets what is seen.
        clock: whose time it is.
        part_wall_s: a shorter time for which there are to be looks enough, too.
    """
    clock = clock or SystemClock()
    ends_s = clock.monotonic_s() + wall_s
    try:
        # What was used before does not count.
        await looks.count(*sandboxes)
        if looks.counted:
            mean_s = max(wall_s / _MOST_COUNTS, min(_LOOK_S, min(wall_s, part_wall_s or wall_s) / _COUNTS))
            least_s = mean_s / 4
        else:
            mean_s, least_s = max(_LOOK_S, wall_s / _MOST_LOOKS), _SHORTEST_S
        while (left_s := ends_s - clock.monotonic_s()) > 0:
            await clock.sleep_s(min(left_s, max(least_s, random.expovariate(1 / mean_s))))
            await looks.look(*sandboxes)
    except SandboxError:
        looks.gone = True


async def settle_looks(sandbox: AsyncSandbox, looks: Looks) -> None:
    """Look once more, where tests are over. What still wants a CPU then took it from them, where no cgroup counts."""
    try:
        wanting = await looks.look(sandbox)
    except SandboxError:
        looks.gone = True
    else:
        looks.gone |= wanting > 0 and not looks.counted


async def _read(sandbox: AsyncSandbox, pid: str, name: str) -> bytes:
    return await sandbox.read_file(f"/proc/{pid}/{name}", max_bytes=4096)


def overload(task: Task) -> VerifierError:
    """Return the error of a wall limit that struck while the machine had no CPU for what it limits."""
    return VerifierError(
        f"a time limit of {task.task_id} struck while the machine had no CPU for its tests",
        remedy="run fewer rollouts at once",
        kind=FailureKind.OVERLOAD,
    )
