"""The repository tasks: worlds built from the registry, reference and nop, a rollout with its world at hand."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from bench.harness import Options, Skip, figure, must, say
from bench.worlds import library

TASKS = 18
ROUNDS = 3
"""Rollouts of each policy that are timed, of each task."""


def _tasks(options: Options) -> list[Any]:
    from worldfork.rollout.loading import load_tasks

    path = options.data / "repos.jsonl"
    if not path.exists():
        raise Skip(f"{path.name} is not in {options.data}; --data names the directory of the task sets")
    tasks = load_tasks(path)
    if len(tasks) != TASKS:
        raise Skip(f"{path.name} holds {len(tasks)} tasks where {TASKS} are meant")
    return tasks[: options.samples(TASKS, 2)]


async def _build(tasks: list[Any]) -> dict[str, dict[str, Any]]:
    """Build each world, and take it again as a process does that finds it."""
    from worldfork.rollout.starts import StartingStates

    found = {}
    for task in tasks:
        spent = []
        for _ in range(2):
            states = await StartingStates.open()
            began = time.perf_counter()
            state = await states.get(task)
            spent.append(round(time.perf_counter() - began, 3))
        say(f"  {task.task_id}: built in {spent[0]} s, found in {spent[1]} s")
        found[task.task_id] = {"build_s": spent[0], "found_s": spent[1], "tests_n": len(state.tests)}
    return found


async def _round(tasks: list[Any], policy: str) -> list[Any]:
    from worldfork.rollout.group import run_rollouts
    from worldfork.rollout.policies import policy_named

    def show(episode: Any) -> None:
        said = episode.failure.message if episode.failure else f"{episode.reward} in {episode.timings.total_s:.1f} s"
        say(f"  {policy}: {episode.task_id}: {said}")

    return await run_rollouts(tasks, policy_named(policy), concurrency=1, on_episode=show)


def run(options: Options) -> dict[str, Any]:
    """Whether every reference is worth 1.0 and nothing is worth less, and what a rollout takes."""
    library(options)
    tasks = _tasks(options)
    values: dict[str, Any] = {"tasks_n": len(tasks), "tasks": asyncio.run(_build(tasks))}
    bars = []
    for policy in ("reference", "nop"):
        # The first round calibrates; it is not timed.
        rounds = [asyncio.run(_round(tasks, policy)) for _ in range(1 + options.samples(ROUNDS, 1))]
        rewards = [{episode.task_id: episode.reward for episode in episodes} for episodes in rounds]
        good = [
            task.task_id
            for task in tasks
            if all(_is_right(policy, reward[task.task_id]) for reward in rewards)
        ]  # fmt: skip
        meant = "1.0" if policy == "reference" else "below 1.0"
        bars.append(must(f"{policy} {meant}, each time", len(good) == len(tasks), said=f"{len(good)} of {len(tasks)}"))
        values[f"{policy}_rewards"] = rewards[-1]
        for number, task in enumerate(tasks):
            timed = [episodes[number].timings for episodes in rounds[1:]]
            values["tasks"][task.task_id][policy] = {
                name: round(statistics.median(getattr(each, name) or 0.0 for each in timed), 3)
                for name in ("fork_s", "policy_s", "carry_s", "grade_s", "grade_cpu_s", "total_s")
            }
    totals = [each["reference"]["total_s"] for each in values["tasks"].values()]
    values["rollout_median_s"] = round(statistics.median(totals), 2)
    own = [each["reference"]["total_s"] - each["reference"]["grade_s"] for each in values["tasks"].values()]
    values["rollout_besides_grading_median_s"] = round(statistics.median(own), 3)
    return figure("repositories", "18 repository tasks: worlds, reference and nop, time of a rollout", values, bars)


def _is_right(policy: str, reward: float | None) -> bool:
    return reward is not None and (reward == 1.0) == (policy == "reference")
