"""One run of a task's hidden tests with the candidate in another fork."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import posixpath
import resource
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from worldfork.core.clock import Clock
from worldfork.core.errors import OutOfSpace, SandboxDied, SandboxError, VerifierError
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.arguments import TEST_ENV, WALL_FACTOR, find_configuration, fixed_args, test_limits
from worldfork.reward.blame import STARVED_SHARE, check_host, is_most
from worldfork.reward.commanded import import_path, pytest_arguments
from worldfork.reward.needs import UNKNOWN, Need
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.report import Report, read_report
from worldfork.reward.split.frames import VALUE_MODULES, FrameStream, program_argument, program_input
from worldfork.reward.split.relay import Candidate, Relay, read_shapes
from worldfork.reward.split.use import Use, sandbox_use
from worldfork.reward.split.values import Malformed
from worldfork.reward.trial import Trial, find_starved
from worldfork.sandbox.command import Reason
from worldfork.sandbox.process import Process

MAX_TESTS_FRAME_BYTES = 64 << 20
"""The tests' own arguments; no candidate has a say in them beyond what its answers are."""

_GRACE_S = 5.0


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
    """The wall limit struck while others had the CPU that those who had the turn wanted."""
    missed_s: float = 0.0
    """For how long others had that CPU, where it was measured."""
    starved_tests: frozenset[str] = frozenset()
    """Tests that their own wall limit struck in the same way."""
    shapes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    last_words: str = ""

    @property
    def flawless(self) -> bool:
        """Whether all that ran has passed."""
        return Trial(self.report, self.end, self.cpu_s, self.wall_s).flawless

    def is_starved(self, ids: frozenset[str]) -> bool:
        """True where a wall limit struck one of these tests because the machine had no CPU for it."""
        return self.starved or bool(ids & self.starved_tests)


async def run_split(
    tests: AsyncSandbox,
    candidate: AsyncSandbox,
    task: Task,
    plan: Mapping[str, Any],
    hidden: Iterable[str],
    clock: Clock,
    need: Need | None = None,
) -> SplitTrial:
    """Run the tests in one sandbox against the candidate in the other; what both need is laid down already.

    Args:
        plan: what the tests' fork is told, from `plan_text`.
        hidden: the paths of the hidden tests.
        need: what the reference needs; by default that is not known, and what this takes is measured.

    Raises:
        VerifierError: it could not be judged.
    """
    args, test_cpu_s = await _arguments(tests, task, hidden)
    cpu_s = (need or UNKNOWN).cpu_limit_s(task.limits.grade_cpu_s)
    paths = import_path(task)
    # The candidate's Python has no empty path of its own: there it is the directory that it starts in.
    absolute = dict.fromkeys(posixpath.join(TASK_DIRECTORY, each).rstrip("/") for each in paths.split(":") if paths)
    other = Candidate(candidate, {**TEST_ENV, "PYTHONPATH": ":".join(absolute)}, cpu_s)
    # Its process starts while pytest does.
    began = asyncio.ensure_future(other.begin())
    try:
        process = await _start_tests(tests, task, [f"{test_cpu_s or 0:g}", TASK_DIRECTORY, paths, *args], cpu_s)
        run = _Run(tests, process, other, task, test_cpu_s, clock, need)
        await began
        trial = await run.serve(plan)
    finally:
        began.cancel()
        await asyncio.gather(began, return_exceptions=True)
        await other.end()
    if not trial.flawless:
        # Of a child that the host ended for its memory nobody else tells.
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
        need: Need | None,
    ) -> None:
        self._tests = tests
        self._process = process
        self._candidate = candidate
        self._wall_s = task.limits.grade_wall_s
        self._test_cpu_s = test_cpu_s
        self._clock = clock
        self._need = need
        self._stream = FrameStream(process, MAX_TESTS_FRAME_BYTES)
        self._relay = Relay(self._stream, candidate, test_cpu_s, clock)

    async def serve(self, plan: Mapping[str, Any]) -> SplitTrial:
        """Serve the tests until they end."""
        late = asyncio.create_task(
            _look_late(
                self._tests,
                self._process.pid,
                self._candidate,
                self._wall_s,
                self._clock,
                self._test_wall_s(),
                self._need or UNKNOWN,
            )
        )
        began_s = self._clock.monotonic_s()
        cpu_s = 0.0
        try:
            with contextlib.suppress(BrokenPipeError):
                await self._process.write_stdin(_program(plan))
            # The tests' process ends at its limit by itself. What is waited for here for longer is the candidate: one
            # whose processes stop whatever is started beside them, for example.
            async with asyncio.timeout(self._wall_s + 2 * _GRACE_S):
                await self._relay.run()
            result = await self._process.wait()
            end, cpu_s = result.reason.value, result.cpu_s
        except (SandboxDied, OutOfSpace) as error:
            await check_host(self._tests)
            end = error.code
        except Malformed:
            end = Reason.OUTPUT_LIMIT.value
            self._process.kill()
        except TimeoutError:
            end = Reason.TIMED_OUT.value
            self._process.kill()
        finally:
            late.cancel()
        wall_s = self._clock.monotonic_s() - began_s
        starved = end == Reason.TIMED_OUT.value and _found_starved(late)
        # In a thread: how much there is to read, and how many looks, is up to the candidate.
        trial = await in_thread(self._trial, end, cpu_s, wall_s, starved)
        if trial is None or not trial.flawless:
            await check_host(self._tests)
        if trial is None:
            raise VerifierError(
                f"pytest did not start ({end}): {self._stream.last_words or 'no output'}",
                remedy="the world needs `python` with pytest and pytest-timeout on its PATH",
                kind=FailureKind.GRADING,
            )
        return trial

    def _test_wall_s(self) -> float | None:
        return None if self._test_cpu_s is None else self._test_cpu_s * WALL_FACTOR

    def _starved_tests(self, report: Report, end: str, cpu_s: float, wall_s: float) -> frozenset[str]:
        # No code of the candidate runs where this report is written, so it is believed.
        limits_s = [self._test_wall_s() or 0.0, *(test.limit_s for test in report.tests.values())]
        alone = Trial(report, end, cpu_s, wall_s, test_wall_s=min(filter(None, limits_s), default=None))
        if self._candidate.looks.counted:
            return find_starved(alone, self._candidate.looks)
        if cpu_s >= STARVED_SHARE * wall_s:
            return frozenset()
        return frozenset(name for name, test in alone.late().items() if is_most(test.waited_s, test.wall_s))

    def _trial(self, end: str, cpu_s: float, wall_s: float, starved: bool) -> SplitTrial | None:
        """Return what came of it; None where pytest did not start."""
        report = read_report(b"".join(line + b"\n" for line in self._relay.lines))
        if not report.ready:
            return None
        shapes, notes = read_shapes(self._relay.lines)
        looks = self._candidate.looks
        return SplitTrial(
            report,
            end,
            cpu_s,
            wall_s,
            starved,
            looks.missed_s(wall_s) if self._need is None and looks.counted else 0.0,
            self._starved_tests(report, end, cpu_s, wall_s),
            shapes,
            tuple(notes),
            self._stream.last_words,
        )


