"""Whether tasks are fit to be trained on: the reference and the untouched state, graded again and again."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from worldfork.core.errors import VerifierError, WorldforkError
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.choosing import verifier_for
from worldfork.reward.final_verifier import FinalVerifier
from worldfork.reward.needs import UNKNOWN, Need
from worldfork.reward.preparing import build
from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.reward.split.automatic import AutomaticVerifier
from worldfork.reward.split.verifier import SplitVerifier
from worldfork.reward.verifier import Case, Grade, Start, Verifier
from worldfork.rollout.leftovers import end_label, let_go

T = TypeVar("T")

_TRIES = 3
_TIGHT_SHARE = 1 / 3
_MOST_SHARE = 1 / 2


@dataclass(frozen=True)
class TaskCheck:
    """What was found of one task."""

    task_id: str
    task_hash: str
    fit: bool
    """Its reference is worth 1 each time, and its untouched state less."""
    why: str = ""
    """Why not."""
    verifier_id: str = ""
    judged_by: str = ""
    """The verifier that grades it, where `verifier_id` chooses among several."""
    split: bool | None = None
    """Whether the candidate can be kept apart from the tests; None where the verifier is of another kind."""
    split_why: str = ""
    """Why not."""
    reference: tuple[float, ...] = ()
    """The rewards of the reference."""
    nop: tuple[float, ...] = ()
    """The rewards of the untouched state."""
    expected: tuple[str, ...] = ()
    """Ids that count."""
    nop_passes: tuple[str, ...] = ()
    """Expected ids that pass without any change."""
    flaky: tuple[str, ...] = ()
    """Expected ids that did not end the same way each time; those of the reference no longer count."""
    unmet: tuple[str, ...] = ()
    """Declared `pass_to_pass` ids that the reference does not pass in this world."""
    cpu_s: float | None = None
    """CPU seconds of grading the reference, the median."""
    grade_s: float | None = None
    """Wall time of the same."""
    tight: Mapping[str, float] = field(default_factory=dict)
    """Limits of which the reference takes more than a third, and how many seconds of each: on a full machine correct
    code may meet them. Of a wall limit, and where a program judges of `grade_cpu_s` too, no more than half is fit."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


class Checker:
    """Checks tasks, one at a time: what they cost is measured too."""

    def __init__(
        self, start_of: Callable[[Task], Any], calibrations: CalibrationStore, spec: dict[str, Any] | None = None
    ) -> None:
        """Take what all tasks share.

        Args:
            start_of: gives the starting state of a task, a coroutine function.
            calibrations: where expected ids are kept.
            spec: the verifier to check them with, in the place of what they ask for.
        """
        self._start_of = start_of
        self._calibrations = calibrations
        self._spec = spec

    async def check_all(
        self, tasks: Sequence[Task], times: int, on_check: Callable[[TaskCheck], None] | None = None
    ) -> list[TaskCheck]:
        """Check tasks in turn."""
        checks = []
        for task in tasks:
            check = await self.check(task, times)
            checks.append(check)
            if on_check is not None:
                on_check(check)
        return checks

    async def check(self, task: Task, times: int) -> TaskCheck:
        """Grade a task's reference and its untouched state so many times, each time in fresh forks.

        A task that cannot be judged is not fit, and `why` has the reason; nothing is raised but what is no fault of
        the task or of this machine.
        """
        found = TaskCheck(task.task_id, task.task_hash, fit=False)
        try:
            verifier = verifier_for(self._spec if self._spec is not None else task, self._calibrations)
            found = replace(found, verifier_id=verifier.verifier_id)
            if not task.has_reference:
                return replace(found, why="it has no reference, so nothing shows that it can be solved")
            start: Start = await self._start_of(task)
            found, need = await _steadily(partial(self._with_known, found, task, start, verifier))
            found, unsteady = await _graded(found, task, start, verifier, times, need)
            # Tests that a task declares as its own may not be lost: with such a one flaky it is not fit.
            left_out = unsteady - frozenset(task.fail_to_pass)
            goes_by = self._goes_by(verifier)
            if left_out and goes_by is not None:
                await goes_by.leave_out(task, start, left_out)
                again, _ = await _graded(found, task, start, verifier, times, need)
                found = replace(again, flaky=tuple(sorted({*found.flaky, *again.flaky})))
            return found
        except WorldforkError as error:
            kind = error.fields.get("kind") if isinstance(error, VerifierError) else None
            return replace(found, why=f"{getattr(kind, 'value', error.code)}: {error}"[:1000])

    def _goes_by(self, verifier: Verifier) -> PytestVerifier | FinalVerifier | None:
        """Return who knows the named tests by which a verifier judges, if it goes by such."""
        if isinstance(verifier, AutomaticVerifier | PytestVerifier | SplitVerifier):
            return PytestVerifier(self._calibrations)
        return verifier if isinstance(verifier, FinalVerifier) and verifier.goes_by_tests else None

    async def _with_known(
        self, found: TaskCheck, task: Task, start: Start, verifier: Verifier
    ) -> tuple[TaskCheck, Need]:
        """Return what is known before any grading, and what the reference needs where its tests are run."""
        goes_by = self._goes_by(verifier)
        if goes_by is None:
            return found, UNKNOWN
        known = await goes_by.calibrate(task, start)
        found = replace(found, unmet=known.unmet, flaky=known.flaky)
        if not isinstance(verifier, AutomaticVerifier | SplitVerifier):
            return found, known.need
        split = verifier_for({"kind": "split"}, self._calibrations)
        assert isinstance(split, SplitVerifier)
        # What was once found by chance would stay so: this is the place to look again.
        proof = await split.prove(task, start, again=True)
        need = proof.need if proof.capable else known.need
        return replace(found, split=proof.capable, split_why=proof.why), need


