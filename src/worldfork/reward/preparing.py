"""Making a fork of the starting state ready for its tests: edits, the rebuild step, hidden tests.

A rebuild step runs what a policy may have changed of it, as the world's root. So what breaks from then on is the
policy's doing, unless the machine is to blame; and all that goes on after it is a fork of what it left on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from worldfork.core.errors import (
    LaunchFailed,
    OutOfSpace,
    PathError,
    SandboxDied,
    VerifierError,
    WorldforkError,
)
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.blame import check_host, is_starved, overload, run_watched
from worldfork.reward.laying import lay_edits, lay_tests
from worldfork.reward.needs import UNKNOWN, Need
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.startup import admit
from worldfork.reward.verifier import Start
from worldfork.sandbox.command import Reason

T = TypeVar("T")

BUILD_FAILED = "build_failed"
"""How a grading ends whose rebuild step does not end with 0: no test has passed."""

BROKEN = "broken"
"""How a grading ends whose fork cannot be started, written to or asked, by the policy's doing."""

HOST_ERRNOS = (errno.EIO, errno.EMFILE, errno.ENFILE)
"""What is wrong with a path for reasons that are the machine's."""

_HOST_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.E2BIG, errno.EIO, 0)
_MAX_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True)
class Broken:
    """Why a fork did not become ready, by the doing of what was laid down in it."""

    end: str
    """`BUILD_FAILED`, or the code of what befell the sandbox."""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    words: str = ""
    """The end of what the rebuild step printed; for people."""


@dataclass(frozen=True)
class Prepared:
    """A fork that is ready, or never will be."""

    sandbox: AsyncSandbox
    """Where to go on: another one than at first where there was a rebuild step."""
    broken: Broken | None
    """If it will never be; the tests are not there then."""
    notes: tuple[str, ...]
    rebuild_s: float = 0.0
    """Wall time of the rebuild step less what others took of it, as far as that was asked."""
    rebuild_cpu_s: float = 0.0


