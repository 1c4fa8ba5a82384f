"""The split verifier: hidden tests in one fork, the candidate in another.

Both are fresh forks of the task's *starting* state. The candidate's gets what the policy left and nothing of the
tests; the tests' fork gets the tests, and in the place of the modules under test stubs whose calls the host passes
on. So no code of the candidate ever shares a process, a file system or a user id with a test.

What crosses is plain values of exact types, within bounds that the host checks frame by frame. An object that stays
with the candidate may stand only where the reference's object stood, and cannot be compared with what tests expect.

What it resists: everything that code under test can do to tests that share its process, and all that a policy does
to its own sandbox. What it does not: answers that are wrong and right by the tests' own measure, such as a class
whose instances all equal each other where tests compare two of its instances; and answers learned by heart.

A candidate keeps one process from test to test, as under pytest; after one that ended, was too slow or broke the
protocol, the test at hand has failed and the next call is made to a new process.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Protocol

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import ConfigError, PathError, VerifierError
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.blame import overload
from worldfork.reward.calibration import Calibration
from worldfork.reward.laying import lay_tests
from worldfork.reward.needs import Need
from worldfork.reward.places import inside_task
from worldfork.reward.preparing import build
from worldfork.reward.report import Report
from worldfork.reward.scoring import score_tests
from worldfork.reward.split.frames import program_digest
from worldfork.reward.split.plan import plan_text, stub_files
from worldfork.reward.split.proof import MAX_WHY_CHARACTERS, Proof, ProofStore, learn_modules
from worldfork.reward.split.trial import SplitTrial, run_split
from worldfork.reward.verifier import FRESH, Case, Grade, Start


class Calibrates(Protocol):
    """Who knows the tests that count: the pytest verifier."""

    async def calibrate(self, task: Task, start: Start) -> Calibration:
        """Return which tests the task's reference passes."""
        ...


class SplitVerifier:
    """Grades final states by hidden tests that the candidate cannot reach. One for a whole run."""

    def __init__(self, calibrates: Calibrates, proofs: ProofStore, clock: Clock | None = None) -> None:
        self._calibrates = calibrates
        self._proofs = proofs
        self._clock = clock or SystemClock()

    @property
    def verifier_id(self) -> str:
        """Its kind, with a digest of the programs that run in the forks."""
        return f"split:{program_digest()[:16]}"

    @property
    def trust(self) -> str:
        """`fresh`."""
        return FRESH

    @property
    def needs_end(self) -> bool:
        """Never."""
        return False

    async def prove(self, task: Task, start: Start, *, again: bool = False) -> Proof:
        """Return whether the task's tests can be split, found out with its reference the first time, and kept.

        Args:
            task: whose tests.
            start: its starting state.
            again: whether to try once more where it was found that they cannot, by running them.

        Raises:
            VerifierError: the reference could not be judged at all. SandboxError, StoreError, ForkError: a fork could
                not be made or written to.
        """

        async def make() -> Proof:
            proof = await self._prove(task, start)
            # What failed once by chance would be kept, and the task judged by less than it can be.
            return await self._prove(task, start) if proof.tried and not proof.capable else proof

        def missed(proof: Proof) -> bool:
            return again and proof.tried and not proof.capable

        return await self._proofs.get_or_make(task.task_hash, start.snapshot_id, make, missed)

    async def grade(self, case: Case) -> Grade:
        """Say what a final state is worth.

        Raises:
            VerifierError: it could not be judged, or the task's tests cannot be split.
            SandboxError, StoreError, ForkError: a fork could not be made or written to.
        """
        began_s = self._clock.monotonic_s()
        task, start = case.task, case.start
        calibration, proof = await self._known(task, start)
        known_s = self._clock.monotonic_s()
        trial, sandbox_id = await self._try_out(task, start, case.edits, proof, index=case.index, need=proof.need)
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
            notes=trial.notes[:5],
        )

    async def grade_nothing(self, case: Case) -> Grade:
        """Give 0 to a policy that left nothing to be looked at.

        Raises:
            As `grade`.
        """
        began_s = self._clock.monotonic_s()
        calibration, _ = await self._known(case.task, case.start)
        _, parts = score_tests(case.task, calibration, frozenset())
        return Grade(
            reward=0.0,
            parts=dict.fromkeys(parts, 0.0),
            expected=calibration.expected,
            untouched=calibration.untouched,
            calibrate_s=self._clock.monotonic_s() - began_s,
        )

    async def _known(self, task: Task, start: Start) -> tuple[Calibration, Proof]:
        calibration = await self._calibrates.calibrate(task, start)
        proof = await self.prove(task, start)
        if not proof.capable:
            raise VerifierError(
                f"the tests of {task.task_id} cannot be split: {proof.why}",
                remedy="use the pytest verifier, or leave the choice to `auto`",
                kind=FailureKind.CALIBRATION,
            )
        return calibration, proof

    async def _prove(self, task: Task, start: Start) -> Proof:
        """Run the reference once to see where its objects stand, and once more with that known."""
        expected = frozenset((await self._calibrates.calibrate(task, start)).expected)
        tried = False
        try:
            proof = await in_thread(learn_modules, task, start)
            tried = True
            for learning in (True, False):
                trial, _ = await self._try_out(task, start, start.solution, proof, learning=learning)
                missing = expected - trial.report.passed
                if missing and trial.is_starved(missing):
                    raise overload(task)
                if missing:
                    reason = trial.notes[0] if trial.notes else "they see more than calls and their results"
                    raise ConfigError(f"{len(missing)} of {len(expected)} tests fail, such as {min(missing)}: {reason}")
                shapes = {place: tuple(names) for place, names in trial.shapes.items()}
                proof = replace(proof, shapes=shapes, cpu_s=trial.cpu_s, wall_s=trial.wall_s - trial.missed_s)
        except (ConfigError, VerifierError) as error:
            if isinstance(error, VerifierError) and error.fields.get("kind") is not FailureKind.GRADING:
                raise
            return Proof(False, str(error)[:MAX_WHY_CHARACTERS], tried=tried)
        return replace(proof, capable=True, tried=True)

    async def _try_out(
        self,
        task: Task,
        start: Start,
        edits: Edits,
        proof: Proof,
        *,
        index: int = 0,
        learning: bool = False,
        need: Need | None = None,
    ) -> tuple[SplitTrial, str]:
        plan = plan_text(proof.modules, None if learning else proof.shapes)
        async with start.fork(index, grading=True) as tests, start.fork(index, grading=True) as candidate:
            async with build(candidate, task, start, edits) as built:
                if built.broken is not None:
                    nothing = SplitTrial(Report(ready=True), built.broken.end, 0.0, 0.0, False, notes=built.notes)
                    return nothing, tests.sandbox_id
                await _lay_stubs(tests, proof)
                await lay_tests(tests, task, start.tests)
                trial = await run_split(tests, built.sandbox, task, plan, start.tests, self._clock, need)
                return replace(trial, notes=(*built.notes, *trial.notes)), tests.sandbox_id


async def _lay_stubs(tests: AsyncSandbox, proof: Proof) -> None:
    """Put stubs in the place of the modules under test, and nothing in that of other files that a policy may change."""
    for path in proof.absent:
        with contextlib.suppress(PathError):
            await tests.delete_file(inside_task(path))
    for path, content in stub_files(proof.modules).items():
        await tests.write_file(inside_task(path), content)
