"""The verifiers of the matrix, and a panel of them that grades one final state by each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.redteam.tasks import CHECKS

from worldfork.core.errors import SandboxError, WorldforkError
from worldfork.records.task import Task
from worldfork.reward.assertions import FilesSpec
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.command_verifier import CommandVerifier
from worldfork.reward.files_verifier import FilesVerifier
from worldfork.reward.final_verifier import FinalSpec, FinalVerifier
from worldfork.reward.judging import JudgeSpec
from worldfork.reward.places import TASK_DIRECTORY, inside_task
from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.reward.split.proof import ProofStore
from worldfork.reward.split.verifier import SplitVerifier
from worldfork.reward.verifier import FINAL, FRESH, Case, Grade, Verifier

WIDTH = 2
"""How many grade at a time; code that sleeps keeps them all waiting."""

RUN_JUDGE = "f=tests/judge.py; [ -f $f ] || f=judge.py; exec python $f"


@dataclass(frozen=True)
class Judge:
    """One verifier, and what a task says to have it."""

    verifier: Verifier
    changed: Callable[[Task], Task] = lambda task: task


def by_command(task: Task) -> Task:
    """Have a program run the tests and leave a JUnit file."""
    return replace(
        task,
        test_command=("python", "-m", "pytest", "-q", "--junitxml=/workspace/results.xml", *task.test_args[1:]),
        reader="junit:results.xml",
    )


def judges(directory: Path) -> dict[str, Judge]:
    """Return the verifiers by name; what they learn is kept in a directory."""
    by_pytest = PytestVerifier(CalibrationStore(directory / "calibrations"))
    program = JudgeSpec(("/bin/sh", "-c", RUN_JUDGE), "file:/workspace/reward.json")
    return {
        "pytest": Judge(by_pytest),
        "split": Judge(SplitVerifier(by_pytest, ProofStore(directory / "proofs"))),
        "reader": Judge(by_pytest, by_command),
        "command": Judge(CommandVerifier(program)),
        "files": Judge(FilesVerifier(FilesSpec.from_json(CHECKS))),
        "final": Judge(FinalVerifier(FinalSpec(), CalibrationStore(directory / "final"))),
    }


class Plain:
    """What people do by hand: the tests run where the policy acted, and their exit code is the result."""

    verifier_id = "plain"
    trust = FINAL
    needs_end = True

    async def grade(self, case: Case) -> Grade:
        """Run pytest at the end of the policy's turn."""
        if case.end_snapshot_id is None:
            return Grade(0.0)
        task = case.task
        async with case.start.fork(grading=True, snapshot_id=case.end_snapshot_id) as sandbox:
            try:
                for path, content in case.start.tests.items():
                    await sandbox.write_file(inside_task(path), content)
                result = await sandbox.run(
                    "/bin/sh",
                    ["-c", f"python -m pytest -q {task.test_args[-1]}"],
                    env=dict(task.env),
                    working_dir=TASK_DIRECTORY,
                    timeout=task.limits.grade_wall_s,
                )
            except SandboxError:
                return Grade(0.0)
        return Grade(1.0 if result.ok else 0.0)

    async def grade_nothing(self, case: Case) -> Grade:
        """Give 0."""
        return Grade(0.0)


@dataclass
class Panel:
    """Verifiers that all grade the same final state. One for each rollout: it keeps what they say."""

    judges: Mapping[str, Judge]
    grades: dict[str, Grade] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    """What a verifier raised instead."""
    verifier_id: str = "panel"
    trust: str = FRESH

    @property
    def needs_end(self) -> bool:
        """Whether one of them does."""
        return any(judge.verifier.needs_end for judge in self.judges.values())

    async def grade(self, case: Case) -> Grade:
        """Have each grade it."""
        return await self._each(case, lambda verifier, given: verifier.grade(given))

    async def grade_nothing(self, case: Case) -> Grade:
        """Have each say what nothing is worth."""
        return await self._each(case, lambda verifier, given: verifier.grade_nothing(given))

    async def _each(self, case: Case, ask: Callable[[Verifier, Case], Awaitable[Grade]]) -> Grade:
        turns = asyncio.Semaphore(WIDTH)

        async def one(name: str, judge: Judge) -> None:
            async with turns:
                try:
                    self.grades[name] = await ask(judge.verifier, replace(case, task=judge.changed(case.task)))
                except WorldforkError as error:
                    self.faults[name] = f"{error.code}: {error}"

        await asyncio.gather(*(one(name, judge) for name, judge in self.judges.items()))
        return next(iter(self.grades.values()), Grade(0.0))
