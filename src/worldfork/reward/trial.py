"""One run of a task's hidden tests in a fresh fork of its starting state."""

from __future__ import annotations

import math
import resource
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from worldfork.core.errors import OutOfSpace, SandboxDied, VerifierError
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.arguments import (
    TEST_ENV,
    WALL_FACTOR,
    find_configuration,
    fixed_args,
    shortest_limit,
    test_limits,
)
from worldfork.reward.blame import (
    GRACE_S,
    STARVED_SHARE,
    Looks,
    check_host,
    is_most,
    is_starved,
    overload,
    run_watched,
    settle_looks,
)
from worldfork.reward.commanded import import_path, pytest_arguments, run_command_tests
from worldfork.reward.needs import UNKNOWN, Need
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.preparing import Prepared, prepare
from worldfork.reward.reasons import FailedTest, read_reasons, telling_args
from worldfork.reward.report import Report, TestRecord, read_report
from worldfork.reward.verifier import Start
from worldfork.sandbox.command import CommandResult, Reason

MAX_REPORT_BYTES = 16 << 20
"""More output than this ends the tests; what was reported by then counts."""

_MOST_LIMITS = 8
"""So many limits of tests that were late are asked about."""


@dataclass(frozen=True)
class Trial:
    """What came of one run of the tests."""

    report: Report
    end: str
    """Why the tests' process is over: a reason of commands, the code of what befell its sandbox, or `build_failed`."""
    cpu_s: float
    wall_s: float
    missed_s: float = 0.0
    """For how long others had the CPU that the tests wanted: at the wall limit, and where it was measured."""
    needed_s: float = 0.0
    """The wall time that the reference's tests need; 0 where nobody knows."""
    rebuild_s: float = 0.0
    """Wall time of the rebuild step, where it was measured, less what others took of it."""
    rebuild_cpu_s: float = 0.0
    test_wall_s: float | None = None
    """The shortest wall time that a limit leaves to a test."""
    last_words: str = ""
    """The end of what pytest, or the rebuild step, printed; for people."""
    starved: frozenset[str] = frozenset()
    """Tests that their own wall limit struck while others had the CPU; the report alone proves it of none."""
    notes: tuple[str, ...] = ()
    """What of the edits was not laid down."""
    reasons: tuple[FailedTest, ...] = ()
    """Why tests failed, where that was asked for."""

    @property
    def flawless(self) -> bool:
        """Whether all that ran has passed."""
        outcomes = {test.outcome for test in self.report.tests.values()}
        return self.end == Reason.EXITED.value and self.report.finished and outcomes == {"passed"}

    def limit_s(self, test: TestRecord) -> float:
        """Return the wall time that a test may take. What the report says of it is no less than the shortest."""
        return max(test.limit_s, self.test_wall_s or 0.0)

    def late(self) -> dict[str, TestRecord]:
        """Return the tests that their own wall limit struck, if the report is to be believed."""
        if self.test_wall_s is None or self.end == Reason.TIMED_OUT.value:
            return {}
        return {
            name: test
            for name, test in self.report.tests.items()
            if test.outcome != "passed" and 0.99 * self.limit_s(test) <= test.wall_s <= self.wall_s
        }

    def is_starved(self, ids: frozenset[str]) -> bool:
        """True where a wall limit struck one of these tests because the machine had no CPU for it.

        Code that sleeps does not wait for a CPU, and code that keeps the CPUs busy by itself uses them; neither
        is taken for an overload.
        """
        if self.end == Reason.TIMED_OUT.value:
            return is_most(self.missed_s, self.wall_s - GRACE_S, self.needed_s)
        return bool(ids & self.starved)


async def run_tests(
    sandbox: AsyncSandbox,
    task: Task,
    start: Start,
    edits: Edits,
    need: Need | None = None,
    *,
    telling: bool = False,
) -> Trial:
    """Lay the edits and then the hidden tests over a fork of the starting state, and run them in it.

    Args:
        sandbox: a fresh fork of the task's starting state; the caller ends it.
        task: whose tests.
        start: that state, which has the hidden tests.
        edits: what the policy left of the editable files.
        need: what the reference needs; by default that is not known, and what this takes is measured.
        telling: read why tests failed, which shows what is in them; never for the edits of a policy.

    Raises:
        VerifierError: the tests could not be started, or the machine ended them; `kind` says whose fault it is.
        SandboxError: the fork could not be written to.
    """
    arguments = pytest_arguments(task)
    limits = None if arguments is None else test_limits(arguments)
    # Before a rebuild step may have put one there.
    configuration = await find_configuration(sandbox, task, start.tests) if limits else None
    own_s = await shortest_limit(sandbox, start.tests, configuration) if limits else None
    try:
        async with prepare(sandbox, task, start, edits, need) as prepared:
            trial = await _in_prepared(prepared, task, configuration, limits, own_s, need, telling)
            return replace(
                trial,
                notes=prepared.notes,
                needed_s=(need or UNKNOWN).wall_s,
                rebuild_s=prepared.rebuild_s,
                rebuild_cpu_s=prepared.rebuild_cpu_s,
            )
    except (SandboxDied, OutOfSpace) as error:
        if not edits.empty:
            # Not of this fork: what befell it is told by how it was prepared.
            raise
        return await _ended(sandbox, error)


