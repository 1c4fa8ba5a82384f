"""The verifiers of the matrix, and a panel of them that grades one final state by each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.redteam.tasks import CHECKS

from worldfork.core.errors import SandboxError, WorldforkError
from worldfork.records.episode import Failure, FailureKind
from worldfork.records.task import Task
from worldfork.reward.assertions import FilesSpec
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.command_verifier import CommandVerifier
from worldfork.reward.files_verifier import FilesVerifier
from worldfork.reward.final_verifier import FinalSpec, FinalVerifier
from worldfork.reward.judge_program import JudgeSpec
from worldfork.reward.places import TASK_DIRECTORY, inside_task
from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.reward.split.proof import ProofStore
from worldfork.reward.split.verifier import SplitVerifier
from worldfork.reward.verifier import FINAL, FRESH, Case, Grade, Verifier
from worldfork.rollout.faults import FaultRules, failure_of, pause_after

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
    """Verifiers that all grade the same final state. One for each rollout: it keeps what they say.

    A fault is tried again as a run does it: what an attack brings about once by chance voids nothing.
    """

    judges: Mapping[str, Judge]
    turns: asyncio.Semaphore
    """How many may grade at a time."""
    rules: FaultRules = field(default_factory=FaultRules)
    grades: dict[str, Grade] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    """What a verifier raised instead, at last."""
    again: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The kinds of the faults that were tried again."""
    verifier_id: str = "panel"
    trust: str = FRESH

    @property
    def needs_end(self) -> bool:
        """Whether one of them does."""
        return any(judge.verifier.needs_end for judge in self.judges.values())

    @property
    def gradings(self) -> int:
        """All of them, one after the other in the worst case."""
        return (self.rules.most_attempts + 1) * len(self.judges)

    async def grade(self, case: Case) -> Grade:
        """Have each grade it."""
        return await self._each(case, lambda verifier, given: verifier.grade(given))

    async def grade_nothing(self, case: Case) -> Grade:
        """Have each say what nothing is worth."""
        return await self._each(case, lambda verifier, given: verifier.grade_nothing(given))

    async def _each(self, case: Case, ask: Callable[[Verifier, Case], Awaitable[Grade]]) -> Grade:
        async def one(name: str, judge: Judge) -> None:
            given = replace(case, task=judge.changed(case.task))
            kinds: tuple[FailureKind, ...] = ()
            while True:
                async with self.turns:
                    failure = await self._once(name, ask(judge.verifier, given), given.task)
                if failure is None:
                    self.faults.pop(name, None)
                    return
                self.faults[name] = f"{failure.kind.value}: {failure.message}"
                kinds = (*kinds, failure.kind)
                pause_s = pause_after(self.rules, kinds)
                if pause_s is None:
                    return
                self.again[name] = tuple(kind.value for kind in kinds)
                await asyncio.sleep(pause_s)

        await asyncio.gather(*(one(name, judge) for name, judge in self.judges.items()))
        return next(iter(self.grades.values()), Grade(0.0))

    async def _once(self, name: str, grading: Awaitable[Grade], task: Task) -> Failure | None:
        limits = task.limits
        once_s = limits.start_wall_s + limits.rebuild_wall_s + limits.grade_wall_s + limits.stop_wall_s
        try:
            async with asyncio.timeout(4 * once_s) as limit:
                self.grades[name] = await grading
        except WorldforkError as error:
            return failure_of(FailureKind.GRADING, error)
        except TimeoutError as error:
            if limit.expired():
                return Failure(FailureKind.LIMIT, "limit", f"a grading took more than {4 * once_s:g} s")
            return failure_of(FailureKind.GRADING, error)
        return None
