"""Making a fork of the starting state ready for its tests: edits, the rebuild step, hidden tests."""

from __future__ import annotations

import errno
import resource
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from worldfork.core.errors import PathError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.blame import check_host, is_starved, overload, run_watched
from worldfork.reward.laying import lay_edits, lay_tests
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.startup import admit
from worldfork.sandbox.command import CommandResult, Reason

T = TypeVar("T")

BUILD_FAILED = "build_failed"
"""How a grading ends whose rebuild step does not end with 0: no test has passed."""

BROKEN = "broken"
"""How a grading ends whose fork cannot be started, written to or asked, by the policy's doing."""

HOST_ERRNOS = (errno.EIO, errno.EMFILE, errno.ENFILE)
"""What is wrong with a path for reasons that are the machine's."""

_MAX_OUTPUT_BYTES = 1 << 20
_KILL_S = 30.0


@dataclass(frozen=True)
class Prepared:
    """What became of the fork."""

    broken: CommandResult | None
    """The rebuild step, where it did not end with 0; the tests are not there then."""
    notes: tuple[str, ...]


async def judged_or_none(
    task: Task, edits: Edits, ask: Callable[[Edits], Awaitable[T]], unedited: Edits | None = None
) -> T | None:
    """Judge edits in a fork; return None where their rebuild step left one in which nothing can be judged.

    A rebuild step runs what the policy may have changed of it, as the world's root. What cannot be started or written
    afterwards, and can where no policy had a say, is the policy's doing.

    Args:
        task: whose edits.
        edits: what the policy left.
        ask: judges some edits in a fork of its own.
        unedited: what can be judged; the untouched state by default.

    Raises:
        As `ask`.
    """
    try:
        return await ask(edits)
    except VerifierError as error:
        if error.fields.get("kind") is not FailureKind.GRADING or not task.rebuild or edits.empty:
            raise
    except PathError as error:
        if error.errno in HOST_ERRNOS or not task.rebuild or edits.empty:
            raise
    await ask(unedited or Edits())
    return None


async def prepare(sandbox: AsyncSandbox, task: Task, tests: Mapping[str, bytes], edits: Edits) -> Prepared:
    """Lay the edits down, rebuild what was made of them, then lay the hidden tests over it.

    Raises:
        As `build`.
    """
    prepared = await build(sandbox, task, tests, edits)
    if prepared.broken is None:
        await lay_tests(sandbox, task, tests)
    return prepared


async def build(sandbox: AsyncSandbox, task: Task, tests: Collection[str], edits: Edits) -> Prepared:
    """Lay the edits down and rebuild what was made of them.

    The starting state is built already, so nothing is rebuilt where nothing was edited.

    Args:
        sandbox: a fresh fork of the starting state.
        task: whose edits.
        tests: paths of the hidden tests.
        edits: what the policy left.

    Raises:
        VerifierError: the machine had no CPU or memory for the rebuild step, or it cannot be run at all.
        SandboxError: the fork could not be written to.
    """
    admitted, notes = admit(task, edits, tests)
    await lay_edits(sandbox, admitted)
    return Prepared(None if admitted.empty or not task.rebuild else await _rebuild(sandbox, task), notes)


async def _rebuild(sandbox: AsyncSandbox, task: Task) -> CommandResult | None:
    program, *args = task.rebuild
    result, waited_s = await run_watched(
        sandbox,
        task.limits.rebuild_wall_s,
        program,
        args,
        working_dir=TASK_DIRECTORY,
        max_output_bytes=_MAX_OUTPUT_BYTES,
        rlimits=((resource.RLIMIT_CORE, 0, 0),),
    )
    if result.ok:
        ended = await _end_processes(sandbox)
        # Left so many that there is no room for one more, for instance.
        return ended if ended.reason is Reason.NOT_STARTED else None
    if result.reason is Reason.NOT_STARTED:
        raise VerifierError(
            f"the rebuild step of {task.task_id} cannot be run: {result.stderr.strip()[-300:] or program}",
            remedy="the world needs the program that `rebuild` names",
            kind=FailureKind.BUILD,
        )
    if result.reason is Reason.OOM_KILLED:
        await check_host(sandbox)
    if is_starved(result, waited_s):
        raise overload(task)
    return result


async def _end_processes(sandbox: AsyncSandbox) -> CommandResult:
    """End what a rebuild step left running: it would stand beside the tests.

    One call of kill(2), during which the kernel lets no process be made; it spares its caller and PID 1.
    """
    return await sandbox.run("/bin/sh", ["-c", "kill -KILL -1"], timeout=_KILL_S, max_output_bytes=1 << 16)