async def _steadily(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask, and again where the machine was overloaded: a fault of the moment says nothing of a task."""
    for _ in range(_TRIES - 1):
        try:
            return await ask()
        except VerifierError as error:
            if error.fields.get("kind") is not FailureKind.OVERLOAD:
                raise
    return await ask()


async def _graded(
    found: TaskCheck, task: Task, start: Start, verifier: Verifier, times: int, need: Need
) -> tuple[TaskCheck, set[str]]:
    """Return what is found of a task, and the ids that its reference did not pass each time."""
    solved, untouched = [
        [await _steadily(partial(_grade, task, start, verifier, edits, index)) for index in range(times)]
        for edits in (start.solution, Edits())
    ]
    found = _judged(replace(found, fit=False, why=""), solved, untouched)
    return _with_room(found, task, need), _unsteady(solved)


def _with_room(found: TaskCheck, task: Task, need: Need) -> TaskCheck:
    """Tell of which limits the reference takes so much that a full machine might make other correct code meet them."""
    # What was known beforehand may have been found out while others took the machine's time, and a grading has more in
    # it than one step: the less of both is nearer to what one needs.
    grade_s = found.grade_s or 0.0
    taken = {
        "grade_cpu_s": found.cpu_s or 0.0,
        "grade_wall_s": min(grade_s, need.wall_s or grade_s),
        "rebuild_wall_s": min(grade_s, need.rebuild_s),
    }
    limits = {name: float(getattr(task.limits, name)) for name in taken}
    tight = {name: round(seconds, 2) for name, seconds in taken.items() if seconds > _TIGHT_SHARE * limits[name]}
    # Beside named tests the limit of CPU seconds gives way to what the reference takes; and each process has it for
    # itself, while here all of them are counted.
    refused = [name for name in tight if name != "grade_cpu_s" or not found.expected]
    refused = [name for name in refused if taken[name] > _MOST_SHARE * limits[name]]
    found = replace(found, tight=tight)
    if not refused or not found.fit:
        return found
    name = refused[0]
    return replace(
        found,
        fit=False,
        why=f"its reference takes {taken[name]:.1f} s of the {limits[name]:g} s of {name}, so that a machine half as "
        f"fast fails correct code: raise it to {math.ceil(3 * taken[name])} s or more",
    )


async def _grade(task: Task, start: Start, verifier: Verifier, edits: Edits, index: int) -> Grade:
    case = Case(task, start, edits, index=index)
    if not verifier.needs_end:
        return await verifier.grade(case)
    async with start.fork(index) as sandbox:
        async with build(sandbox, task, start, edits) as built:
            end = await built.sandbox.checkpoint(stop=True, level="volatile", label=end_label())
    try:
        return await verifier.grade(replace(case, end_snapshot_id=end.snapshot_id))
    finally:
        await asyncio.shield(let_go([end.snapshot_id]))


def _judged(found: TaskCheck, solved: Sequence[Grade], untouched: Sequence[Grade]) -> TaskCheck:
    expected = solved[0].expected
    seconds = [grade.cpu_s for grade in solved if grade.cpu_s is not None]
    found = replace(
        found,
        reference=tuple(grade.reward for grade in solved),
        nop=tuple(grade.reward for grade in untouched),
        expected=expected,
        nop_passes=untouched[0].passed,
        judged_by=solved[0].judged_by,
        flaky=tuple(sorted(_unsteady(solved) | _unsteady(untouched) | {*found.flaky})),
        cpu_s=statistics.median(seconds) if seconds else None,
        grade_s=statistics.median(grade.grade_s for grade in solved),
    )
    short = [grade for grade in solved if grade.reward < 1]
    if short:
        lost = sorted(set(expected) - set(short[0].passed))
        named = f", such as {lost[0][:300]}" if lost else ""
        notes = f" ({short[0].notes[0]})" if short[0].notes else ""
        return replace(found, why=f"its reference is worth {short[0].reward:.3f} and loses {len(lost)}{named}{notes}")
    if any(grade.reward == 1 for grade in untouched):
        return replace(found, why="it is worth 1 without any change")
    return replace(found, fit=True)


def _unsteady(grades: Sequence[Grade]) -> set[str]:
    passed = [frozenset(grade.passed) for grade in grades]
    return {name for each in passed for name in each if not all(name in other for other in passed)}
