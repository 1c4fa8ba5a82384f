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
from worldfork.core.ids import content_id
from worldfork.records.edits import Edits
from worldfork.records.task import Task
from worldfork.reward.blame import overload
from worldfork.reward.calibrating import find_calibration
from worldfork.reward.calibration import CALIBRATION_FORMAT, Calibration, CalibrationStore
from worldfork.reward.needs import Need
from worldfork.reward.preparing import BROKEN, judged_or_none
from worldfork.reward.report import Report
from worldfork.reward.scoring import check_teaches, score_tests
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
        ask = partial(try_out, task, case.start, index=case.index, need=calibration.need)
        tried = await judged_or_none(task, case.edits, ask)
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

        async def run(edits: Edits) -> Trial:
            return (await try_out(task, start, edits))[0]

        async def tell(edits: Edits) -> Trial:
            return (await try_out(task, start, edits, telling=True))[0]

        async def make() -> Calibration:
            return await find_calibration(task, start, run, tell)

        found = await self._calibrations.get_or_make(_tests_hash(task), start.snapshot_id, make)
        return check_teaches(task, found)

    async def leave_out(self, task: Task, start: Start, ids: Iterable[str]) -> None:
        """Let some of a task's tests, which were found to be flaky, count for nothing from now on."""
        await self._calibrations.leave_out(_tests_hash(task), start.snapshot_id, ids)


def _tests_hash(task: Task) -> str:
    """Return the hash of a task apart from what judges it: the same tests are the same for every verifier."""
    return replace(task, verifier={}).task_hash if task.verifier else task.task_hash


async def try_out(
    task: Task, start: Start, edits: Edits, *, index: int = 0, need: Need | None = None, telling: bool = False
) -> tuple[Trial, str]:
    """Run the hidden tests against some edits in a fresh fork; `need` and `telling` as `run_tests` takes them.

    Returns:
        (what came of it, the id of the fork).

    Raises:
        VerifierError, SandboxError, StoreError, ForkError: it could not be run.
    """
    async with start.fork(index, grading=True) as sandbox:
        return await run_tests(sandbox, task, start, edits, need, telling=telling), sandbox.sandbox_id


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
