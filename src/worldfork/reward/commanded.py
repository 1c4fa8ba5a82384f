"""Tests that another program than the verifier's own runs, and whose results it leaves behind."""

from __future__ import annotations

import asyncio
import errno
import math
import resource
from pathlib import PurePosixPath

from worldfork.core.errors import ConfigError, PathError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.task import Task
from worldfork.reward.arguments import TEST_ENV
from worldfork.reward.blame import run_watched
from worldfork.reward.places import TASK_DIRECTORY, inside_task
from worldfork.reward.readers import read_junit, read_tap
from worldfork.reward.report import Report
from worldfork.sandbox.command import CommandResult

_READ_S = 30.0


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


async def run_command_tests(sandbox: AsyncSandbox, task: Task, max_bytes: int) -> tuple[CommandResult, Report, float]:
    """Run a task's `test_command` and read what it says of each test.

    Code under test shares a file system, and often a process, with whoever writes those results.

    Args:
        sandbox: everything is laid down in it.
        task: its `reader` says where results are.
        max_bytes: of the results; more of them are cut off (TAP) or count as none (JUnit).

    Returns:
        (how the command ended, what it said of the tests, seconds that it waited for a CPU as `run_watched` has it).

    Raises:
        SandboxError: the sandbox died, or could not be read.
    """
    program, *args = task.test_command
    path = task.reader.partition(":")[2]
    if path:
        await _clear(sandbox, path)
    cpu_s = math.ceil(task.limits.grade_cpu_s)
    result, waited_s = await run_watched(
        sandbox,
        task.limits.grade_wall_s,
        program,
        args,
        env=TEST_ENV,
        working_dir=TASK_DIRECTORY,
        max_output_bytes=max_bytes,
        rlimits=((resource.RLIMIT_CPU, cpu_s, cpu_s + 1), (resource.RLIMIT_CORE, 0, 0)),
    )
    if not path:
        return result, read_tap(result.stdout_bytes), waited_s
    return result, read_junit(await _results(sandbox, path, max_bytes)), waited_s


async def _clear(sandbox: AsyncSandbox, path: str) -> None:
    try:
        await sandbox.delete_file(_full(path), recursive=True)
    except PathError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise


async def _results(sandbox: AsyncSandbox, path: str, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most so many bytes, and nothing for anything else."""
    try:
        async with asyncio.timeout(_READ_S):
            facts = await sandbox.stat_file(_full(path), follow_links=False)
            if facts.kind != "f" or (facts.size or 0) > max_bytes:
                return b""
            return await sandbox.read_file(_full(path), max_bytes=max_bytes)
    except (PathError, TimeoutError):
        # It is absent, too large, or was changed while it was read: that is no result.
        return b""


def _full(path: str) -> str:
    return path if path.startswith("/") else inside_task(path)
