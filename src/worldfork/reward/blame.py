"""Whose doing it was that a grading came to nothing: the code under test, or the machine."""

from __future__ import annotations

import contextlib
import os

from worldfork.core.errors import PathError, SandboxError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.death import DeathCause
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task

_STARVED_SHARE = 0.5
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
    return wanting > running or used_ticks / os.sysconf("SC_CLK_TCK") >= _STARVED_SHARE * wall_s


def overload(task: Task) -> VerifierError:
    """Return the error of a wall limit that struck while the machine had no CPU for what it limits."""
    return VerifierError(
        f"a time limit of {task.task_id} struck while the machine had no CPU for its tests",
        remedy="run fewer rollouts at once",
        kind=FailureKind.OVERLOAD,
    )
