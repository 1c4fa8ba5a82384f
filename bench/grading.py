"""Grading the demo task's candidates: hardened, by plain pytest in a fork, and by the same tests by hand."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from bench.by_hand import run_group
from bench.harness import Options, bar, figure, must, say, summary_ms
from bench.rollouts_cpu import _Meter, _pytest_world

ROUNDS, WARM_UP = 20, 2
BAR = 1.5
_WAYS = ("default", "pytest", "plain", "by_hand")
_PLAIN = ("-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "pytest_timeout")


class _Grading:
    """The four ways, over one starting state; each grades every candidate once, as many at a time as there are CPUs."""

    def __init__(self, task: Any, start: Any, directory: Path) -> None:
        from worldfork.records.edits import EditedFile, Edits
        from worldfork.reward.calibration import CalibrationStore
        from worldfork.reward.choosing import verifier_for
        from worldfork.reward.pytest_verifier import PytestVerifier
        from worldfork.reward.verifier import Case
        from worldfork.rollout.demo_task import DEMO_REWARDS, demo_candidates

        self.task, self.start = task, start
        self.candidates = list(demo_candidates().values())
        self.cases = [
            Case(task, start, Edits({path: EditedFile(text.encode()) for path, text in files.items()}))
            for files in self.candidates
        ]
        store = CalibrationStore(directory)
        self._verifiers: dict[str, Any] = {"default": verifier_for(task, store), "pytest": PytestVerifier(store)}
        self._wanted = list(DEMO_REWARDS)
        self.differing: dict[str, int] = dict.fromkeys(_WAYS, 0)

    def take(self, way: str) -> float:
        """Grade all candidates; wall seconds."""
        if way == "by_hand":
            return run_group(self.task, self.candidates)
        began_s = time.perf_counter()
        asyncio.run(self._plain() if way == "plain" else self._hardened(way))
        return time.perf_counter() - began_s

    async def _hardened(self, way: str) -> None:
        grades = await _few([lambda case=case: self._verifiers[way].grade(case) for case in self.cases])
        self.differing[way] += [grade.reward for grade in grades] != self._wanted

    async def _plain(self) -> None:
        await _few([lambda files=files: self._plain_one(files) for files in self.candidates])

    async def _plain_one(self, files: Mapping[str, str]) -> None:
        from worldfork.reward.places import TASK_DIRECTORY, inside_task

        async with self.start.fork(grading=True) as sandbox:
            for path, text in {**files, **self.task.hidden_tests}.items():
                await sandbox.write_file(inside_task(path), text)
            done = await sandbox.run(
                "python",
                [*_PLAIN, *self.task.test_args],
                env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                working_dir=TASK_DIRECTORY,
                timeout=120,
            )
            # 1: tests failed, 2: a candidate that cannot be imported, below 0: one that ends its process.
            self.differing["plain"] += done.exit_code > 2


async def _few(calls: list[Callable[[], Awaitable[Any]]]) -> list[Any]:
    turns = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def one(call: Callable[[], Awaitable[Any]]) -> Any:
        async with turns:
            return await call()

    return list(await asyncio.gather(*map(one, calls)))


def run(options: Options) -> dict[str, Any]:
    """All ways in every round, every second round in reverse, with the CPU seconds that each takes."""
    world = _pytest_world(options)
    from worldfork.rollout.demo_task import demo_task
    from worldfork.rollout.starts import StartingStates

    async def starting_state() -> Any:
        return await (await StartingStates.open(world)).get(demo_task())

    rounds = options.samples(ROUNDS, 2)
    with tempfile.TemporaryDirectory(dir=options.home) as directory:
        grading = _Grading(demo_task(), asyncio.run(starting_state()), Path(directory))
        for way in _WAYS * WARM_UP:
            grading.take(way)
        meter = _Meter()
        wall_s: dict[str, list[float]] = {way: [] for way in _WAYS}
        try:
            for number in range(rounds):
                for way in _WAYS if number % 2 == 0 else reversed(_WAYS):
                    with meter.charge(way):
                        wall_s[way].append(grading.take(way))
                say(f"  {number + 1} of {rounds} rounds")
            cpu_s = {way: meter.used_s(way) for way in _WAYS}
        finally:
            meter.close()
    each = rounds * len(grading.candidates)
    ratios = {
        f"{way}_against_{other}": round(cpu_s[way] / cpu_s[other], 3) if cpu_s[other] else float("inf")
        for way in ("default", "pytest")
        for other in ("plain", "by_hand")
    }
    values: dict[str, Any] = {
        "gradings_n": each,
        "cpu_counted_by": meter.kind,
        **{f"{way}_cpu_ms": round(cpu_s[way] / each * 1000, 1) for way in _WAYS},
        **{f"{way}_of_8_wall": summary_ms(taken) for way, taken in wall_s.items()},
        "cpu": ratios,
        "differing": grading.differing,
    }
    names = {"plain": "plain pytest in a fork", "by_hand": "the same tests by hand"}
    bars = [
        bar(f"CPU of the {way} verifier against {names[other]}", ratios[f"{way}_against_{other}"], BAR, unit="ratio")
        for other in ("plain", "by_hand")
        for way in ("default", "pytest")
    ]
    bars.append(must("the demo's rewards by both verifiers, every time", not any(grading.differing.values())))
    return figure("grading", "the demo task graded: hardened, plain in a fork, by hand", values, bars)
