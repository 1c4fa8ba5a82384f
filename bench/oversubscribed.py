"""Every reference with four times as many gradings at a time as there are CPUs: 1.0, or a typed None.

Then honest tests of two workers near their wall limit in the same way, and beside them wrong code that takes the CPU
from itself, which is to get its 0.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from bench.harness import Options, figure, must, say
from bench.rollouts_178 import _tasks, _words
from bench.worlds import library

OVER = 4

TEST = "from answer import value\n\n\ndef test_value():\n    assert value(1) == 2\n"
WALL_S = 12.0

TWO_WORKERS = """\
import os, time

def value(x):
    workers = []
    for _ in range(2):
        worker = os.fork()
        if worker == 0:
            while time.process_time() < 3.6:
                pass
            os._exit(0)
        workers.append(worker)
    for worker in workers:
        os.waitpid(worker, 0)
    return x + 1
"""

STARVES = f"""\
import os, signal, time

def value(x):
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ends = time.monotonic() + {WALL_S - 0.7}
    for _ in range(40):
        if os.fork() == 0:
            while time.monotonic() < ends:
                pass
            os._exit(0)
    while time.monotonic() < ends:
        pass
    time.sleep(1000)
"""


def run(options: Options) -> dict[str, Any]:
    """The rewards, and how many rollouts failed with which kind."""
    library(options)
    tasks = _tasks(options)
    from worldfork.rollout.policies import CandidatesPolicy, policy_named

    at_a_time = OVER * len(os.sched_getaffinity(0))
    began_s = time.perf_counter()
    episodes = _rolled(tasks, policy_named("reference"), at_a_time, _counting(len(tasks)))
    wall_s = time.perf_counter() - began_s
    values, bars = _judged("every reference", episodes)
    values |= {"tasks_n": len(tasks), "at_a_time_n": at_a_time, "wall_s": round(wall_s, 1)}
    near = [_parallel(number) for number in range(2 * at_a_time)]
    # What is expected of each is learned while there is a CPU for it.
    _rolled(near, policy_named("nop"), 1)
    two, more = _judged("every pair of workers", _rolled(near, policy_named("reference"), at_a_time))
    starving = CandidatesPolicy({"one": {"answer.py": STARVES}})
    alone = [episode.reward for episode in _rolled(near[:2], starving, 1)]
    values |= {"two_workers": two, "starves_itself": alone}
    bars += [*more, must("what takes the CPU from itself has its 0", alone == [0.0, 0.0], said=str(alone))]
    return figure("oversubscribed", f"every reference, {at_a_time} at a time", values, bars)


def _parallel(number: int) -> Any:
    from worldfork.records.task import Task
    from worldfork.records.task_limits import TaskLimits

    return Task(
        task_id=f"oversubscribed/{number}",
        prompt="",
        files={"answer.py": "def value(x):\n    return None\n"},
        editable=("answer.py",),
        hidden_tests={"test_answer.py": TEST},
        test_args=("test_answer.py",),
        solution={"answer.py": TWO_WORKERS},
        limits=TaskLimits(grade_wall_s=WALL_S, pids=64),
        verifier={"kind": "pytest"},
    )


def _rolled(tasks: Sequence[Any], policy: Any, at_a_time: int, count: Callable[[Any], None] | None = None) -> list[Any]:
    from worldfork.rollout import group
    from worldfork.rollout.faults import FaultRules

    # Nothing is tried again: each None is to be seen.
    rules = FaultRules(retries={}, same_in_task=len(tasks) + 1, breaker=len(tasks) + 1)
    # No more are graded at a time than there are CPUs, of which this is to do without.
    with patch.object(group, "cpus", lambda: at_a_time):
        work = group.run_rollouts(tasks, policy, concurrency=at_a_time, rules=rules, on_episode=count)
        return list(asyncio.run(work))


def _counting(tasks: int) -> Callable[[Any], None]:
    done = 0

    def count(episode: Any) -> None:
        nonlocal done
        done += 1
        if episode.reward != 1.0:
            say(f"  {episode.task_id}: {_words(episode)}")
        if done % 25 == 0:
            say(f"  {done} of {tasks}")

    return count


def _judged(what: str, episodes: Sequence[Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    less = {e.task_id: _words(e) for e in episodes if e.reward is not None and e.reward != 1.0}
    kinds = Counter(e.failure.kind.value for e in episodes if e.failure is not None)
    full = sum(e.reward == 1.0 for e in episodes)
    values = {"full_n": full, "none_by_kind": dict(kinds), "below_full": less}
    said = f"{full} of {len(episodes)} have 1.0, {sum(kinds.values())} none, {len(less)} less"
    passed = not less and full + sum(kinds.values()) == len(episodes)
    return values, [must(f"{what} 1.0 or a typed None", passed, said=said)]