async def judged_or_none(
    task: Task, edits: Edits, ask: Callable[[Edits], Awaitable[T]], unedited: Edits | None = None
) -> T | None:
    """Judge edits in a fork; return None where they leave one in which nothing can be judged.

    What breaks with the edits, and again, and does not where no policy had a say is the policy's doing: anything else
    would let it void a bad score.

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
    except WorldforkError as error:
        if edits.empty or not is_in_doubt(error):
            raise
    await ask(unedited or Edits())
    try:
        return await ask(edits)
    except WorldforkError as error:
        if not is_in_doubt(error):
            raise
    return None


def is_in_doubt(error: WorldforkError) -> bool:
    """Tell whether either the edits, or the state, or the machine may have done it."""
    if isinstance(error, LaunchFailed):
        # A start that fails on what it finds says at which step; one that is late or meets a limit of the host does
        # not, or says so.
        return "step" in error.fields and error.fields.get("errno", 0) not in _HOST_LIMITS
    if isinstance(error, VerifierError):
        return error.fields.get("kind") in (FailureKind.GRADING, FailureKind.BUILD)
    return isinstance(error, PathError) and error.errno not in HOST_ERRNOS


@contextlib.asynccontextmanager
async def prepare(
    sandbox: AsyncSandbox, task: Task, start: Start, edits: Edits, need: Need | None = None
) -> AsyncIterator[Prepared]:
    """Lay the edits down, rebuild what was made of them, then lay the hidden tests over it.

    Args, Raises:
        As `build`.
    """
    async with build(sandbox, task, start, edits, need) as built:
        if built.broken is None:
            broken = await _doing(edits, built.sandbox, lay_tests(built.sandbox, task, start.tests))
            built = replace(built, broken=broken)
        yield built


@contextlib.asynccontextmanager
async def build(
    sandbox: AsyncSandbox, task: Task, start: Start, edits: Edits, need: Need | None = None
) -> AsyncIterator[Prepared]:
    """Lay the edits down and rebuild what was made of them.

    The starting state is built already, so nothing is rebuilt where nothing was edited.

    Args:
        sandbox: a fresh fork of the starting state.
        task: whose edits.
        start: its starting state.
        edits: what the policy left.
        need: what the reference needs; by default that is not known, and what the rebuild step takes is measured.

    Raises:
        VerifierError: the machine had no CPU or memory for the rebuild step, or it cannot be run at all.
        SandboxError, StoreError, ForkError: a fork could not be made or written to; without edits also one that died.
    """
    admitted, notes = admit(task, edits, start.tests)
    broken = await _doing(edits, sandbox, lay_edits(sandbox, admitted))
    if broken is None and task.rebuild and not admitted.empty:
        took: list[tuple[float, float]] = []
        broken = await _doing(edits, sandbox, _rebuild(sandbox, task, need, took))
        if broken is None:
            async with contextlib.AsyncExitStack() as stack:
                left: list[str] = []
                broken = await _doing(edits, sandbox, _still(sandbox, start, stack, left))
                if broken is None:
                    # In it nothing runs that a policy started.
                    sandbox = await _start_again(sandbox, start, stack, left[0])
                yield Prepared(sandbox, broken, notes, *took[0])
            return
    yield Prepared(sandbox, broken, notes)


async def _doing(edits: Edits, sandbox: AsyncSandbox, act: Awaitable[Broken | None]) -> Broken | None:
    """Do something; what ends the sandbox meanwhile is the edits' doing unless it is the machine's."""
    try:
        return await act
    except (SandboxDied, OutOfSpace) as error:
        if edits.empty or (isinstance(error, OutOfSpace) and error.scope != "sandbox"):
            raise
        await check_host(sandbox)
        return Broken(error.code)


async def _still(sandbox: AsyncSandbox, start: Start, stack: contextlib.AsyncExitStack, left: list[str]) -> None:
    left.append(await stack.enter_async_context(start.stilled(sandbox)))


async def _start_again(
    sandbox: AsyncSandbox, start: Start, stack: contextlib.AsyncExitStack, snapshot_id: str
) -> AsyncSandbox:
    try:
        return await stack.enter_async_context(start.fork(sandbox.fork_index, grading=True, snapshot_id=snapshot_id))
    except (LaunchFailed, SandboxDied) as error:
        if isinstance(error, LaunchFailed) and not is_in_doubt(error):
            raise
        raise VerifierError(
            f"what a rebuild step left cannot be started: {error}",
            remedy="run fewer rollouts at once",
            kind=FailureKind.GRADING,
        ) from error


async def _rebuild(
    sandbox: AsyncSandbox, task: Task, need: Need | None, took: list[tuple[float, float]]
) -> Broken | None:
    program, *args = task.rebuild
    result, missed_s = await run_watched(
        sandbox,
        task.limits.rebuild_wall_s,
        program,
        args,
        measured=need is None,
        needed_cpu_s=(need or UNKNOWN).rebuild_cpu_s,
        working_dir=TASK_DIRECTORY,
        max_output_bytes=_MAX_OUTPUT_BYTES,
        rlimits=((resource.RLIMIT_CORE, 0, 0),),
    )
    if result.reason is Reason.NOT_STARTED:
        raise VerifierError(
            f"the rebuild step of {task.task_id} cannot be run: {result.stderr.strip()[-300:] or program}",
            remedy="the world needs the program that `rebuild` names",
            kind=FailureKind.BUILD,
        )
    # A step may end well, or as if by itself, though the host ended a child of it for its memory.
    await check_host(sandbox)
    if result.ok:
        took.append((result.wall_s - missed_s, result.cpu_s))
        return None
    if is_starved(result, missed_s, (need or UNKNOWN).rebuild_s):
        raise overload(task)
    words = (result.stdout_bytes + result.stderr_bytes)[-2000:].decode("utf-8", "replace").strip()
    return Broken(BUILD_FAILED, result.cpu_s, result.wall_s, words)
