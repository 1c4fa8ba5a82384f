"""One run of a task's hidden tests in a fresh fork of its starting state."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from worldfork.core.errors import OutOfSpace, SandboxDied, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.arguments import (
    TEST_ENV,
    WALL_FACTOR,
    find_configuration,
    fixed_args,
    test_limits,
)
from worldfork.reward.blame import STARVED_SHARE, Looks, check_host, is_busy, run_watched
from worldfork.reward.commanded import pytest_arguments, run_command_tests
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.preparing import BUILD_FAILED, prepare
from worldfork.reward.report import Report, read_report
from worldfork.sandbox.command import CommandResult, Reason

MAX_REPORT_BYTES = 16 << 20
"""More output than this ends the tests; what was reported by then counts."""


@dataclass(frozen=True)
class Trial:
    """What came of one run of the tests."""

    report: Report
    end: str
    """Why the tests' process is over: a reason of commands, the code of what befell its sandbox, or `build_failed`."""
    cpu_s: float
    wall_s: float
    waited_s: float = 0.0
    """At the wall limit: how long the tests had been ready to run and had no CPU."""
    test_wall_s: float | None = None
    """The wall time that one test may take."""
    last_words: str = ""
    """The end of what pytest, or the rebuild step, printed; for people."""
    busy: bool = False
    """The CPU that the tests lacked was used by what they started, or left to others."""
    seen_waited_s: float = 0.0
    """The longest wait for a CPU that was seen from outside; what the tests' process says of its own proves none."""
    notes: tuple[str, ...] = ()
    """What of the edits was not laid down."""

    @property
    def says_starved(self) -> bool:
        """True where the report claims it; whether it was so is to be seen from outside."""
        return replace(self, seen_waited_s=math.inf).is_starved(frozenset(self.report.tests))

    def is_starved(self, ids: frozenset[str]) -> bool:
        """True where a wall limit struck one of these tests because the machine had no CPU for it.

        Code that sleeps does not wait for a CPU, and code that keeps the CPUs busy by itself uses them; neither
        is taken for an overload.
        """
        if self.busy or self.cpu_s >= STARVED_SHARE * self.wall_s:
            return False
        if self.end == Reason.TIMED_OUT.value:
            return self.waited_s >= STARVED_SHARE * self.wall_s
        late = [self.report.tests[name] for name in ids if name in self.report.tests]
        return self.test_wall_s is not None and any(
            test.outcome != "passed"
            and 0.99 * self.test_wall_s <= test.wall_s <= self.wall_s
            and min(test.waited_s, self.seen_waited_s) >= STARVED_SHARE * test.wall_s
            for test in late
        )


async def run_tests(sandbox: AsyncSandbox, task: Task, tests: Mapping[str, bytes], edits: Edits) -> Trial:
    """Lay the edits and then the hidden tests over a fork of the starting state, and run them in it.

    Args:
        sandbox: a fresh fork of the task's starting state; the caller ends it.
        task: whose tests.
        tests: path of the task -> content, the hidden tests.
        edits: what the policy left of the editable files.

    Raises:
        VerifierError: the tests could not be started, or the machine ended them; `kind` says whose fault it is.
        SandboxError: the fork could not be written to.
    """
    arguments = pytest_arguments(task)
    limits = None if arguments is None else test_limits(arguments)
    configuration = await find_configuration(sandbox, task, tests) if limits else None
    notes: tuple[str, ...] = ()
    looks = Looks()
    try:
        prepared = await prepare(sandbox, task, tests, edits)
        notes = prepared.notes
        if prepared.broken is not None:
            build = prepared.broken
            words = (build.stdout_bytes + build.stderr_bytes)[-2000:].decode("utf-8", "replace").strip()
            return Trial(Report(), BUILD_FAILED, build.cpu_s, build.wall_s, last_words=words, notes=notes)
        if limits is None:
            trial = await _commanded(sandbox, task)
        else:
            trial = await _run(sandbox, task, [*fixed_args(task, configuration), *limits[0]], limits[1], looks)
        if trial.end == Reason.OOM_KILLED.value:
            await check_host(sandbox)
        if trial.end != Reason.TIMED_OUT.value and trial.says_starved:
            busy = await is_busy(sandbox, trial.wall_s, looks)
            trial = replace(trial, busy=busy, seen_waited_s=looks.waited_s)
        return replace(trial, notes=notes)
    except (SandboxDied, OutOfSpace) as error:
        # Nothing but the code under test runs here: what befalls the fork is its doing, unless it was the machine's.
        if isinstance(error, OutOfSpace) and error.scope != "sandbox":
            raise
        await check_host(sandbox)
        return Trial(Report(ready=True), end=error.code, cpu_s=0.0, wall_s=0.0, notes=notes)


async def _run(sandbox: AsyncSandbox, task: Task, args: list[str], test_cpu_s: float | None, looks: Looks) -> Trial:
    result, waited_s = await _python(sandbox, task, [f"{test_cpu_s or 0:g}", *_where(task), *args], looks)
    report = read_report(result.stdout_bytes)
    if result.reason is Reason.NOT_STARTED or not report.ready:
        if result.reason is Reason.OOM_KILLED:
            await check_host(sandbox)
        raise VerifierError(
            f"pytest did not start ({result.reason.value}): {_last_words(result) or 'no output'}",
            remedy="the world needs `python` with pytest and pytest-timeout on its PATH",
            kind=FailureKind.GRADING,
        )
    return Trial(
        report=report,
        end=result.reason.value,
        cpu_s=result.cpu_s,
        wall_s=result.wall_s,
        waited_s=waited_s,
        test_wall_s=test_cpu_s * WALL_FACTOR if test_cpu_s else None,
        last_words=_last_words(result),
    )


def _where(task: Task) -> tuple[str, str]:
    return TASK_DIRECTORY, task.env.get("PYTHONPATH", "")


async def _python(sandbox: AsyncSandbox, task: Task, args: list[str], looks: Looks) -> tuple[CommandResult, float]:
    """Run the reporter with the world's first `python`, else its `python3`."""
    limits = task.limits
    cpu_s = math.ceil(limits.grade_cpu_s)
    for program in ("python", "python3"):
        result, waited_s = await run_watched(
            sandbox,
            limits.grade_wall_s,
            program,
            ["-B", "-s", "-", *args],
            looks,
            # Python reads its path before the reporter runs; it opens the path once pytest is loaded.
            env={**TEST_ENV, "PYTHONPATH": ""},
            # No directory of the task: it would be on the import path from the first moment.
            working_dir="/",
            stdin=_reporter(),
            max_output_bytes=MAX_REPORT_BYTES,
            rlimits=((resource.RLIMIT_CPU, cpu_s, cpu_s + 1), (resource.RLIMIT_CORE, 0, 0)),
        )
        if result.reason is not Reason.NOT_STARTED:
            break
    return result, waited_s


async def _commanded(sandbox: AsyncSandbox, task: Task) -> Trial:
    result, report, waited_s = await run_command_tests(sandbox, task, MAX_REPORT_BYTES)
    return Trial(
        report, result.reason.value, result.cpu_s, result.wall_s, waited_s=waited_s, last_words=_last_words(result)
    )


def _last_words(result: CommandResult) -> str:
    return result.stderr_bytes[-2000:].decode("utf-8", "replace").strip()


@cache
def _reporter() -> bytes:
    return Path(__file__).with_name("reporter.py").read_bytes()