async def _in_prepared(
    prepared: Prepared,
    task: Task,
    configuration: str | None,
    limits: tuple[list[str], float | None] | None,
    own_s: float | None,
    need: Need | None,
    telling: bool,
) -> Trial:
    sandbox, broken = prepared.sandbox, prepared.broken
    if broken is not None:
        return Trial(Report(), broken.end, broken.cpu_s, broken.wall_s, last_words=broken.words)
    looks = Looks()
    try:
        if limits is None:
            trial = await _commanded(sandbox, task, need, telling)
        else:
            args, test_cpu_s = [*fixed_args(task, configuration), *limits[0]], limits[1]
            test_wall_s = min((WALL_FACTOR * each for each in (test_cpu_s, own_s) if each), default=None)
            trial = await _run(sandbox, task, args, test_cpu_s, test_wall_s, looks, need, telling)
        if not trial.flawless:
            # Of a child that the host ended for its memory nobody else tells.
            await check_host(sandbox)
        if trial.late():
            await settle_looks(sandbox, looks)
            # In a thread: how many looks and threads there were is up to the code under test.
            trial = replace(trial, starved=await in_thread(find_starved, trial, looks))
        return trial
    except (SandboxDied, OutOfSpace) as error:
        return await _ended(sandbox, error)


async def _ended(sandbox: AsyncSandbox, error: SandboxDied | OutOfSpace) -> Trial:
    """Nothing but the code under test runs here: what befalls the fork is its doing, unless it was the machine's."""
    if isinstance(error, OutOfSpace) and error.scope != "sandbox":
        raise error
    await check_host(sandbox)
    return Trial(Report(ready=True), end=error.code, cpu_s=0.0, wall_s=0.0)


def find_starved(trial: Trial, looks: Looks) -> frozenset[str]:
    """Return the late tests for which there was no CPU, as seen from outside.

    When a test ran is known from its report alone, so any time as long as it took is looked at. Where no cgroup counts
    what it says of its own waiting can lower the claim.
    """
    late = trial.late()
    if not late or trial.test_wall_s is None:
        return frozenset()
    if looks.counted:
        # Few, and the longest: what the report says may have been made up.
        windows_s = sorted({trial.limit_s(test) for test in late.values()}, reverse=True)[:_MOST_LIMITS]
        starved_s = {each for each in windows_s if is_most(looks.missed_s(each), each)}
        return frozenset(name for name, test in late.items() if trial.limit_s(test) in starved_s)
    missed_s = looks.missed_s(trial.wall_s)
    if trial.cpu_s >= STARVED_SHARE * trial.wall_s:
        return frozenset()
    return frozenset(name for name, test in late.items() if is_most(min(missed_s, test.waited_s), test.wall_s))


async def _run(
    sandbox: AsyncSandbox,
    task: Task,
    args: list[str],
    test_cpu_s: float | None,
    test_wall_s: float | None,
    looks: Looks,
    need: Need | None,
    telling: bool,
) -> Trial:
    options = telling_args(args) if telling else args
    arguments = [f"{test_cpu_s or 0:g}", TASK_DIRECTORY, import_path(task), *options]
    # Not buffered where it is to be read: the reporter leaves without writing out what is kept back.
    switches = ["-B", "-s", "-u"] if telling else ["-B", "-s"]
    result, missed_s = await _python(sandbox, task, [*switches, "-", *arguments], looks, test_wall_s, need)
    # In a thread: what code under test wrote may take seconds to read.
    report = await in_thread(read_report, result.stdout_bytes)
    if result.reason is Reason.NOT_STARTED or not report.ready:
        await check_host(sandbox)
        if is_starved(result, missed_s, (need or UNKNOWN).wall_s):
            raise overload(task)
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
        missed_s=missed_s,
        test_wall_s=test_wall_s,
        last_words=_last_words(result),
        reasons=await in_thread(read_reasons, result.stderr_bytes) if telling else (),
    )


async def _python(
    sandbox: AsyncSandbox,
    task: Task,
    args: list[str],
    looks: Looks,
    test_wall_s: float | None,
    need: Need | None,
) -> tuple[CommandResult, float]:
    """Run the reporter with the world's first `python`, else its `python3`."""
    limits = task.limits
    cpu_s = math.ceil((need or UNKNOWN).cpu_limit_s(limits.grade_cpu_s))
    for program in ("python", "python3"):
        result, missed_s = await run_watched(
            sandbox,
            limits.grade_wall_s,
            program,
            args,
            looks,
            test_wall_s,
            need is None,
            (need or UNKNOWN).cpu_s,
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
    return result, missed_s


async def _commanded(sandbox: AsyncSandbox, task: Task, need: Need | None, telling: bool) -> Trial:
    result, report, missed_s = await run_command_tests(sandbox, task, MAX_REPORT_BYTES, need)
    return Trial(
        report,
        result.reason.value,
        result.cpu_s,
        result.wall_s,
        missed_s=missed_s,
        last_words=_last_words(result),
        reasons=await in_thread(read_reasons, result.stderr_bytes + result.stdout_bytes) if telling else (),
    )


def _last_words(result: CommandResult) -> str:
    return result.stderr_bytes[-2000:].decode("utf-8", "replace").strip()


@cache
def _reporter() -> bytes:
    return Path(__file__).with_name("reporter.py").read_bytes()
