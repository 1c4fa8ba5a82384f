"""The pytest verifier: hidden tests, run where the policy never was.

It grades in a fresh fork of the task's *starting* state. What the policy left of the declared files is laid over it
as plain bytes, sources are rebuilt, then come the hidden tests, which win. The fork has no network, and nothing is
installed in it. Which tests count is known beforehand (`calibration`), and how each ended comes over a stream that
only the verifier reads; the exit code decides nothing. Skipped, missing and unexpected tests have not passed.

Files that run before any test are never the policy's: `conftest.py`, `sitecustomize.py`, `.pth`, caches of bytecode.
pytest is configured by the hidden tests or by the world, and no plug-in is loaded but those that the task names.

What it resists: everything that a policy does to its own sandbox, and every file that would take part in the run
without being tested. What it does not: code under test shares a process with the tests, so code written to attack
pytest itself can claim passes; and a rebuild step runs as the world's root, so what the policy may change of it (a
`setup.py`) can change the world's pytest. For a `test_command` with a reader it resists less: whatever runs in the
fork can write the results.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import VerifierError
from worldfork.core.ids import content_id
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.blame import overload
from worldfork.reward.calibration import CALIBRATION_FORMAT, Calibration, CalibrationStore
from worldfork.reward.preparing import BROKEN, BUILD_FAILED, judged_or_none
from worldfork.reward.report import Report
from worldfork.reward.scoring import check_teaches, file_of, score_tests
from worldfork.reward.trial import Trial, run_tests
from worldfork.reward.verifier import FRESH, Case, Grade, Start
from worldfork.sandbox.command import Reason

_DECIDING = (
    "arguments",
    "commanded",
    "laying",
    "left_file",
    "preparing",
    "readers",
    "report",
    "reporter",
    "scoring",
    "startup",
)


class PytestVerifier:
    """Grades final states by hidden pytest tests. One for a whole run; safe for many cases at once."""

    def __init__(self, calibrations: CalibrationStore, clock: Clock | None = None) -> None:
        self._calibrations = calibrations
        self._clock = clock or SystemClock()

    @property
    def verifier_id(self) -> str:
        """`pytest`, with a digest of the modules that decide how it grades."""
        return f"pytest:{_digest()[:16]}"

    @property
    def trust(self) -> str:
        """`fresh`."""
        return FRESH

    @property
    def needs_end(self) -> bool:
        """Never."""
        return False

    async def grade(self, case: Case) -> Grade:
        """Say what a final state is worth.

        Raises:
            VerifierError: it could not be judged; `kind` is a `FailureKind`.
            SandboxError, StoreError, ForkError: a fork could not be made or written to.
        """
        began_s = self._clock.monotonic_s()
        task = case.task
        calibration = await self.calibrate(task, case.start)
        known_s = self._clock.monotonic_s()
        tried = await judged_or_none(task, case.edits, partial(try_out, task, case.start, index=case.index))
        trial, sandbox_id = tried or (Trial(Report(), BROKEN, 0.0, 0.0), None)
        expected = frozenset(calibration.expected)
        passed = trial.report.passed & expected
        if passed != expected and trial.is_starved(expected - passed):
            raise overload(task)
        reward, parts = score_tests(task, calibration, passed)
        return Grade(
            reward=reward,
            parts=parts,
            expected=calibration.expected,
            passed=tuple(sorted(passed)),
            failed=tuple(sorted((trial.report.tests.keys() & expected) - passed)),
            untouched=calibration.untouched,
            end=trial.end,
            cpu_s=trial.cpu_s,
            sandbox_id=sandbox_id,
            calibrate_s=known_s - began_s,
            grade_s=self._clock.monotonic_s() - known_s,
            notes=(*trial.notes, *_why(trial)),
        )

    async def grade_nothing(self, case: Case) -> Grade:
        """Give 0 to the end of a policy that left nothing to be looked at.

        Raises:
            As `grade`.
        """
        began_s = self._clock.monotonic_s()
        calibration = await self.calibrate(case.task, case.start)
        _, parts = score_tests(case.task, calibration, frozenset())
        return Grade(
            reward=0.0,
            parts=dict.fromkeys(parts, 0.0),
            expected=calibration.expected,
            untouched=calibration.untouched,
            calibrate_s=self._clock.monotonic_s() - began_s,
        )

    async def calibrate(self, task: Task, start: Start) -> Calibration:
        """Return which tests the task's reference passes, and which pass without any change.

        Found out in fresh forks the first time, with the reference in two of them, and kept. A test that ends
        otherwise the second time counts for nothing.

        Raises:
            VerifierError: the reference passes nothing or did not come to its end, the declared ids are not as
                declared, nothing fails without a change, or the machine was overloaded.
            SandboxError, StoreError, ForkError: a fork could not be made or written to.
        """

        async def make() -> Calibration:
            return await _calibrate(task, start)

        found = await self._calibrations.get_or_make(_tests_hash(task), start.snapshot_id, make)
        return check_teaches(task, found)

    async def leave_out(self, task: Task, start: Start, ids: Iterable[str]) -> None:
        """Let some of a task's tests, which were found to be flaky, count for nothing from now on."""
        await self._calibrations.leave_out(_tests_hash(task), start.snapshot_id, ids)


def _tests_hash(task: Task) -> str:
    """Return the hash of a task apart from what judges it: the same tests are the same for every verifier."""
    return replace(task, verifier={}).task_hash if task.verifier else task.task_hash


