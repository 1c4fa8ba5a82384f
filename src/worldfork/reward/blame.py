"""Whose doing it was that a grading came to nothing: the code under test, or the machine."""

from __future__ import annotations

from worldfork.core.errors import VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.death import DeathCause
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task

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


def overload(task: Task) -> VerifierError:
    """Return the error of a wall limit that struck while the machine had no CPU for what it limits."""
    return VerifierError(
        f"a time limit of {task.task_id} struck while the machine had no CPU for its tests",
        remedy="run fewer rollouts at once",
        kind=FailureKind.OVERLOAD,
    )
