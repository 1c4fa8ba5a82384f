"""The final verifier: tests against the state that the policy left, for tasks that leave a service or a whole system.

The state is frozen when the policy's turn is over, with every process stopped, and a fork of it is started. In it the
services that the task declares are started, and only these; then hidden tests are laid down and run, or a program
judges.

What it resists: processes that outlive the policy, answers that were planted where hidden tests lie, and a state that
cannot be started or asked any more: that is worth 0. What it does not: the policy was root of all that the tests stand
on, their Python and their tools among it. Its episodes carry `trust: final`; use `pytest` or `split` wherever a task
can be judged by its files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import ConfigError, OutOfSpace, SandboxDied, WorldforkError
from worldfork.core.ids import content_id
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.checked import checked_seconds, checked_strings
from worldfork.records.edits import Edits
from worldfork.records.task import Task
from worldfork.reward.blame import Looks, check_host, is_most, look_until, overload
from worldfork.reward.calibrating import find_calibration, unfit
from worldfork.reward.calibration import Calibration, CalibrationStore
from worldfork.reward.judge_program import Judgement, JudgeSpec, judge
from worldfork.reward.laying import lay_tests
from worldfork.reward.needs import Need
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.preparing import BROKEN, build, is_in_doubt
from worldfork.reward.report import Report
from worldfork.reward.scoring import check_teaches, score_tests
from worldfork.reward.trial import Trial, run_tests
from worldfork.reward.verifier import FINAL, Case, Grade, Start

T = TypeVar("T")

FINAL_FORMAT = 3
NOT_READY = "not_ready"
"""How a grading ends whose services did not come up."""

_BROKEN_NOTE = "the policy left a state that cannot be judged"
_START = 'exec "$@" </dev/null >/dev/null 2>&1 &'
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_PROBE_S = 10.0


@dataclass(frozen=True)
class FinalSpec:
    """What runs in the fork beside the tests."""

    services: tuple[tuple[str, ...], ...] = ()
    """Commands that are started in the task's directory, in this order, and stay."""
    ready: tuple[str, ...] = ()
    """A command that ends with 0 once they are up; asked again and again. Without one the tests race their start."""
    ready_wall_s: float = 60.0
    """Services that are not up by then, or by the task's `grade_wall_s`, are worth 0."""
    judge: JudgeSpec | None = None
    """A program that judges; the hidden tests if not given."""

    def __post_init__(self) -> None:
        if not isinstance(self.services, list | tuple):
            raise ConfigError("services is not a list of commands", field="verifier.services")
        services = tuple(checked_strings("verifier.services", each) for each in self.services)
        if not all(services):
            raise ConfigError("services holds an empty command", field="verifier.services")
        object.__setattr__(self, "services", services)
        object.__setattr__(self, "ready", checked_strings("verifier.ready", self.ready))
        object.__setattr__(self, "ready_wall_s", checked_seconds("verifier.ready_wall_s", self.ready_wall_s))


