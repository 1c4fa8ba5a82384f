"""One rollout: a policy acts in a fork, everything it started ends, and what it left is graded elsewhere.

A rollout always gives an episode. Only cancellation passes, after everything is cleared away.
"""

from __future__ import annotations

import asyncio
import contextlib

from worldfork.core.errors import WorldforkError
from worldfork.core.shielded import to_its_end
from worldfork.rollout.attempt import Attempt, Setting
from worldfork.rollout.outcome import Outcome, Which
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
    except BaseException:
        # Nobody is told of the state that it would have named.
        with contextlib.suppress(WorldforkError, OSError):
            await to_its_end(attempt.drop())
        raise
