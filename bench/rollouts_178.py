"""Every task of the sets, with the reference and with a policy that does nothing, twice."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.harness import Options, Skip, figure, must, say
from bench.worlds import library

SETS = {"quixbugs.jsonl": 40, "exercism.jsonl": 138}
ROUNDS = 2


def _tasks(options: Options) -> list[Any]:
    from worldfork.rollout.loading import load_tasks

    missing = [name for name in SETS if not (options.data / name).exists()]
    if missing:
        raise Skip(f"{missing[0]} is not in {options.data}; --data names the directory of the task sets")
    tasks = []
    for name, count in SETS.items():
        found = load_tasks(options.data / name)
        if len(found) != count:
            raise Skip(f"{name} holds {len(found)} tasks where {count} are meant")
        tasks += found[: options.samples(count, 3)]
    return tasks


def _round(tasks: list[Any], policy: str) -> tuple[list[Any], float]:
    from worldfork.rollout.group import run_rollouts
    from worldfork.rollout.policies import policy_named

    done = 0

    def count(episode: Any) -> None:
        nonlocal done
        done += 1
        if _is_odd(episode, policy):
            say(f"  {policy}: {episode.task_id}: {_words(episode)}")
        if done % 25 == 0:
            say(f"  {policy}: {done} of {len(tasks)}")

    start = time.perf_counter()
    episodes = asyncio.run(run_rollouts(tasks, policy_named(policy), on_episode=count))
    return episodes, time.perf_counter() - start


def _is_odd(episode: Any, policy: str) -> bool:
    return episode.reward is None or (episode.reward == 1.0) != (policy == "reference")


def _words(episode: Any) -> str:
    return episode.failure.message if episode.failure else f"{episode.reward} ({episode.grade_end})"


def _account(episodes: list[Any], policy: str) -> dict[str, Any]:
    rewards = [episode.reward for episode in episodes]
    stages = ("fork_s", "policy_s", "carry_s", "calibrate_s", "grade_s", "grade_cpu_s", "total_s")
    return {
        "stages": {name: round(sum(getattr(e.timings, name) or 0.0 for e in episodes), 1) for name in stages},
        "full_n": sum(reward == 1.0 for reward in rewards),
        "below_full_n": sum(reward is not None and reward < 1.0 for reward in rewards),
        "failed_n": sum(reward is None for reward in rewards),
        "odd": {episode.task_id: _words(episode) for episode in episodes if _is_odd(episode, policy)},
    }


def run(options: Options) -> dict[str, Any]:
    """Rewards of both policies in both rounds, and whether the sets of passed ids agree."""
    library(options)
    tasks = _tasks(options)
    values: dict[str, Any] = {"tasks_n": len(tasks)}
    bars = []
    for policy in ("reference", "nop"):
        passed = []
        for number in range(1, ROUNDS + 1):
            episodes, taken = _round(tasks, policy)
            account = _account(episodes, policy)
            full = policy == "reference"
            values[f"{policy}_{number}"] = {**account, "wall_s": round(taken, 1)}
            met = account["full_n" if full else "below_full_n"]
            said = f"{met} of {len(tasks)}"
            bars.append(
                must(f"{policy} {'1.0' if full else 'below 1.0'}, round {number}", met == len(tasks), said=said)
            )
            passed.append({episode.task_id: episode.passed for episode in episodes})
        differ = sorted(name for name in passed[0] if passed[0][name] != passed[1][name])
        values[f"{policy}_differing_tasks"] = differ
        bars.append(
            must(f"{policy}: the same sets of passed ids in both rounds", not differ, said=f"{len(differ)} differ")
        )
    return figure("rollouts_178", "every task of the sets, reference and nop, twice", values, bars)