class FinalVerifier:
    """Grades final states where they are. One for a whole run; safe for many cases at once."""

    def __init__(self, spec: FinalSpec, calibrations: CalibrationStore, clock: Clock | None = None) -> None:
        self._spec = spec
        self._calibrations = calibrations
        self._clock = clock or SystemClock()

    @property
    def verifier_id(self) -> str:
        """`final`, with a digest of what runs."""
        return f"final:{content_id(str(FINAL_FORMAT).encode(), repr(self._spec).encode())[:16]}"

    @property
    def trust(self) -> str:
        """`final`."""
        return FINAL

    @property
    def needs_end(self) -> bool:
        """Always."""
        return True

    async def grade(self, case: Case) -> Grade:
        """Say what a final state is worth.

        Raises:
            VerifierError: it could not be judged; `kind` is a `FailureKind`.
            SandboxError, StoreError, ForkError: a fork could not be made or written to.
        """
        if case.end_snapshot_id is None:
            return await self.grade_nothing(case)
        began_s = self._clock.monotonic_s()
        if self._spec.judge is not None:
            return await self._judged(case, self._spec.judge, began_s)
        task = case.task
        calibration = await self.calibrate(task, case.start)
        known_s = self._clock.monotonic_s()
        found, sandbox_id = await _in_end(case, lambda sandbox: self._run(sandbox, task, case.start, calibration.need))
        trial = found or Trial(Report(), BROKEN, 0.0, 0.0)
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
            trust=FINAL,
            calibrate_s=known_s - began_s,
            grade_s=self._clock.monotonic_s() - known_s,
            notes=() if found else (_BROKEN_NOTE,),
        )

    async def grade_nothing(self, case: Case) -> Grade:
        """Give 0 to the end of a policy that left nothing to be looked at."""
        if self._spec.judge is not None:
            return Grade(reward=0.0, trust=FINAL)
        calibration = await self.calibrate(case.task, case.start)
        return Grade(reward=0.0, expected=calibration.expected, untouched=calibration.untouched, trust=FINAL)

    async def _judged(self, case: Case, spec: JudgeSpec, began_s: float) -> Grade:
        async def ask(sandbox: AsyncSandbox) -> Judgement:
            if not await self._bring_up(sandbox, case.task):
                return Judgement(0.0, NOT_READY, notes=("the services were not ready",))
            await lay_tests(sandbox, case.task, case.start.tests)
            return await judge(sandbox, case.task, spec, case.key)

        found, sandbox_id = await _in_end(case, ask)
        if found is None:
            # A program that cannot be run anywhere is the task's fault.
            async with case.start.fork(case.index, grading=True) as fresh:
                await ask(fresh)
        said = found or Judgement(0.0, BROKEN, notes=(_BROKEN_NOTE,))
        return Grade(
            reward=said.reward,
            parts=said.parts,
            end=said.end,
            cpu_s=said.cpu_s,
            sandbox_id=sandbox_id,
            trust=FINAL,
            grade_s=self._clock.monotonic_s() - began_s,
            notes=said.notes,
        )

    @property
    def goes_by_tests(self) -> bool:
        """Whether named tests judge, and not a program."""
        return self._spec.judge is None

    async def calibrate(self, task: Task, start: Start) -> Calibration:
        """Return which tests the task's reference passes beside its services, and which pass without any change.

        As of the pytest verifier: found out in fresh forks the first time, with the reference in two of them, and kept.

        Raises:
            As `find_calibration`, and VerifierError where nothing fails without a change.
        """

        async def make() -> Calibration:
            run = partial(self._try_out, task, start)
            return await find_calibration(task, start, run, partial(run, telling=True))

        return check_teaches(task, await self._calibrations.get_or_make(self._key(task), start.snapshot_id, make))

    async def leave_out(self, task: Task, start: Start, ids: Iterable[str]) -> None:
        """Let some of a task's tests, which were found to be flaky, count for nothing from now on."""
        await self._calibrations.leave_out(self._key(task), start.snapshot_id, ids)

    def _key(self, task: Task) -> str:
        return content_id(self.verifier_id.encode(), task.task_hash.encode())

    async def _try_out(self, task: Task, start: Start, edits: Edits, *, telling: bool = False) -> Trial:
        """Run the tests where no policy had a say."""
        async with start.fork(grading=True) as sandbox:
            async with build(sandbox, task, start, edits) as built:
                broken = built.broken
                if broken is not None:
                    return Trial(Report(), broken.end, broken.cpu_s, broken.wall_s, last_words=broken.words)
                trial = await self._run(built.sandbox, task, start, telling=telling)
        if trial.end == NOT_READY and not edits.empty:
            raise unfit(
                task,
                "has services that are not up in time with its reference",
                "the task needs services that its solution brings up, and ready_wall_s must be enough",
            )
        return replace(trial, rebuild_s=built.rebuild_s, rebuild_cpu_s=built.rebuild_cpu_s)

    async def _run(
        self, sandbox: AsyncSandbox, task: Task, start: Start, need: Need | None = None, *, telling: bool = False
    ) -> Trial:
        if not await self._bring_up(sandbox, task):
            return Trial(Report(), NOT_READY, 0.0, 0.0)
        return await run_tests(sandbox, task, start, Edits(), need, telling=telling)

    async def _bring_up(self, sandbox: AsyncSandbox, task: Task) -> bool:
        """Start the services; tell whether they are up.

        Raises:
            VerifierError: they were not in time, and had no CPU.
        """
        # What the policy left decides how long this takes, and no more of the grading's time than the tests have.
        wall_s = min(self._spec.ready_wall_s, task.limits.grade_wall_s)
        ends_s = self._clock.monotonic_s() + wall_s
        looks = Looks()
        watch = asyncio.create_task(look_until((sandbox,), wall_s, looks))
        try:
            up = await self._are_started(sandbox, ends_s) and (
                not self._spec.ready or await self._is_ready(sandbox, self._spec.ready, ends_s)
            )
        except (SandboxDied, OutOfSpace) as error:
            if isinstance(error, OutOfSpace) and error.scope != "sandbox":
                raise
            await check_host(sandbox)
            return False
        finally:
            watch.cancel()
        if not up:
            # Of a service that the host ended for its memory nobody else tells.
            await check_host(sandbox)
        if not up and is_most(await in_thread(looks.missed_s, wall_s), wall_s):
            raise overload(task)
        return up

    async def _are_started(self, sandbox: AsyncSandbox, ends_s: float) -> bool:
        for command in self._spec.services:
            left_s = ends_s - self._clock.monotonic_s()
            if left_s <= 0:
                return False
            # It goes on beside, so only a state that has no shell, or a machine without a CPU for it, keeps this.
            began = await sandbox.run(
                "/bin/sh", ["-c", _START, "service", *command], working_dir=TASK_DIRECTORY, timeout=left_s
            )
            if not began.ok:
                return False
        return True

    async def _is_ready(self, sandbox: AsyncSandbox, probe: tuple[str, ...], ends_s: float) -> bool:
        program, *args = probe
        pause_s = _FIRST_PAUSE_S
        while True:
            left_s = ends_s - self._clock.monotonic_s()
            if left_s <= 0:
                return False
            if (await sandbox.run(program, args, working_dir=TASK_DIRECTORY, timeout=min(left_s, _PROBE_S))).ok:
                return True
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


