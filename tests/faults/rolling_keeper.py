"""A process that rolls out a group whose final states it keeps, and dies at a named step.

Arguments: the run's directory, `best` or `all`, the step or an empty word, at which of its passes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from tests.faults.rolling import Acting, Forked, a_task, solve, states

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.reward.verifier import Case, Grade
from worldfork.rollout.group import run_rollouts
from worldfork.rollout.stopping import StopRule
from worldfork.store import faultpoints

REWARDS = (0.2, 0.6, 0.4, 1.0, 0.9)
ENOUGH = 4
"""How many of the group count: what comes after the first 1.0 lies behind the cut."""


class ByIndex(Forked):
    """Gives each rollout a reward that is known beforehand."""

    async def grade(self, case: Case) -> Grade:
        return Grade(REWARDS[case.index])


async def main(run: str, keep: str, step: str, number: int) -> None:
    """Roll out, and say how it ended."""
    starts = await states()
    await starts.get(a_task())
    left = number

    def die(name: str) -> None:
        nonlocal left
        if name == step:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    async def act(sandbox: AsyncSandbox, turn: Any) -> None:
        await solve(sandbox, turn)
        # The one behind the cut ends before that is known.
        await asyncio.sleep(0 if turn.index == ENOUGH else 0.3)

    faultpoints.install(die)
    episodes = await run_rollouts(
        [a_task()],
        Acting(act),
        n=len(REWARDS),
        concurrency=len(REWARDS),
        starts=starts,
        verifier=ByIndex(),
        run=run,
        keep=keep,
        stop=StopRule(target_reward=1.0),
    )
    faultpoints.install(None)
    print([each.final_snapshot_id is not None for each in episodes], flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
