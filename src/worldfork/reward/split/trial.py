"""One run of a task's hidden tests with the candidate in another fork."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from worldfork.core.clock import Clock
from worldfork.core.errors import OutOfSpace, SandboxDied, SandboxError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.death import DeathCause
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.report import Report, read_report
from worldfork.reward.split.frames import VALUE_MODULES, FrameStream, program_argument, program_input
from worldfork.reward.split.plan import plan_text
from worldfork.reward.split.relay import WALL_FACTOR, Candidate, Relay, Use, read_shapes, sandbox_use
from worldfork.reward.split.values import Malformed
from worldfork.reward.trial import _ENV, Trial, _fixed_args, _test_limits
from worldfork.sandbox.command import Reason
from worldfork.sandbox.process import Process

MAX_TESTS_FRAME_BYTES = 64 << 20
"""The tests' own arguments; no candidate has a say in them beyond what its answers are."""

_GRACE_S = 5.0
_MARGIN_S = 5.0
"""Between the relay's wall limit of a test and the tests' own: the relay knows whether the candidate had a CPU."""
_HOST_CAUSES = {DeathCause.HOST_MEMORY: FailureKind.MEMORY, DeathCause.HOST_DISK: FailureKind.SPACE}


@dataclass(frozen=True)
class SplitTrial:
    """What came of one run."""

    report: Report
    end: str
    """How the tests' process ended."""
    cpu_s: float
    """Of both sides."""
    wall_s: float
    starved: bool
    """A wall limit struck while one side waited for a CPU."""
    test_wall_s: float | None = None
    shapes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    last_words: str = ""

    def is_starved(self, ids: frozenset[str]) -> bool:
        """True where a wall limit struck one of these tests because the machine had no CPU for it."""
        alone = Trial(self.report, self.end, self.cpu_s, self.wall_s, test_wall_s=self.test_wall_s)
        return self.starved or alone.is_starved(ids)


async def run_split(
    tests: AsyncSandbox,
    candidate: AsyncSandbox,
    task: Task,
    plan: Mapping[str, Any],
    shapes: Mapping[str, Sequence[str]] | None,
    clock: Clock,
) -> SplitTrial:
    """Run the tests in one sandbox against the candidate in the other; what both need is laid down already.

    Args:
        plan: the modules under test, as `module_plan` describes them.
        shapes: where objects of the candidate may stand; None for anywhere, which is for the reference alone.

    Raises:
        VerifierError: it could not be judged.
    """
    args, test_cpu_s = _pytest_arguments(task)
    other = Candidate(candidate, _ENV, task.limits.grade_cpu_s)
    # Its process starts while pytest does.
    began = asyncio.ensure_future(other.begin())
    try:
        process = await _start_tests(tests, task, [f"{test_cpu_s or 0:g}", *args])
        run = _Run(tests, process, other, task, test_cpu_s, clock)
        await began
        trial = await run.serve(plan, shapes)
    finally:
        began.cancel()
        await asyncio.gather(began, return_exceptions=True)
        await other.end()
    if other.died is not None or other.killed_for_memory:
        await check_host(candidate)
    return replace(trial, cpu_s=trial.cpu_s + other.cpu_s)


