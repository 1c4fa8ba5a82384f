"""One run of a task's hidden tests in a fresh fork of its starting state."""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from worldfork.core.clock import SystemClock
from worldfork.core.errors import OutOfSpace, PathError, SandboxDied, SandboxError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.places import TASK_DIRECTORY, inside_task
from worldfork.reward.report import Report, read_report
from worldfork.sandbox.command import CommandResult, Reason

WALL_FACTOR = 4
"""A test's own time limit counts CPU seconds; its wall time may be this many times as long."""

MAX_REPORT_BYTES = 16 << 20
"""More output than this ends the tests; what was reported by then counts."""

_STARVED_SHARE = 0.5
_GRACE_S = 5.0
"""Between the wall limit and the kill: time to ask whether the tests had a CPU."""

_CONFIGURATIONS = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
"""What pytest reads in the task's directory, in its order."""

_ENV = {
    "PYTEST_ADDOPTS": "",
    # Only what is asked for by name: an installed plug-in can change what passes.
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    # The order of sets, and so the set of passed tests, is the same each time.
    "PYTHONHASHSEED": "0",
}


@dataclass(frozen=True)
class Trial:
    """What came of one run of the tests."""

    report: Report
    end: str
    """Why the tests' process is over: a reason of commands, or the code of what befell its sandbox."""
    cpu_s: float
    wall_s: float
    waited_s: float = 0.0
    """At the wall limit: how long the tests had been ready to run and had no CPU."""
    test_wall_s: float | None = None
    """The wall time that one test may take."""
    last_words: str = ""
    """The end of what pytest printed; for people."""

    def is_starved(self, ids: frozenset[str]) -> bool:
        """True where a wall limit struck one of these tests because the machine had no CPU for it.

        Code that sleeps does not wait for a CPU, and code that keeps the CPUs busy by itself uses them; neither
        is taken for an overload.
        """
        if self.cpu_s >= _STARVED_SHARE * self.wall_s:
            return False
        if self.end == Reason.TIMED_OUT.value:
            return self.waited_s >= _STARVED_SHARE * self.wall_s
        late = [self.report.tests[name] for name in ids if name in self.report.tests]
        return self.test_wall_s is not None and any(
            test.outcome != "passed"
            and test.wall_s >= 0.99 * self.test_wall_s
            and test.waited_s >= _STARVED_SHARE * test.wall_s
            for test in late
        )


async def run_tests(sandbox: AsyncSandbox, task: Task, edits: Mapping[str, bytes]) -> Trial:
    """Lay the edits and then the hidden tests over a fork of the starting state, and run pytest in it.

    Args:
        sandbox: a fresh fork of the task's starting state; the caller ends it.
        task: whose tests.
        edits: path of the task -> content. An editable path that is not in it does not exist for the tests.

    Raises:
        VerifierError: the tests could not be started; `kind` says whose fault it is.
        SandboxError: the fork could not be written to.
    """
    await _lay_down(sandbox, task, edits)
    try:
        return await _run(sandbox, task)
    except SandboxDied as error:
        # From here on the code under test runs: what befalls the fork is its doing.
        return Trial(Report(ready=True), end=error.code, cpu_s=0.0, wall_s=0.0)
    except OutOfSpace as error:
        if error.scope != "sandbox":
            raise
        return Trial(Report(ready=True), end=error.code, cpu_s=0.0, wall_s=0.0)


async def _lay_down(sandbox: AsyncSandbox, task: Task, edits: Mapping[str, bytes]) -> None:
    files = {path: content for path, content in edits.items() if path in task.editable}
    files.update((path, text.encode("utf-8")) for path, text in task.hidden_tests.items())
    for path in task.files:
        if path in task.editable and path not in files:
            await sandbox.delete_file(inside_task(path))
    for path, content in files.items():
        await sandbox.write_file(inside_task(path), content)


async def _run(sandbox: AsyncSandbox, task: Task) -> Trial:
    limits = task.limits
    args, test_cpu_s = _test_limits(task.test_args)
    cpu_s = math.ceil(limits.grade_cpu_s)
    watch = asyncio.create_task(_watch(sandbox, limits.grade_wall_s))
    try:
        result = await sandbox.run(
            "python",
            ["-P", "-B", "-s", "-", f"{test_cpu_s or 0:g}", *_fixed_args(task), *args],
            env=_ENV,
            working_dir=TASK_DIRECTORY,
            timeout=limits.grade_wall_s + _GRACE_S,
            stdin=_reporter(),
            max_output_bytes=MAX_REPORT_BYTES,
            rlimits=((resource.RLIMIT_CPU, cpu_s, cpu_s + 1), (resource.RLIMIT_CORE, 0, 0)),
        )
        waited_s = watch.result() if watch.done() else 0.0
    finally:
        watch.cancel()
    report = read_report(result.stdout_bytes)
    if result.reason is Reason.NOT_STARTED or not report.ready:
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


def _fixed_args(task: Task) -> list[str]:
    configuration = next((name for name in _CONFIGURATIONS if name in task.hidden_tests), None)
    return [
        "-q",
        "--tb=no",
        "--no-summary",
        "-c",
        inside_task(configuration) if configuration else "/dev/null",
        f"--rootdir={TASK_DIRECTORY}",
        f"--confcutdir={TASK_DIRECTORY}",
        "-p",
        "no:cacheprovider",
    ]


def _test_limits(test_args: tuple[str, ...]) -> tuple[list[str], float | None]:
    """Turn a test's time limit from wall into CPU seconds, and leave a longer wall limit for tests that sleep.

    Returns:
        (arguments for pytest, CPU seconds that one test may use or None).

    Raises:
        VerifierError: `--timeout` without a number.
    """
    limit = next((each for each in test_args if each.startswith("--timeout=")), None)
    if limit is None:
        named = any(each.startswith("--timeout") for each in test_args)
        return [*(("-p", "pytest_timeout") if named else ()), *test_args], None
    try:
        seconds = float(limit.partition("=")[2])
    except ValueError:
        raise VerifierError(f"{limit!r} is no time limit", kind=FailureKind.CALIBRATION) from None
    if not 0 < seconds < math.inf:
        return ["-p", "pytest_timeout", *test_args], None
    kept = [each for each in test_args if each is not limit]
    return ["-p", "pytest_timeout", f"--timeout={seconds * WALL_FACTOR:g}", *kept], seconds


async def _watch(sandbox: AsyncSandbox, wall_s: float) -> float:
    """Sleep until the wall limit; return the longest time that a process in the sandbox has waited for a CPU."""
    await SystemClock().sleep_s(wall_s)
    longest = 0.0
    with contextlib.suppress(SandboxError):
        for entry in (await sandbox.list_directory("/proc")).entries:
            if entry.name.isdigit():
                with contextlib.suppress(PathError, ValueError, IndexError):
                    # The kernel's sched-stats: seconds on a CPU, seconds ready without one, number of turns.
                    counts = await sandbox.read_file(f"/proc/{entry.name}/schedstat", max_bytes=4096)
                    longest = max(longest, int(counts.split()[1]) / 1e9)
    return longest


def _last_words(result: CommandResult) -> str:
    return result.stderr_bytes[-2000:].decode("utf-8", "replace").strip()


@cache
def _reporter() -> bytes:
    return Path(__file__).with_name("reporter.py").read_bytes()
