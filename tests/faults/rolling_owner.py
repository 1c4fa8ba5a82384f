"""A process that rolls out a group of 64, slowly: the test kills it in the middle.

Arguments: the run's directory, how many seconds each turn takes.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tests.faults.rolling import Acting, Forked, a_task, solve, states

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.rollout.group import run_rollouts

N = 64


async def main(run: str, turn_s: float) -> None:
    """Roll out, and say each index as its episode ends."""

    async def act(sandbox: AsyncSandbox, turn: Any) -> None:
        await solve(sandbox, turn)
        # The first eight end at once, so that there is finished work to be kept.
        await asyncio.sleep(turn_s if turn.index >= 8 else 0)

    episodes = await run_rollouts(
        [a_task()],
        Acting(act),
        n=N,
        concurrency=N,
        starts=await states(),
        verifier=Forked(),
        run=run,
        on_episode=lambda each: print(each.index, each.reward, each.attempt, flush=True),
    )
    print("whole", sum(each.reward == 1.0 for each in episodes), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
