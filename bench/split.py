"""Tests and candidate in two forks: how many tasks of the sets allow it, and what it costs beside one process."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import Options, Skip, bar, figure, must, say
from bench.worlds import library

SETS = ("quixbugs.jsonl", "exercism.jsonl")
BLOCKS = 10
BAR_CPU = 1.5


def _tasks(options: Options) -> list[Any]:
    from worldfork.rollout.loading import load_tasks

    missing = [name for name in SETS if not (options.data / name).exists()]
    if missing:
        raise Skip(f"{missing[0]} is not in {options.data}; --data names the directory of the task sets")
    found = [load_tasks(options.data / name) for name in SETS]
    return [task for tasks in found for task in (tasks[:: len(tasks) // 3] if options.quick else tasks)]


class _Both:
    """Both verifiers, over one set of expected ids."""

    def __init__(self, directory: Path) -> None:
        from worldfork.reward.calibration import CalibrationStore
        from worldfork.reward.pytest_verifier import PytestVerifier
        from worldfork.reward.split.proof import ProofStore
        from worldfork.reward.split.verifier import SplitVerifier

        self.whole = PytestVerifier(CalibrationStore(directory / "calibrations"))
        self.split = SplitVerifier(self.whole, ProofStore(directory / "proofs"))


async def _capable(both: _Both, tasks: list[Any]) -> dict[str, Any]:
    """Prove every task, and grade the reference of those that can be split by both verifiers."""
    from worldfork.reward.verifier import Case
    from worldfork.rollout.starts import StartingStates

    states = await StartingStates.open()
    plain, objects, short = [], [], []
    why: dict[str, str] = {}
    cpu_s = {"whole": 0.0, "split": 0.0}
    for number, task in enumerate(tasks, 1):
        start = await states.get(task)
        proof = await both.split.prove(task, start)
        if not proof.capable:
            why[task.task_id] = proof.why
            say(f"  {task.task_id} cannot be split: {proof.why}")
            continue
        (plain if proof.plain else objects).append(task.task_id)
        for name, verifier in (("whole", both.whole), ("split", both.split)):
            grade = await verifier.grade(Case(task, start, start.solution))
            cpu_s[name] += grade.cpu_s or 0.0
            if grade.reward != 1.0:
                short.append(f"{task.task_id} by {name}: {grade.reward}")
        if number % 25 == 0:
            say(f"  {number} of {len(tasks)}")
    return {
        "plain_values_n": len(plain),
        "with_objects_n": len(objects),
        "cannot_n": len(why),
        "cannot": why,
        "short_of_1": short,
        "whole_cpu_s": round(cpu_s["whole"], 1),
        "split_cpu_s": round(cpu_s["split"], 1),
        "cpu_ratio": round(cpu_s["split"] / cpu_s["whole"], 3),
    }


async def _demo(both: _Both, blocks: int) -> dict[str, Any]:
    """Grade the demo task's candidates by both, in turns, with the CPU of this process."""
    from worldfork.records.edits import EditedFile, Edits
    from worldfork.reward.verifier import Case
    from worldfork.rollout.demo_task import DEMO_REWARDS, demo_candidates, demo_task
    from worldfork.rollout.starts import StartingStates

    task = demo_task()
    start = await (await StartingStates.open()).get(task)
    cases = [
        Case(task, start, Edits({path: EditedFile(text.encode()) for path, text in files.items()}))
        for files in demo_candidates().values()
    ]
    cpu_s: dict[str, list[float]] = {"whole": [], "split": []}
    wall_s: dict[str, list[float]] = {"whole": [], "split": []}
    differing = 0
    for block in range(blocks + 1):
        for name, verifier in (("whole", both.whole), ("split", both.split)):
            began_cpu_s, began_s = time.process_time(), time.perf_counter()
            grades = [await verifier.grade(case) for case in cases]
            inside_s = sum(grade.cpu_s or 0.0 for grade in grades)
            differing += [grade.reward for grade in grades] != list(DEMO_REWARDS)
            if block:
                cpu_s[name].append((time.process_time() - began_cpu_s + inside_s) / len(cases))
                wall_s[name].append((time.perf_counter() - began_s) / len(cases))
    means = {name: sum(found) / len(found) for name, found in cpu_s.items()}
    return {
        "differing_blocks": differing,
        **{f"{name}_cpu_ms": round(mean * 1000, 1) for name, mean in means.items()},
        **{f"{name}_wall_ms": round(sum(found) / len(found) * 1000, 1) for name, found in wall_s.items()},
        "cpu_ratio": round(means["split"] / means["whole"], 3),
    }


def run(options: Options) -> dict[str, Any]:
    """Take the figure."""
    library(options)
    tasks = _tasks(options)
    with tempfile.TemporaryDirectory(dir=options.home) as directory:
        both = _Both(Path(directory))
        demo = asyncio.run(_demo(both, options.samples(BLOCKS, 2)))
        sets = asyncio.run(_capable(both, tasks))
    can = sets["plain_values_n"] + sets["with_objects_n"]
    bars = [
        bar("CPU of a grading of the demo task against one process", demo["cpu_ratio"], BAR_CPU, unit="ratio"),
        must("the demo's rewards by both", not demo["differing_blocks"]),
        must("every reference 1.0 by both", not sets["short_of_1"], said=f"{can} of {len(tasks)} can be split"),
    ]
    return figure("split", "tests and candidate in two forks", {"tasks_n": len(tasks), "demo": demo, **sets}, bars)
