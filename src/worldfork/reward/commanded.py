"""Tests that another program than the verifier's own runs, and whose results it leaves behind."""

from __future__ import annotations

import math
import resource
from pathlib import PurePosixPath

from worldfork.core.errors import ConfigError
from worldfork.core.threads import in_thread
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.task import Task
from worldfork.reward.arguments import TEST_ENV
from worldfork.reward.blame import run_watched
from worldfork.reward.left_file import clear_file, read_left
from worldfork.reward.needs import UNKNOWN, Need
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.readers import read_junit, read_tap
from worldfork.reward.report import Report
from worldfork.sandbox.command import CommandResult


def pytest_arguments(task: Task) -> tuple[str, ...] | None:
    """Return the arguments of tests that pytest runs under the verifier's own eyes; None for any other program.

    A `test_command` that is `python -m pytest ...` or `pytest ...` is one whose results need no reader.

    Raises:
        ConfigError: it is another, and no reader is named.
    """
    if not task.test_command:
        return task.test_args
    if task.reader != "pytest":
        return None
    program, *args = task.test_command
    name = PurePosixPath(program).name
    if name.startswith("python") and args[:2] == ["-m", "pytest"]:
        return tuple(args[2:])
    if name in ("pytest", "py.test"):
        return tuple(args)
    raise ConfigError(
        f"test_command of {task.task_id} is {program!r}, not pytest, and no reader is named",
        remedy="name a reader: junit:PATH or tap",
        field="reader",
    )


def import_path(task: Task) -> str:
    """Return the directories for the import path of a task's tests, as the reporter takes them.

    `python -m pytest` has its working directory before all others, and `pytest` does not.
    """
    paths = [each for each in task.env.get("PYTHONPATH", "").split(":") if each]
    return (":" if _is_module(task) else "") + ":".join(paths)


def _is_module(task: Task) -> bool:
    return bool(task.test_command) and task.reader == "pytest" and task.test_command[1:3] == ("-m", "pytest")


async def run_command_tests(
    sandbox: AsyncSandbox, task: Task, max_bytes: int, need: Need | None = None
) -> tuple[CommandResult, Report, float]:
    """Run a task's `test_command` and read what it says of each test.

    Code under test shares a file system, and often a process, with whoever writes those results.

    Args:
        sandbox: everything is laid down in it.
        task: its `reader` says where results are.
        max_bytes: of the results; more of them are cut off (TAP) or count as none (JUnit).
        need: what the reference needs; by default that is not known and is measured.

    Returns:
        (how the command ended, what it said of the tests, seconds in which others had the CPU as `run_watched` has it).

    Raises:
        SandboxError: the sandbox died, or could not be read.
    """
    program, *args = task.test_command
    path = task.reader.partition(":")[2]
    if path:
        await clear_file(sandbox, path)
    cpu_s = math.ceil((need or UNKNOWN).cpu_limit_s(task.limits.grade_cpu_s))
    result, missed_s = await run_watched(
        sandbox,
        task.limits.grade_wall_s,
        program,
        args,
        measured=need is None,
        needed_cpu_s=(need or UNKNOWN).cpu_s,
        env=TEST_ENV,
        working_dir=TASK_DIRECTORY,
        max_output_bytes=max_bytes,
        rlimits=((resource.RLIMIT_CPU, cpu_s, cpu_s + 1), (resource.RLIMIT_CORE, 0, 0)),
    )
    # In a thread: what code under test wrote may take seconds to read.
    if not path:
        return result, await in_thread(read_tap, result.stdout_bytes), missed_s
    return result, await in_thread(read_junit, await read_left(sandbox, path, max_bytes)), missed_s
