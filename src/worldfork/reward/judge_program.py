"""A program that says what a state is worth: run in a sandbox, its answer read within bounds."""

from __future__ import annotations

import math
import resource
from dataclasses import dataclass, field

from worldfork.core.errors import ConfigError, OutOfSpace, SandboxDied, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.checked import checked_strings
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.blame import check_host, is_starved, overload, run_watched
from worldfork.reward.left_file import clear_file, read_left
from worldfork.reward.places import TASK_DIRECTORY
from worldfork.reward.rewards_file import MAX_REWARD_BYTES, read_reward
from worldfork.sandbox.command import CommandResult, Reason

KEY_VARIABLE = "WORLDFORK_GRADE_KEY"
"""The same for the same act of grading, for a program that asks something outside."""

EXIT = "exit"
STDOUT = "stdout"
FILE = "file:"

_MAX_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True)
class JudgeSpec:
    """Which program judges, and where its answer is."""

    command: tuple[str, ...]
    answer: str = EXIT
    """`exit`: 0 is worth 1, anything else 0. `stdout`: all that it prints is the reward. `file:PATH`: a file of the
    task's directory, or an absolute path, that is removed beforehand."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "command", checked_strings("verifier.command", self.command))
        if not self.command:
            raise ConfigError("a command verifier needs a command", field="verifier.command")
        answer = self.answer
        if answer not in (EXIT, STDOUT) and not (answer.startswith(FILE) and answer[5:]):
            raise ConfigError(f"answer {answer!r} is not exit, stdout or file:PATH", field="verifier.answer")


@dataclass(frozen=True)
class Judgement:
    """What the program said."""

    reward: float
    end: str
    cpu_s: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    answered: bool = True
    """Whether there was an answer at all; its absence is worth 0."""


async def judge(sandbox: AsyncSandbox, task: Task, spec: JudgeSpec, key: str) -> Judgement:
    """Run the program and read its answer.

    No answer, or one that is no reward, is worth 0: where code under test runs beside the program, anything else
    would let it void a bad score. `answered` tells.

    Raises:
        VerifierError: the program cannot be run, or the machine ended it.
        SandboxError: the sandbox cannot be read.
    """
    try:
        said = await _ask(sandbox, task, spec, key)
    except (SandboxDied, OutOfSpace) as error:
        if isinstance(error, OutOfSpace) and error.scope != "sandbox":
            raise
        said = Judgement(0.0, error.code, answered=False)
    if said.reward < 1:
        # Of a child that the host ended for its memory nobody else tells.
        await check_host(sandbox)
    return said


async def _ask(sandbox: AsyncSandbox, task: Task, spec: JudgeSpec, key: str) -> Judgement:
    path = spec.answer.removeprefix(FILE) if spec.answer.startswith(FILE) else ""
    if path:
        await clear_file(sandbox, path)
    result = await _run(sandbox, task, spec, key)
    if spec.answer == EXIT:
        reward = 1.0 if result.ok else 0.0
        return Judgement(reward, result.reason.value, result.cpu_s, notes=() if result.ok else _words(result))
    data = await read_left(sandbox, path, MAX_REWARD_BYTES) if path else result.stdout_bytes
    try:
        reward, parts = read_reward(data, "the verifier's program")
    except VerifierError as error:
        return Judgement(0.0, result.reason.value, result.cpu_s, notes=(str(error), *_words(result)), answered=False)
    return Judgement(reward, result.reason.value, result.cpu_s, parts)


async def _run(sandbox: AsyncSandbox, task: Task, spec: JudgeSpec, key: str) -> CommandResult:
    program, *args = spec.command
    cpu_s = math.ceil(task.limits.grade_cpu_s)
    result, waited_s = await run_watched(
        sandbox,
        task.limits.grade_wall_s,
        program,
        args,
        env={KEY_VARIABLE: key, "PYTHONHASHSEED": "0"},
        working_dir=TASK_DIRECTORY,
        max_output_bytes=_MAX_OUTPUT_BYTES,
        rlimits=((resource.RLIMIT_CPU, cpu_s, cpu_s + 1), (resource.RLIMIT_CORE, 0, 0)),
    )
    if result.reason is Reason.NOT_STARTED:
        raise VerifierError(
            f"the verifier's program of {task.task_id} cannot be run: {result.stderr.strip()[-300:] or program}",
            remedy="the world, or the hidden tests, must bring it",
            kind=FailureKind.GRADING,
        )
    if is_starved(result, waited_s):
        raise overload(task)
    return result


def _words(result: CommandResult) -> tuple[str, ...]:
    lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
    return tuple(line[:300] for line in lines[-2:])
