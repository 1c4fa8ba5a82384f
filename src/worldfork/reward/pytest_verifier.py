"""The pytest verifier: hidden tests, run where the policy never was.

It grades in a fresh fork of the task's *starting* state. The files that the task declares editable are laid over
it as plain bytes, then the hidden tests, which win. The fork has no network, and nothing is installed in it.
Which tests count is known beforehand (`calibration`), and how each ended comes over a stream that only the
verifier reads; the exit code decides nothing. Skipped, missing and unexpected tests have not passed.

What it resists: everything that a policy does to its own sandbox. What it does not: code under test shares a
process with the tests, so code written to attack pytest itself can claim passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.calibration import Calibration, CalibrationStore
from worldfork.reward.trial import Trial, run_tests
from worldfork.sandbox.command import Reason


class Start(Protocol):
    """The starting state of a task: where fresh forks come from."""

    @property
    def snapshot_id(self) -> str:
        """The snapshot."""
        ...

    def fork(self) -> AbstractAsyncContextManager[AsyncSandbox]:
        """Start one sandbox from it, without network; it ends with the block."""
        ...


@dataclass(frozen=True)
class Grade:
    """What a final state is worth."""

    reward: float
    """Passed of expected, in [0, 1]."""
    parts: Mapping[str, float]
    """`fraction`, the reward; and, where the starting state fails an expected test, `fail_to_pass`: the fraction
    of those that pass now, or 0 if one that passed before does not."""
    passed: tuple[str, ...]
    """Expected ids that passed, sorted."""
    failed: tuple[str, ...]
    """Expected ids that ran and did not pass, sorted."""
    calibration: Calibration
    trial: Trial
    sandbox_id: str
    """Where it was graded."""
    calibrate_s: float
    """Wall time to learn the expected ids."""
    grade_s: float
    """Wall time of the fork and its tests."""


class PytestVerifier:
    """Grades final states by hidden pytest tests. One for a whole run; safe for many tasks at once."""

    def __init__(self, calibrations: CalibrationStore, clock: Clock | None = None) -> None:
        self._calibrations = calibrations
        self._clock = clock or SystemClock()

    async def grade(self, task: Task, start: Start, edits: Mapping[str, bytes]) -> Grade:
        """Say what the edits are worth.

        Args:
            task: the task.
            start: its starting state.
            edits: path of the task -> content, as carried out of the policy's sandbox; an editable path that is
                not in it does not exist for the tests.

        Raises:
            VerifierError: it could not be judged; `kind` is a `FailureKind`.
            SandboxError, StoreError, ForkError: a fork could not be made or written to.
        """
        began_s = self._clock.monotonic_s()
        calibration = await self.calibrate(task, start)
        known_s = self._clock.monotonic_s()
        trial, sandbox_id = await _try_out(task, start, edits)
        expected = frozenset(calibration.expected)
        passed = trial.report.passed & expected
        if passed != expected and trial.is_starved(expected - passed):
            raise _overload(task)
        return Grade(
            reward=len(passed) / len(expected),
            parts=_parts(calibration, passed),
            passed=tuple(sorted(passed)),
            failed=tuple(sorted((trial.report.tests.keys() & expected) - passed)),
            calibration=calibration,
            trial=trial,
            sandbox_id=sandbox_id,
            calibrate_s=known_s - began_s,
            grade_s=self._clock.monotonic_s() - known_s,
        )

    async def calibrate(self, task: Task, start: Start) -> Calibration:
        """Return which tests the task's reference passes, and which pass without any change.

        Found out in two fresh forks the first time, and kept.

        Raises:
            VerifierError: the reference passes nothing or did not come to its end, or the machine was overloaded.
            SandboxError, StoreError, ForkError: a fork could not be made or written to.
        """

        async def make() -> Calibration:
            return await _calibrate(task, start)

        return await self._calibrations.get_or_make(task.task_hash, start.snapshot_id, make)


async def _try_out(task: Task, start: Start, edits: Mapping[str, bytes]) -> tuple[Trial, str]:
    async with start.fork() as sandbox:
        return await run_tests(sandbox, task, edits), sandbox.sandbox_id


async def _calibrate(task: Task, start: Start) -> Calibration:
    untouched = {path: task.files[path].encode("utf-8") for path in task.editable if path in task.files}
    solved = {**untouched, **{path: text.encode("utf-8") for path, text in task.solution.items()}}
    with_reference, _ = await _try_out(task, start, solved)
    _check_reference(task, with_reference)
    without, _ = await _try_out(task, start, untouched)
    expected = with_reference.report.passed
    if without.is_starved(expected - without.report.passed):
        raise _overload(task)
    return Calibration(
        task_hash=task.task_hash,
        snapshot_id=start.snapshot_id,
        expected=tuple(sorted(expected)),
        untouched=tuple(sorted(expected & without.report.passed)),
        reference_failed=tuple(sorted(with_reference.report.tests.keys() - expected)),
        cpu_s=with_reference.cpu_s,
    )


def _check_reference(task: Task, trial: Trial) -> None:
    """Accept only a whole run: an id that is missing here would count for nobody."""
    report = trial.report
    if trial.is_starved(frozenset(report.tests)):
        raise _overload(task)
    if trial.end != Reason.EXITED.value or not report.finished:
        raise VerifierError(
            f"the tests of {task.task_id} did not come to their end with the reference ({trial.end})",
            remedy="raise the task's limits, or repair its tests",
            kind=FailureKind.CALIBRATION,
            output=trial.last_words,
        )
    if not report.passed:
        raise VerifierError(
            f"the reference of {task.task_id} passes no test: {trial.last_words[-300:] or 'no output'}",
            remedy="the task needs a solution that passes its hidden tests in this world",
            kind=FailureKind.CALIBRATION,
            output=trial.last_words,
        )


def _parts(calibration: Calibration, passed: frozenset[str]) -> dict[str, float]:
    parts = {"fraction": len(passed) / len(calibration.expected)}
    untouched = frozenset(calibration.untouched)
    broken = frozenset(calibration.expected) - untouched
    if broken:
        parts["fail_to_pass"] = len(passed & broken) / len(broken) if untouched <= passed else 0.0
    return parts


def _overload(task: Task) -> VerifierError:
    return VerifierError(
        f"a time limit of {task.task_id} struck while the machine had no CPU for its tests",
        remedy="run fewer rollouts at once",
        kind=FailureKind.OVERLOAD,
    )
