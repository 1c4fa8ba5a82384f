"""One rollout: a policy acts in a fork, everything it started ends, and what it left is graded elsewhere.

A rollout always gives an episode. Faults of ours become a failure with a kind and no reward; what the policy's
own processes brought upon its sandbox is scored as what it is worth. Only cancellation passes.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass, field, replace

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import (
    CommandError,
    OutOfSpace,
    PathError,
    SandboxDied,
    WorldforkError,
)
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import Episode, Failure, FailureKind, Timings
from worldfork.records.sandbox import SandboxStatus
from worldfork.records.task import Task
from worldfork.reward.carry import carry_out
from worldfork.reward.pytest_verifier import Grade, PytestVerifier
from worldfork.rollout.policies import Policy
from worldfork.rollout.starts import StartingState

MAX_MESSAGE_CHARACTERS = 2000

_HOST_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE})
"""A sandbox's own disk limit is an `OutOfSpace`; these from a file operation are the host's trouble."""


@dataclass
class _Draft:
    """What is known of an episode so far."""

    stage: FailureKind = FailureKind.FORK
    policy_end: str = "finished"
    sandbox_id: str | None = None
    grade: Grade | None = None
    expected: tuple[str, ...] = ()
    untouched: tuple[str, ...] = ()
    timings: Timings = field(default_factory=Timings)


async def run_rollout(
    task: Task,
    policy: Policy,
    index: int,
    start: StartingState,
    verifier: PytestVerifier,
    clock: Clock | None = None,
) -> Episode:
    """Run one rollout and return its episode, scored or failed.

    Args:
        task: the problem.
        policy: what acts.
        index: the place within the group, from 0; the fork's index.
        start: the task's starting state.
        verifier: what grades.
    """
    clock = clock or SystemClock()
    draft = _Draft()
    started_s, began_s = clock.now_s(), clock.monotonic_s()
    failure = None
    try:
        edits = await _take_turn(draft, task, policy, index, start, clock)
        await _grade(draft, task, start, verifier, edits)
    except Exception as error:
        failure = _failure(draft.stage, error)
    draft.timings = replace(draft.timings, total_s=clock.monotonic_s() - began_s)
    return _episode(draft, task, policy, index, start, started_s, failure)


async def _take_turn(
    draft: _Draft, task: Task, policy: Policy, index: int, start: StartingState, clock: Clock
) -> dict[str, bytes] | None:
    """Let the policy act; return the files that it left, or None if its sandbox did not live to give them."""
    began_s = clock.monotonic_s()
    async with start.fork(index) as sandbox:
        draft.sandbox_id = sandbox.sandbox_id
        draft.stage = FailureKind.POLICY
        forked_s = clock.monotonic_s()
        draft.timings = replace(draft.timings, fork_s=forked_s - began_s)
        draft.policy_end = await _act(sandbox, task, policy, index)
        draft.stage = FailureKind.CARRY
        acted_s = clock.monotonic_s()
        draft.timings = replace(draft.timings, policy_s=acted_s - forked_s)
        try:
            edits = await carry_out(sandbox, task)
        except (SandboxDied, OutOfSpace) as error:
            if not await _is_own_doing(sandbox, error):
                raise
            draft.policy_end, edits = error.code, None
    draft.timings = replace(draft.timings, carry_s=clock.monotonic_s() - acted_s)
    return edits


async def _act(sandbox: AsyncSandbox, task: Task, policy: Policy, index: int) -> str:
    """Let the policy act; return how its turn ended.

    A policy program that meets the state of its own sandbox in an error has ended its turn by what it did there.
    Any other error is one of the program on the host.
    """
    try:
        async with asyncio.timeout(task.limits.policy_wall_s) as limit:
            await policy.act(sandbox, task, index)
    except Exception as error:
        if limit.expired():
            return "timed_out"
        if await _is_own_doing(sandbox, error):
            return error.code if isinstance(error, WorldforkError) else SandboxDied.code
        raise
    return "finished"


async def _is_own_doing(sandbox: AsyncSandbox, error: Exception) -> bool:
    if isinstance(error, OutOfSpace):
        return error.scope == "sandbox"
    if isinstance(error, PathError):
        return error.errno not in _HOST_ERRNOS
    if isinstance(error, SandboxDied | CommandError):
        return True
    # Whatever the policy program made of it: a sandbox that is gone was ended by what ran in it.
    return await sandbox.status() is SandboxStatus.TERMINATED


async def _grade(
    draft: _Draft, task: Task, start: StartingState, verifier: PytestVerifier, edits: dict[str, bytes] | None
) -> None:
    draft.stage = FailureKind.GRADING
    if edits is None:
        calibration = await verifier.calibrate(task, start)
        draft.expected, draft.untouched = calibration.expected, calibration.untouched
        return
    grade = draft.grade = await verifier.grade(task, start, edits)
    draft.expected, draft.untouched = grade.calibration.expected, grade.calibration.untouched
    draft.timings = replace(
        draft.timings, calibrate_s=grade.calibrate_s, grade_s=grade.grade_s, grade_cpu_s=grade.trial.cpu_s
    )


def failed_before(
    task: Task, policy: Policy, index: int, started_s: float, stage: FailureKind, error: Exception
) -> Episode:
    """Return the episode of a rollout that could not begin."""
    return Episode(
        task_id=task.task_id,
        task_hash=task.task_hash,
        policy_id=policy.policy_id,
        index=index,
        reward=None,
        failure=_failure(stage, error),
        started_s=started_s,
    )


def _failure(stage: FailureKind, error: Exception) -> Failure:
    kind = getattr(error, "kind", stage)
    if isinstance(error, OutOfSpace) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        kind = FailureKind.SPACE
    code = error.code if isinstance(error, WorldforkError) else type(error).__name__
    return Failure(kind if isinstance(kind, FailureKind) else stage, code, str(error)[:MAX_MESSAGE_CHARACTERS])


def _episode(
    draft: _Draft,
    task: Task,
    policy: Policy,
    index: int,
    start: StartingState,
    started_s: float,
    failure: Failure | None,
) -> Episode:
    grade = None if failure else draft.grade
    reward = None if failure else 0.0 if grade is None else grade.reward
    return Episode(
        task_id=task.task_id,
        task_hash=task.task_hash,
        policy_id=policy.policy_id,
        index=index,
        reward=reward,
        failure=failure,
        parts=dict(grade.parts) if grade else {},
        expected=draft.expected,
        passed=grade.passed if grade else (),
        failed=grade.failed if grade else (),
        untouched=draft.untouched,
        policy_end=draft.policy_end,
        grade_end=grade.trial.end if grade else None,
        started_s=started_s,
        timings=draft.timings,
        snapshot_id=start.snapshot_id,
        sandbox_id=draft.sandbox_id,
        grading_sandbox_id=grade.sandbox_id if grade else None,
    )