async def _in_end(case: Case, act: Callable[[AsyncSandbox], Awaitable[T]]) -> tuple[T | None, str | None]:
    """Do something in a fork of the policy's end; None where that is a state in which nothing can be done.

    Returns:
        (what came of it, the id of the fork).

    Raises:
        VerifierError, SandboxError, StoreError, ForkError: the machine is to blame.
    """
    try:
        return await _once_in_end(case, act)
    except WorldforkError as error:
        if not is_in_doubt(error):
            raise
    # Is it this state in which nothing can be done, or any?
    async with case.start.fork(case.index, grading=True):
        pass
    try:
        return await _once_in_end(case, act)
    except WorldforkError as error:
        if not is_in_doubt(error):
            raise
    return None, None


async def _once_in_end(case: Case, act: Callable[[AsyncSandbox], Awaitable[T]]) -> tuple[T | None, str]:
    async with case.start.fork(case.index, grading=True, snapshot_id=case.end_snapshot_id) as sandbox:
        try:
            return await act(sandbox), sandbox.sandbox_id
        except (SandboxDied, OutOfSpace) as error:
            if isinstance(error, OutOfSpace) and error.scope != "sandbox":
                raise
            await check_host(sandbox)
            return None, sandbox.sandbox_id


def final_spec(data: Mapping[str, Any], judged: JudgeSpec | None) -> FinalSpec:
    """Read what a task says of its services."""
    given = {name: data[name] for name in ("services", "ready", "ready_wall_s") if name in data}
    return FinalSpec(**given, judge=judged)
