"""One rollout: a policy acts in a fork, everything it started ends, and what it left is graded elsewhere.

A rollout always gives an episode. Only cancellation passes, after everything is cleared away.
"""

from __future__ import annotations

import asyncio

from worldfork.records.episode import Episode, FailureKind
from worldfork.rollout.attempt import Attempt, Outcome, Setting, Which
from worldfork.rollout.bounds import to_its_end
from worldfork.rollout.faults import failure_of
from worldfork.rollout.turn import Agent


async def run_rollout(which: Which, policy: Agent, setting: Setting) -> Outcome:
    """Make one attempt at a rollout and return its episode, scored or failed, with what that names.

    Args:
        which: the task, the index, the seed, the attempt.
        policy: what acts.
        setting: the starting state, the verifier, and what else a run's rollouts share.
    """
    attempt = Attempt(which, setting)
    try:
        await attempt.begin()
        await attempt.act(policy)
        await attempt.carry()
        await attempt.judge()
        await attempt.describe()
    except asyncio.CancelledError:
        attempt.stop("cancelled", "the rollout was cancelled")
        raise
    finally:
        # A second cancellation must not leave a sandbox behind.
        await to_its_end(attempt.clear())
    return attempt.outcome()


def failed_before(which: Which, started_s: float, stage: FailureKind, error: Exception) -> Episode:
    """Return the episode of a rollout that could not begin."""
    return Episode(
        task_id=which.task.task_id,
        task_hash=which.task.task_hash,
        policy_id=which.policy_id,
        index=which.index,
        reward=None,
        failure=failure_of(stage, error),
        started_s=started_s,
        seed=which.seed,
        attempt=which.attempt,
        faults=which.faults,
        group_id=which.group_id,
    )
