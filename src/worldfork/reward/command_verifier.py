"""The command verifier: a program of the task says what a state is worth.

It runs in a fresh fork of the task's *starting* state, over which lie what the policy left of the declared files and
then the hidden tests, the program's own files among them. Its answer is its exit code, what it prints, or a file.

What it resists: everything that a policy does to its own sandbox. What it does not: a program that loads or runs code
under test shares its fork with that code, which can end it, print for it and write its file. A program that only reads
files, or runs the code as another user with its answer out of reach, is safe from that.
"""

from __future__ import annotations

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import VerifierError
from worldfork.core.ids import content_id
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.judge_program import Judgement, JudgeSpec, judge
from worldfork.reward.preparing import BROKEN, judged_or_none, prepare
from worldfork.reward.verifier import FRESH, Case, Grade, Start

COMMAND_FORMAT = 1
"""Raised whenever the same program's answer might be read differently."""


class CommandVerifier:
    """Grades final states by a program in a fresh fork. Safe for many cases at once."""

    def __init__(self, spec: JudgeSpec, clock: Clock | None = None) -> None:
        self._spec = spec
        self._clock = clock or SystemClock()
        self._proven: set[str] = set()

    @property
    def verifier_id(self) -> str:
        """`command`, with a digest of the program's command line and where its answer is."""
        parts = [str(COMMAND_FORMAT), self._spec.answer, *self._spec.command]
        return f"command:{content_id(*(part.encode() for part in parts))[:16]}"

    @property
    def trust(self) -> str:
        """`fresh`."""
        return FRESH

    @property
    def needs_end(self) -> bool:
        """Never."""
        return False

    async def grade(self, case: Case) -> Grade:
        """Say what a final state is worth. An answer that is no reward is worth 0.

        Raises:
            VerifierError: the program gives no answer of the task's untouched state either, or cannot be run.
            SandboxError, StoreError, ForkError: a fork could not be made or written to.
        """
        began_s = self._clock.monotonic_s()
        task, start = case.task, case.start

        async def ask(edits: Edits) -> tuple[Judgement, str]:
            return await self._ask(task, start, edits, case.key, case.index)

        solution = start.solution if task.has_reference else None
        told = await judged_or_none(task, case.edits, ask, solution)
        said, sandbox_id = told or (Judgement(0.0, BROKEN), None)
        if not said.answered:
            await self._prove(case.task, case.start)
        return Grade(
            reward=said.reward,
            parts=said.parts,
            end=said.end,
            cpu_s=said.cpu_s,
            sandbox_id=sandbox_id,
            grade_s=self._clock.monotonic_s() - began_s,
            notes=said.notes,
        )

    async def grade_nothing(self, case: Case) -> Grade:
        """Give 0 to the end of a policy that left nothing to be looked at."""
        return Grade(reward=0.0)

    async def _prove(self, task: Task, start: Start) -> None:
        """Go on only if the program answers where no policy had a say."""
        if task.task_hash in self._proven:
            return
        edits = start.solution if task.has_reference else Edits()
        said, _ = await self._ask(task, start, edits, f"{task.task_hash}:proof:1", 0)
        if not said.answered:
            why = said.notes[0] if said.notes else said.end
            raise VerifierError(
                f"the verifier's program of {task.task_id} gives no reward without a policy either: {why}",
                remedy="let it leave a number in [0, 1] where `answer` says",
                kind=FailureKind.CALIBRATION,
            )
        self._proven.add(task.task_hash)

    async def _ask(self, task: Task, start: Start, edits: Edits, key: str, index: int) -> tuple[Judgement, str]:
        async with start.fork(index, grading=True) as sandbox:
            async with prepare(sandbox, task, start, edits) as prepared:
                broken = prepared.broken
                if broken is not None:
                    return Judgement(0.0, broken.end, broken.cpu_s), sandbox.sandbox_id
                return await judge(prepared.sandbox, task, self._spec, key), sandbox.sandbox_id
