"""Faults of ours in rollouts: which kind each is, whose doing a death was, what is tried again, when to give up."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from worldfork.core.errors import CommandError, OutOfSpace, PathError, SandboxDied, WorldforkError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.deaths import asked
from worldfork.lineage.place import place
from worldfork.records.death import Death, DeathCause
from worldfork.records.episode import Failure, FailureKind

MAX_MESSAGE_CHARACTERS = 2000

_HOST_ERRNOS = frozenset({errno.EIO, errno.EMFILE, errno.ENFILE})
"""From a file operation inside, these are the host's trouble. A file system that cannot be written is not: there are
such in every sandbox."""
_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)

_DEATHS = {
    DeathCause.HOST_MEMORY: FailureKind.MEMORY,
    DeathCause.HOST_DISK: FailureKind.SPACE,
    # A sandbox of a rollout has no time of its own but the lease that we gave it.
    DeathCause.TIME: FailureKind.LIMIT,
    DeathCause.OUTSIDE: FailureKind.LOST,
    DeathCause.UNKNOWN: FailureKind.LOST,
}
"""What is ours. A sandbox that broke by itself or took too much disk is the policy's."""

RETRIES: Mapping[FailureKind, int] = {
    FailureKind.START: 1,
    FailureKind.FORK: 2,
    FailureKind.CARRY: 1,
    FailureKind.GRADING: 1,
    FailureKind.OVERLOAD: 2,
    FailureKind.SPACE: 1,
    FailureKind.MEMORY: 2,
    FailureKind.LOST: 2,
    FailureKind.LIMIT: 1,
}
"""How often a rollout is tried again for each kind of fault. What is not here would only happen again."""


def failure_of(stage: FailureKind, error: Exception) -> Failure:
    """Return the failure that an error makes of a rollout, where the policy's own doing has been ruled out.

    Args:
        stage: what was being done; the kind where the error does not say better.
        error: what came of it.
    """
    kind = getattr(error, "kind", stage)
    if isinstance(error, OutOfSpace) or (isinstance(error, OSError) and error.errno in _FULL_ERRNOS):
        kind = FailureKind.SPACE
    elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        kind = FailureKind.MEMORY
    code = error.code if isinstance(error, WorldforkError) else type(error).__name__
    message = str(error)[:MAX_MESSAGE_CHARACTERS]
    return Failure(kind if isinstance(kind, FailureKind) else stage, code, message)


def fault_of(death: Death) -> Failure | None:
    """Return the fault of ours that a policy's sandbox ended by; None where it was the policy's own doing."""
    kind = _DEATHS.get(death.cause)
    if death.cause is DeathCause.ENDED and death.detail != asked().detail:
        # Asked by another process: nothing says that the policy did. By a handle of its own process its program did.
        kind = FailureKind.LOST
    return None if kind is None else Failure(kind, SandboxDied.code, death.detail[:MAX_MESSAGE_CHARACTERS])


async def blame(sandbox: AsyncSandbox, error: Exception, stage: FailureKind) -> Failure | None:
    """Return the fault of ours that an error in a policy's sandbox was; None where it was the policy's own doing.

    Args:
        sandbox: where the policy acts.
        error: what its program, or we, met there.
        stage: the kind of an error that is neither: the program on the host broke, or our reading did.
    """
    if isinstance(error, OutOfSpace):
        return None if error.scope == "sandbox" else failure_of(stage, error)
    death = await sandbox.cause_of_death()
    if death is not None:
        return fault_of(death)
    if isinstance(error, PathError):
        # A file system in memory, of which each sandbox has some, is filled by who is in it.
        ours = error.errno in _HOST_ERRNOS or (error.errno in _FULL_ERRNOS and place().is_full())
        return failure_of(stage, error) if ours else None
    if isinstance(error, CommandError):
        return None
    return failure_of(FailureKind.LOST if isinstance(error, SandboxDied) else stage, error)


@dataclass(frozen=True)
class FaultRules:
    """When a rollout is tried again, and when a run gives up."""

    retries: Mapping[FailureKind, int] = field(default_factory=lambda: dict(RETRIES))
    """Kind -> how often a rollout is tried again for it."""
    most_attempts: int = 4
    """Of one rollout, whatever the kinds."""
    pause_s: float = 0.25
    """Before the second attempt; doubled before each later one."""
    same_in_task: int = 3
    """So many rollouts of a task in a row that fail in the same way, and its others are not begun."""
    breaker: int = 32
    """So many attempts in a row, of all tasks, that failed for our reasons, and nothing more is begun."""


def pause_after(rules: FaultRules, before: tuple[FailureKind, ...]) -> float | None:
    """Return how long to wait before what failed is tried again; None where it is not.

    Args:
        rules: how often it may be.
        before: the kinds of the failures, in order; at least one.
    """
    if len(before) >= rules.most_attempts or before.count(before[-1]) > rules.retries.get(before[-1], 0):
        return None
    return rules.pause_s * float(2 ** (len(before) - 1))


class Faults:
    """Counts the faults of one run and says what follows from them. For one event loop."""

    def __init__(self, rules: FaultRules | None = None) -> None:
        self.rules = rules or FaultRules()
        self.counts: Counter[FailureKind] = Counter()
        """Failed attempts by kind, those that were tried again among them."""
        self._in_a_row = 0
        self._last: Failure | None = None
        self._by_task: dict[str, tuple[tuple[object, ...], int]] = {}

    def note_attempt(self, failure: Failure | None) -> None:
        """Take note of how an attempt ended."""
        if failure is None:
            self._in_a_row = 0
            return
        self.counts[failure.kind] += 1
        if failure.kind is not FailureKind.STOPPED:
            self._in_a_row += 1
            self._last = failure

    def note_rollout(self, task_hash: str, failure: Failure | None) -> None:
        """Take note of how a rollout ended, after its last attempt."""
        if failure is None:
            self._by_task.pop(task_hash, None)
        elif failure.kind is not FailureKind.STOPPED:
            what = (failure.kind, failure.code, failure.message)
            known, count = self._by_task.get(task_hash, (what, 0))
            self._by_task[task_hash] = (what, count + 1 if known == what else 1)

    def pause_s(self, before: tuple[FailureKind, ...]) -> float | None:
        """Return how long to wait before the next attempt of a rollout; None where there is none.

        Args:
            before: the kinds of its failed attempts, in order; at least one.
        """
        if self._in_a_row >= self.rules.breaker:
            return None
        return pause_after(self.rules, before)

    def refusal(self, task_hash: str) -> Failure | None:
        """Return why no rollout of a task is begun any more; None where it may be."""
        if self._in_a_row >= self.rules.breaker:
            return Failure(
                FailureKind.STOPPED,
                "too_many_faults",
                f"{self._in_a_row} attempts in a row failed for our reasons, the last with {_told(self._last)}",
            )
        if task_hash in self._by_task:
            what, count = self._by_task[task_hash]
            if count >= self.rules.same_in_task:
                return Failure(
                    FailureKind.STOPPED,
                    "repeated_fault",
                    f"{count} rollouts of this task in a row failed with {what[1]}: {what[2]}"[:MAX_MESSAGE_CHARACTERS],
                )
        return None


def _told(failure: Failure | None) -> str:
    return "nothing" if failure is None else f"{failure.kind.value}: {failure.message[:300]}"
