"""The group of the demo: eight candidates, a fork for each, and hidden tests where none of them has been."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass
from typing import Any

from worldfork import Sandbox
from worldfork.core.errors import VerifierError
from worldfork.records.task import Task
from worldfork.reward.advantages import group_advantages
from worldfork.reward.places import TASK_DIRECTORY, inside_task
from worldfork.rollout.demo_task import DEMO_REWARDS, demo_candidates, demo_task
from worldfork.rollout.group import run_group
from worldfork.rollout.policies import CandidatesPolicy

PLAIN_TIMEOUT_S = 60.0

PLAIN_RUNNER = '''
"""Runs inside a fork that has no pytest: calls every test function and says how each ended."""
import contextlib, importlib.util, json, sys, types

class Raises(contextlib.AbstractContextManager):
    def __init__(self, kind):
        self.kind = kind

    def __exit__(self, kind, error, trace):
        assert kind is not None, "nothing was raised"
        return issubclass(kind, self.kind)

stand_in = types.ModuleType("pytest")
stand_in.raises = Raises
sys.modules["pytest"] = stand_in
sys.path.insert(0, ".")
ended = {}
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("hidden", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        continue
    for name, test in list(vars(module).items()):
        if name.startswith("test_") and callable(test):
            try:
                test()
                ended[f"{path}::{name}"] = True
            except BaseException:
                ended[f"{path}::{name}"] = False
print(json.dumps(ended))
'''


@dataclass(frozen=True)
class Scored:
    """A graded group."""

    episodes: list[dict[str, Any]]
    """As JSON, in the order of the group; `task_id`, `index` and `reward` at least."""
    lines: list[tuple[int, float | None, int, int, str]]
    """Index, reward, tests passed, tests expected, failure: what a printed line needs."""
    took_s: float
    """Wall time of the whole group."""

    @property
    def rewards(self) -> list[float | None]:
        """The reward vector."""
        return [episode["reward"] for episode in self.episodes]

    @property
    def advantages(self) -> list[float | None]:
        """Each reward less the mean of the group."""
        return group_advantages(self.rewards)

    @property
    def as_known(self) -> bool:
        """Whether each candidate got the reward that it is known to deserve."""
        return len(self.rewards) == len(DEMO_REWARDS) and all(
            reward is not None and math.isclose(reward, known)
            for reward, known in zip(self.rewards, DEMO_REWARDS, strict=True)
        )


def roll_out(snapshot_id: str, *, with_pytest: bool) -> Scored:
    """Run and grade the demo's group from the world that was just built.

    Args:
        snapshot_id: the world.
        with_pytest: whether it holds pytest, and so can be graded by the library's own verifier.

    Raises:
        VerifierError: the hidden tests could not be run at all.
    """
    began_s = time.perf_counter()
    episodes = _by_verifier(snapshot_id) if with_pytest else _by_hand(snapshot_id)
    took_s = time.perf_counter() - began_s
    return Scored(episodes, [_line(episode) for episode in episodes], took_s)


def _line(episode: dict[str, Any]) -> tuple[int, float | None, int, int, str]:
    failure = episode["failure"]
    return (
        episode["index"],
        episode["reward"],
        len(episode["passed"]),
        len(episode["expected"]),
        "" if failure is None else failure["message"],
    )


def _by_verifier(snapshot_id: str) -> list[dict[str, Any]]:
    """Grade with the library: the same calls that `worldfork rollout` makes, on a world of our own."""
    policy = CandidatesPolicy(demo_candidates())
    world = Sandbox.get_snapshot(snapshot_id)
    group = asyncio.run(run_group(demo_task(), policy, len(policy), world=world))
    for start in {episode.snapshot_id for episode in group.episodes} - {None, snapshot_id}:
        Sandbox.delete_snapshot(str(start))
    return [episode.to_json() for episode in group.episodes]


def _by_hand(snapshot_id: str) -> list[dict[str, Any]]:
    """Grade without pytest: each candidate in a fork of its own, with the loop of `PLAIN_RUNNER`."""
    task = demo_task()
    candidates = list(demo_candidates().values())
    forks = Sandbox.get_snapshot(snapshot_id).fork(len(candidates) + 1).unwrap()
    try:
        expected, *ended = [
            _plain_tests(fork, task, files)
            for fork, files in zip(forks, [dict(task.solution), *candidates], strict=True)
        ]
    finally:
        for fork in forks:
            fork.terminate()
    if not expected:
        raise VerifierError("not one hidden test of the demo could be run")
    return [_plain_episode(task, index, sorted(expected), passed) for index, passed in enumerate(ended)]


def _plain_tests(fork: Sandbox, task: Task, files: dict[str, str]) -> list[str]:
    for path, text in {**task.files, **files, **task.hidden_tests}.items():
        fork.write_file(inside_task(path), text.encode())
    result = fork.run(
        "python", ["-c", PLAIN_RUNNER, *task.hidden_tests], working_dir=TASK_DIRECTORY, timeout=PLAIN_TIMEOUT_S
    )
    lines = result.stdout.strip().splitlines()
    ended: dict[str, bool] = json.loads(lines[-1]) if result.ok and lines else {}
    return [test for test, passed in ended.items() if passed]


def _plain_episode(task: Task, index: int, expected: list[str], passed: list[str]) -> dict[str, Any]:
    counted = [test for test in expected if test in passed]
    return {
        "task_id": task.task_id,
        "task_hash": task.task_hash,
        "policy_id": "candidates",
        "index": index,
        "reward": len(counted) / len(expected),
        "failure": None,
        "expected": expected,
        "passed": counted,
    }
