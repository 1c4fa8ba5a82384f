"""Every reference of the sets with four times as many gradings at a time as there are CPUs: 1.0, or a typed None."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from typing import Any
from unittest.mock import patch

from bench.harness import Options, figure, must, say
from bench.rollouts_178 import _tasks, _words
from bench.worlds import library

OVER = 4


def run(options: Options) -> dict[str, Any]:
    """The rewards, and how many rollouts failed with which kind."""
    library(options)
    tasks = _tasks(options)
    from worldfork.rollout import group
    from worldfork.rollout.faults import FaultRules
    from worldfork.rollout.policies import policy_named

    at_a_time = OVER * len(os.sched_getaffinity(0))
    done = 0

    def count(episode: Any) -> None:
        nonlocal done
        done += 1
        if episode.reward != 1.0:
            say(f"  {episode.task_id}: {_words(episode)}")
        if done % 25 == 0:
            say(f"  {done} of {len(tasks)}")

    # Nothing is tried again: each None is to be seen.
    rules = FaultRules(retries={}, same_in_task=len(tasks) + 1, breaker=len(tasks) + 1)
    began_s = time.perf_counter()
    # No more are graded at a time than there are CPUs, of which this is to do without.
    with patch.object(group, "cpus", lambda: at_a_time):
        work = group.run_rollouts(
            tasks, policy_named("reference"), concurrency=at_a_time, rules=rules, on_episode=count
        )
        episodes = asyncio.run(work)
    wall_s = time.perf_counter() - began_s
    less = {e.task_id: _words(e) for e in episodes if e.reward is not None and e.reward != 1.0}
    kinds = Counter(e.failure.kind.value for e in episodes if e.failure is not None)
    full = sum(e.reward == 1.0 for e in episodes)
    values = {
        "tasks_n": len(tasks),
        "at_a_time_n": at_a_time,
        "full_n": full,
        "none_by_kind": dict(kinds),
        "below_full": less,
        "wall_s": round(wall_s, 1),
    }
    said = f"{full} of {len(tasks)} have 1.0, {sum(kinds.values())} none, {len(less)} less"
    bars = [
        must("every reference 1.0 or a typed None", not less and full + sum(kinds.values()) == len(tasks), said=said)
    ]
    return figure("oversubscribed", f"every reference, {at_a_time} at a time", values, bars)
