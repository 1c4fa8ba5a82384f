"""QuixBugs by `mutate`: how many of the 40 defects one of 64 small changes repairs, and whether the seed decides it."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.harness import Options, Skip, figure, must, say
from bench.worlds import library

GROUP = 64
SEED = 0
QUICK = ("quixbugs/flatten", "quixbugs/gcd", "quixbugs/knapsack")
"""Tasks that a few rollouts repair."""
AGAIN = 6
"""Tasks that are run a second time."""


def _tasks(options: Options) -> list[Any]:
    from worldfork.rollout.loading import load_tasks

    path = options.data / "quixbugs.jsonl"
    if not path.exists():
        raise Skip(f"{path.name} is not in {options.data}; --data names the directory of the task sets")
    tasks = [_bounded(task) for task in load_tasks(path)]
    return [task for task in tasks if task.task_id in QUICK] if options.quick else tasks


def _bounded(task: Any) -> Any:
    """Give up sooner on a program that never ends: many changed programs do not, and no reference takes 3 s."""
    args = tuple("--timeout=4" if each.startswith("--timeout") else each for each in task.test_args)
    return dataclasses.replace(task, test_args=args, limits=dataclasses.replace(task.limits, grade_cpu_s=10))


def _run(tasks: Sequence[Any], size: int, directory: Path) -> dict[str, list[Any]]:
    """Run the groups until each has one repair; task -> its episodes."""
    from worldfork.rollout.group import run_rollouts
    from worldfork.rollout.policies import MutatePolicy
    from worldfork.rollout.stopping import StopRule

    done = 0

    def count(episode: Any) -> None:
        nonlocal done
        done += 1
        if episode.reward == 1.0:
            say(f"  {episode.task_id}: repaired by rollout {episode.index}")
        if done % 100 == 0:
            say(f"  {done} rollouts")

    episodes = asyncio.run(
        run_rollouts(
            tasks, MutatePolicy(SEED), n=size, stop=StopRule(successes=1), run=directory, on_episode=count
        )
    )  # fmt: skip
    return {name: list(found) for name, found in groupby(episodes, key=lambda each: each.task_id)}


def _cut(episodes: Sequence[Any]) -> list[tuple[int, Any, Any]]:
    """Return what was written and what it was worth, up to the first repair."""
    found = []
    for episode in episodes:
        found.append((episode.index, episode.edits, episode.reward))
        if episode.reward == 1.0:
            break
    return found


def run(options: Options) -> dict[str, Any]:
    """Take the figure."""
    library(options)
    tasks = _tasks(options)
    size = options.samples(GROUP, 8)
    with tempfile.TemporaryDirectory(dir=options.home) as directory:
        start = time.perf_counter()
        groups = _run(tasks, size, Path(directory, "first"))
        wall_s = time.perf_counter() - start
        again = [task for task in tasks if any(each.reward == 1.0 for each in groups[task.task_id])][:AGAIN]
        second = _run(again, size, Path(directory, "second")) if again else {}
    first_at = {
        name: next((each.index for each in found if each.reward == 1.0), None) for name, found in groups.items()
    }
    solved = sum(index is not None for index in first_at.values())
    failed = [
        each
        for found in groups.values()
        for each in found
        if each.failure is not None and each.failure.kind.value != "stopped"
    ]
    differ = sorted(name for name, found in second.items() if _cut(found) != _cut(groups[name]))
    values = {
        "tasks_n": len(tasks),
        "group_n": size,
        "seed": SEED,
        "solved_n": solved,
        "first_repair": first_at,
        "rollouts_n": sum(each.reward is not None for found in groups.values() for each in found),
        "wall_s": round(wall_s, 1),
        "failed": [(each.task_id, each.index, each.failure.kind.value, each.failure.message) for each in failed[:20]],
        "again": sorted(second),
    }
    bars = [
        must(f"some of {len(tasks)} are repaired", solved > 0, said=f"{solved} of {len(tasks)}"),
        must("no rollout failed", not failed, said=f"{len(failed)} failed"),
        must("the same seed, the same programs and rewards", not differ, said=f"{len(differ)} of {len(second)} differ"),
    ]
    return figure("mutate", f"QuixBugs by `mutate`, best of {size} per task", values, bars)