class _Run:
    """One run, from the start of the tests' process to its end."""

    def __init__(
        self,
        tests: AsyncSandbox,
        process: Process,
        candidate: Candidate,
        task: Task,
        test_cpu_s: float | None,
        clock: Clock,
    ) -> None:
        self._tests = tests
        self._process = process
        self._candidate = candidate
        self._wall_s = task.limits.grade_wall_s
        self._test_cpu_s = test_cpu_s
        self._clock = clock
        self._stream = FrameStream(process, MAX_TESTS_FRAME_BYTES)
        self._relay = Relay(self._stream, candidate, test_cpu_s, clock)

    async def serve(self, plan: Mapping[str, Any], shapes: Mapping[str, Sequence[str]] | None) -> SplitTrial:
        """Serve the tests until they end."""
        late = asyncio.create_task(
            _look_late(self._tests, self._process.pid, self._candidate, self._wall_s, self._clock)
        )
        began_s = self._clock.monotonic_s()
        cpu_s = 0.0
        try:
            with contextlib.suppress(BrokenPipeError):
                await self._process.write_stdin(_program(plan_text(plan, shapes)))
            await self._relay.run()
            result = await self._process.wait()
            end, cpu_s = result.reason.value, result.cpu_s
        except (SandboxDied, OutOfSpace) as error:
            await check_host(self._tests)
            end = error.code
        except Malformed:
            end = Reason.OUTPUT_LIMIT.value
            self._process.kill()
        finally:
            late.cancel()
        if end == Reason.OOM_KILLED.value:
            await check_host(self._tests)
        starved = self._relay.starved or (end == Reason.TIMED_OUT.value and _found_starved(late))
        return self._trial(end, cpu_s, self._clock.monotonic_s() - began_s, starved)

    def _trial(self, end: str, cpu_s: float, wall_s: float, starved: bool) -> SplitTrial:
        report = read_report(b"".join(line + b"\n" for line in self._relay.lines))
        if not report.ready:
            raise VerifierError(
                f"pytest did not start ({end}): {self._stream.last_words or 'no output'}",
                remedy="the world needs `python` with pytest and pytest-timeout on its PATH",
                kind=FailureKind.GRADING,
            )
        shapes, notes = read_shapes(self._relay.lines)
        return SplitTrial(
            report,
            end,
            cpu_s,
            wall_s,
            starved,
            None if self._test_cpu_s is None else self._test_cpu_s * WALL_FACTOR,
            shapes,
            tuple(notes),
            self._stream.last_words,
        )


async def check_host(sandbox: AsyncSandbox) -> None:
    """Go on only if what ran in a sandbox is to blame for what befell it.

    Raises:
        VerifierError: the host is.
    """
    death = await sandbox.cause_of_death()
    if death is None:
        kind = FailureKind.MEMORY if (await sandbox.limit_hits()).host_memory else None
    else:
        kind = None if death.own else _HOST_CAUSES.get(death.cause, FailureKind.LOST)
    if kind is not None:
        raise VerifierError(
            f"a sandbox of the grading ended or lost a process: {death.detail if death else 'host memory'}",
            remedy="run fewer rollouts at once",
            kind=kind,
        )


async def _start_tests(tests: AsyncSandbox, task: Task, args: list[str]) -> Process:
    cpu_s = math.ceil(task.limits.grade_cpu_s)
    return await tests.stream(
        ["python", "-P", "-B", "-s", "-c", program_argument(), *args],
        env=_ENV,
        working_dir=TASK_DIRECTORY,
        stdin=True,
        timeout=task.limits.grade_wall_s + _GRACE_S,
        rlimits=((resource.RLIMIT_CPU, cpu_s, cpu_s + 1), (resource.RLIMIT_CORE, 0, 0)),
    )


def _pytest_arguments(task: Task) -> tuple[list[str], float | None]:
    args, test_cpu_s = _test_limits(task.test_args)
    if test_cpu_s is not None:
        # pytest's own limit comes after that of the relay.
        args = [
            f"--timeout={WALL_FACTOR * test_cpu_s + _MARGIN_S:g}" if each.startswith("--timeout=") else each
            for each in args
        ]
    return [*_fixed_args(task), *args], test_cpu_s


async def _look_late(tests: AsyncSandbox, pid: int, candidate: Candidate, wall_s: float, clock: Clock) -> bool:
    """Sleep until the wall limit; return whether one of the sides had no CPU for the most part of it."""
    await clock.sleep_s(wall_s)
    with contextlib.suppress(SandboxError):
        sides = [await sandbox_use(tests, pid), await candidate.use()]
        return any(side.is_starved(Use(), wall_s) for side in sides)
    return False


def _found_starved(late: asyncio.Task[bool]) -> bool:
    return late.done() and not late.cancelled() and late.exception() is None and late.result()


def _program(plan: Mapping[str, Any]) -> bytes:
    return program_input(
        *VALUE_MODULES,
        "worldfork.reward.split.stream",
        "worldfork.reward.split.remotes",
        "worldfork.reward.split.stubs",
        "worldfork.reward.reporter",
        "worldfork.reward.split.tests_program",
        plan_text=f"PLAN = {json.dumps(plan)!r}",
    )