async def try_out(task: Task, start: Start, edits: Edits, *, index: int = 0) -> tuple[Trial, str]:
    """Run the hidden tests against some edits in a fresh fork.

    Returns:
        (what came of it, the id of the fork).

    Raises:
        VerifierError, SandboxError, StoreError, ForkError: it could not be run.
    """
    async with start.fork(index, grading=True) as sandbox:
        return await run_tests(sandbox, task, start, edits), sandbox.sandbox_id


async def _calibrate(task: Task, start: Start) -> Calibration:
    if not task.has_reference:
        raise _unfit(task, "has no reference, so nobody knows which tests to expect", "give it a solution")
    solved = await _with_reference(task, start)
    without, _ = await try_out(task, start, Edits())
    # Once more: what is kept decides about every rollout, and one run does not show what is left to chance.
    again = await _with_reference(task, start)
    expected = solved.report.passed & again.report.passed
    flaky = solved.report.passed ^ again.report.passed
    if not expected:
        raise _unfit(task, "has a reference that passes no test twice", "its tests must have the same ids each time")
    untouched = expected & without.report.passed
    if without.is_starved(expected - untouched):
        raise overload(task)
    odd = (expected & frozenset(task.pass_to_pass)) - untouched
    if odd and without.end == Reason.EXITED.value:
        once_more, _ = await try_out(task, start, Edits())
        if once_more.is_starved(odd):
            raise overload(task)
        late = odd & once_more.report.passed
        expected, flaky = expected - late, flaky | late
    loaded = {file_of(name) for name in without.report.tests}
    unloaded = frozenset(name for name in expected - untouched if file_of(name) not in loaded)
    check_declared(task, expected, untouched, unloaded)
    return Calibration(
        task_hash=task.task_hash,
        snapshot_id=start.snapshot_id,
        expected=tuple(sorted(expected)),
        untouched=tuple(sorted(untouched)),
        reference_failed=tuple(sorted(solved.report.tests.keys() - expected - flaky)),
        cpu_s=solved.cpu_s,
        unmet=tuple(sorted(frozenset(task.pass_to_pass) - expected - flaky)),
        flaky=tuple(sorted(flaky)),
        unloaded=tuple(sorted(unloaded)),
    )


async def _with_reference(task: Task, start: Start) -> Trial:
    trial, _ = await try_out(task, start, start.solution)
    _check_reference(task, trial)
    return trial


def _check_reference(task: Task, trial: Trial) -> None:
    """Accept only a whole run: an id that is missing here would count for nobody."""
    report = trial.report
    if trial.is_starved(frozenset(report.tests)):
        raise overload(task)
    if trial.end == BUILD_FAILED:
        raise VerifierError(
            f"the rebuild step of {task.task_id} fails with the reference: {trial.last_words[-300:] or 'no output'}",
            remedy="the world needs what its rebuild step uses, and rebuild_wall_s must be enough",
            kind=FailureKind.BUILD,
            output=trial.last_words,
        )
    if trial.end != Reason.EXITED.value or not report.finished:
        raise _unfit(
            task,
            f"has tests that did not come to their end with the reference ({trial.end})",
            "raise the task's limits, or repair its tests",
            trial.last_words,
        )
    if not report.passed:
        raise _unfit(
            task,
            f"has a reference that passes no test: {trial.last_words[-300:] or 'no output'}",
            "the task needs a solution that passes its hidden tests in this world",
            trial.last_words,
        )


def check_declared(
    task: Task, expected: frozenset[str], untouched: frozenset[str], unloaded: frozenset[str] = frozenset()
) -> None:
    """Go on only if the ids that a task declares are as it declares them.

    Where files could not be loaded, some of `fail_to_pass` may pass without any change: a run by hand stops at such a
    file, so that to whoever declared them all tests had failed. They earn nothing, and must not be lost.

    Raises:
        VerifierError: they are not.
    """
    lost = sorted(frozenset(task.fail_to_pass) - expected)
    if lost:
        raise _unfit(
            task,
            f"declares {len(lost)} of {len(task.fail_to_pass)} fail_to_pass tests that the reference does not pass, "
            f"such as {lost[0][:300]}",
            "the ids, the reference and the world must be of one version",
        )
    early = sorted(frozenset(task.fail_to_pass) & untouched)
    if early and (not unloaded or untouched.issuperset(task.fail_to_pass)):
        raise _unfit(
            task,
            f"declares {len(early)} fail_to_pass tests that pass without any change, such as {early[0][:300]}",
            "leave them out of fail_to_pass",
        )


def _unfit(task: Task, what: str, remedy: str, output: str = "") -> VerifierError:
    return VerifierError(f"{task.task_id} {what}", remedy=remedy, kind=FailureKind.CALIBRATION, output=output)


def _why(trial: Trial) -> tuple[str, ...]:
    if trial.end == Reason.EXITED.value:
        return ()
    words = trial.last_words.splitlines()[-1:] if trial.last_words else []
    return (f"the tests ended as {trial.end}", *(line[:300] for line in words))


@cache
def _digest() -> str:
    here = Path(__file__)
    texts = [here.with_name(f"{name}.py").read_bytes() for name in _DECIDING]
    return content_id(b"pytest verifier", str(CALIBRATION_FORMAT).encode(), *texts)