async def _start_tests(tests: AsyncSandbox, task: Task, args: list[str], limit_cpu_s: float) -> Process:
    cpu_s = math.ceil(limit_cpu_s)
    return await tests.stream(
        ["python", "-B", "-s", "-c", program_argument(), *args],
        # Python reads its path before the reporter runs; it opens the path once pytest is loaded.
        env={**TEST_ENV, "PYTHONPATH": ""},
        working_dir="/",
        stdin=True,
        timeout=task.limits.grade_wall_s + _GRACE_S,
        rlimits=((resource.RLIMIT_CPU, cpu_s, cpu_s + 1), (resource.RLIMIT_CORE, 0, 0)),
    )


async def _arguments(tests: AsyncSandbox, task: Task, hidden: Iterable[str]) -> tuple[list[str], float | None]:
    configuration = await find_configuration(tests, task, hidden)
    args, test_cpu_s = test_limits(pytest_arguments(task) or ())
    if test_cpu_s is not None:
        # Over there a test's wall time is mostly the way to the candidate and back. The relay knows the candidate's.
        longest = f"--timeout={task.limits.grade_wall_s:g}"
        args = [longest if each.startswith("--timeout=") else each for each in args]
    return [*fixed_args(task, configuration), *args], test_cpu_s


async def _look_late(
    tests: AsyncSandbox,
    pid: int,
    candidate: Candidate,
    wall_s: float,
    clock: Clock,
    part_wall_s: float | None,
    need: Need,
) -> bool:
    """Sleep until the wall limit; return whether for the most part of it somebody who had the turn had no CPU.

    There are two: the tests, the candidate. That this thread had none proves nothing of a candidate that sleeps.
    """
    await candidate.watch(tests, wall_s, clock, part_wall_s)
    looks = candidate.looks
    if looks.counted:
        missed_s = await in_thread(looks.missed_s, wall_s, -math.inf, need.cpu_s)
        return is_most(missed_s, wall_s, need.wall_s)
    if looks.took_it_all(wall_s):
        # What took the CPU from it may be gone by now.
        return False
    with contextlib.suppress(SandboxError):
        theirs, others = await sandbox_use(tests, pid), await candidate.use()
        return replace(others, waited_s=others.waited_s + theirs.waited_s).is_starved(Use(), wall_s)
    return False


def _found_starved(late: asyncio.Task[bool]) -> bool:
    return late.done() and not late.cancelled() and late.exception() is None and late.result()


def _program(plan: Mapping[str, Any]) -> bytes:
    return program_input(
        *VALUE_MODULES,
        "worldfork.reward.split.stream",
        "worldfork.reward.split.remotes",
        "worldfork.reward.split.classes",
        "worldfork.reward.split.stubs",
        "worldfork.reward.reporter",
        "worldfork.reward.split.tests_program",
        plan_text=f"PLAN = {json.dumps(plan)!r}",
    )
