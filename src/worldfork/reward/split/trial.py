"""One run of a task's hidden tests with the candidate in another fork."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from worldfork.core.clock import Clock
from worldfork.core.errors import SandboxDied, SandboxError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.report import Report, read_report
from worldfork.reward.split.frames import VALUE_MODULES, FrameStream, program_argument, program_input
from worldfork.reward.split.plan import plan_text
from worldfork.reward.split.relay import WALL_FACTOR, Candidate, Relay, process_use, read_shapes
from worldfork.reward.split.values import Malformed
from worldfork.reward.trial import _ENV, _fixed_args, _test_limits
from worldfork.sandbox.command import Reason

MAX_TESTS_FRAME_BYTES = 64 << 20
"""The tests' own arguments; no candidate has a say in them beyond what its answers are."""

_GRACE_S = 5.0
_MARGIN_S = 5.0
"""Between the relay's wall limit of a test and the tests' own: the relay knows whether the candidate had a CPU."""
_STARVED_SHARE = 0.5


@dataclass(frozen=True)
class SplitTrial:
    """What came of one run."""

    report: Report
    end: str
    """How the tests' process ended."""
    cpu_s: float
    """Of both sides."""
    starved: bool
    """A wall limit struck while one side waited for a CPU."""
    shapes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    last_words: str = ""


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
    cpu_s = math.ceil(task.limits.grade_cpu_s)
    process = await tests.stream(
        ["python", "-P", "-B", "-s", "-c", program_argument(), f"{test_cpu_s or 0:g}", *args],
        env=_ENV,
        working_dir=TASK_DIRECTORY,
        stdin=True,
        timeout=task.limits.grade_wall_s + _GRACE_S,
        rlimits=((resource.RLIMIT_CPU, cpu_s, cpu_s + 1), (resource.RLIMIT_CORE, 0, 0)),
    )
    stream = FrameStream(process, MAX_TESTS_FRAME_BYTES)
    other = Candidate(candidate, _ENV, task.limits.grade_cpu_s)
    relay = Relay(stream, other, test_cpu_s, clock)
    late = asyncio.create_task(_waited_share(tests, process.pid, other, task.limits.grade_wall_s, clock))
    end = "exited"
    cpu_used_s = 0.0
    try:
        with contextlib.suppress(BrokenPipeError):
            await process.write_stdin(_program(plan_text(plan, shapes)))
        await relay.run()
        result = await process.wait()
        end, cpu_used_s = result.reason.value, result.cpu_s
    except SandboxDied as error:
        end = error.code
    except Malformed:
        end = Reason.OUTPUT_LIMIT.value
        process.kill()
    finally:
        late.cancel()
        await other.end()
    report = read_report(b"".join(line + b"\n" for line in relay.lines))
    if not report.ready:
        raise VerifierError(
            f"pytest did not start ({end}): {stream.last_words or 'no output'}",
            remedy="the world needs `python` with pytest and pytest-timeout on its PATH",
            kind=FailureKind.GRADING,
        )
    starved = relay.starved or (end == Reason.TIMED_OUT.value and late.done() and _share(late) >= _STARVED_SHARE)
    found, notes = read_shapes(relay.lines)
    return SplitTrial(report, end, cpu_used_s + other.cpu_s, starved, found, tuple(notes), stream.last_words)


def _pytest_arguments(task: Task) -> tuple[list[str], float | None]:
    args, test_cpu_s = _test_limits(task.test_args)
    if test_cpu_s is not None:
        # pytest's own limit comes after that of the relay.
        args = [
            f"--timeout={WALL_FACTOR * test_cpu_s + _MARGIN_S:g}" if each.startswith("--timeout=") else each
            for each in args
        ]
    return [*_fixed_args(task), *args], test_cpu_s


def _share(late: asyncio.Task[float]) -> float:
    return 0.0 if late.cancelled() or late.exception() else late.result()


async def _waited_share(tests: AsyncSandbox, pid: int, candidate: Candidate, wall_s: float, clock: Clock) -> float:
    """Sleep until the wall limit; return the larger share of it in which one side waited for a CPU."""
    await clock.sleep_s(wall_s)
    waited_s = 0.0
    with contextlib.suppress(SandboxError):
        waited_s = max((await process_use(tests, pid))[1], (await candidate.use())[1])
    return waited_s / wall_s


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
