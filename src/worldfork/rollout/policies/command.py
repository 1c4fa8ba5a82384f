"""A policy that is a program: an agent that runs inside the sandbox, or on the host with the sandbox's id in hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from worldfork.core.errors import ConfigError, PolicyError
from worldfork.core.ids import content_id
from worldfork.core.settings import load_settings
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.checked import checked_strings, checked_variables
from worldfork.records.task import Task
from worldfork.records.trajectory import HARNESS, MAX_OUTPUT_CHARACTERS, Step
from worldfork.rollout.recording import MAX_CHARACTERS, RecordedSandbox, readable, spelled
from worldfork.rollout.turn import Turn
from worldfork.sandbox.command import OutputBuffer, Reason

PROMPT_INSIDE = "/tmp/worldfork-prompt.md"
"""Where an agent inside finds its prompt; outside of the task's directory, so that it is never part of an answer."""

MAX_PROMPT_VARIABLE_BYTES = 100_000
"""A longer prompt is in the file alone: the kernel takes 128 KiB in one variable."""

_CHUNK_BYTES = 64 * 1024


class CommandPolicy:
    """Runs an agent program, and its turn is over when that ends.

    The program finds its prompt in the file that `WORLDFORK_PROMPT_FILE` names and, if it is not too long, in
    `WORLDFORK_PROMPT`; `WORLDFORK_TASK_ID`, `WORLDFORK_FORK_INDEX` and `WORLDFORK_SEED` tell the rest. One on the host
    is told its sandbox by `WORLDFORK_SANDBOX_ID`, and may append its steps, as the JSON of a `Step` on a line each, to
    the file that `WORLDFORK_STEPS_FILE` names.

    Inside, the exit code means nothing: what is left is graded. On the host a program that ends with another code
    than 0 has broken, and its rollout has no reward.

    Args:
        command: the program and its arguments, or one line that is split as a shell would; no shell runs it.
        where: `inside` the sandbox, in the task's directory, or on the `host`.
        env: variables for the program. One on the host has those of this process too.

    Raises:
        ConfigError: the command is empty or cannot be split, or `where` is neither.
    """

    def __init__(
        self, command: str | Sequence[str], *, where: str = "inside", env: Mapping[str, str] | None = None
    ) -> None:
        self._argv = _split(command)
        self._env = checked_variables("env", env or {})
        if where not in ("inside", "host"):
            raise ConfigError(f"an agent program runs inside or on the host, not {where!r}", field="where")
        self._where = where
        parts = [where, *self._argv, "", *(f"{name}={value}" for name, value in sorted(self._env.items()))]
        self.policy_id = f"command-{content_id(*(part.encode('utf-8', 'surrogateescape') for part in parts))[:16]}"

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
        """Run the program to its end.

        Raises:
            PolicyError: it could not be started, or, on the host, it failed.
        """
        if self._where == "inside":
            await self._inside(sandbox, task, turn)
        else:
            await self._on_host(sandbox, task, turn)

    async def _inside(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
        if isinstance(sandbox, RecordedSandbox):
            # What the program does is not seen from here; that it is started is nothing that it said or did.
            sandbox = sandbox.by_harness()
        await sandbox.write_file(PROMPT_INSIDE, task.prompt)
        env = {**_told(task, turn, PROMPT_INSIDE), **self._env}
        # The program's output is for people: of an agent that says much, nothing but the middle is lost.
        line = f"exec {shlex.join(self._argv)}"
        found = await sandbox.run("sh", ["-c", 'command -v -- "$1" >/dev/null', "sh", self._argv[0]], env=env)
        if found.reason is Reason.EXITED and found.exit_code != 0:
            raise PolicyError(
                f"there is no program {self._argv[0]!r} in the sandbox", remedy="put it in the world, or mount it"
            )
        await sandbox.sh(line, env=env)

    async def _on_host(self, sandbox: AsyncSandbox, task: Task, turn: Turn) -> None:
        with tempfile.TemporaryDirectory(prefix="worldfork-agent-") as directory:
            prompt, steps = Path(directory, "prompt.md"), Path(directory, "steps.jsonl")
            prompt.write_text(task.prompt, encoding="utf-8")
            env = {
                **os.environ,
                **_told(task, turn, str(prompt)),
                "WORLDFORK_HOME": str(load_settings().home),
                "WORLDFORK_SANDBOX_ID": sandbox.sandbox_id,
                "WORLDFORK_STEPS_FILE": str(steps),
                **self._env,
            }
            began_s = turn.recorder.now_s()
            try:
                code, output = await _run_on_host(self._argv, env)
            finally:
                for step in _steps_in(steps):
                    turn.recorder.step(step)
            turn.recorder.step(
                Step(
                    "note",
                    spelled(self._argv),
                    output,
                    code,
                    began_s=began_s,
                    ended_s=turn.recorder.now_s(),
                    actor=HARNESS,
                )
            )
        if code != 0:
            last = output.strip().splitlines()[-1:] or ["it printed nothing"]
            raise PolicyError(f"the agent program ended with {code}: {last[0][-300:]}", exit_code=code)


def _split(command: str | Sequence[str]) -> tuple[str, ...]:
    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise ConfigError(f"the command of an agent cannot be split: {error}", field="command") from None
    argv = checked_strings("command", words)
    if not argv or not argv[0]:
        raise ConfigError("the command of an agent is empty", field="command")
    return argv


def _told(task: Task, turn: Turn, prompt_file: str) -> dict[str, str]:
    told = {
        "WORLDFORK_PROMPT_FILE": prompt_file,
        "WORLDFORK_TASK_ID": task.task_id,
        "WORLDFORK_FORK_INDEX": str(turn.index),
        "WORLDFORK_SEED": str(turn.seed),
    }
    short = len(task.prompt.encode("utf-8")) <= MAX_PROMPT_VARIABLE_BYTES and "\0" not in task.prompt
    return {**told, "WORLDFORK_PROMPT": task.prompt} if short else told


async def _run_on_host(argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
    """Run a program of the host; a cancellation kills it and its process group. Returns its code and last output."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise PolicyError(f"the agent program {argv[0]!r} could not be started: {error}") from error
    kept = OutputBuffer(MAX_OUTPUT_CHARACTERS, keep_tail=True)
    assert process.stdout is not None
    reading = asyncio.ensure_future(_read(process.stdout, kept))
    try:
        code = await process.wait()
        # A server that it left behind may hold the pipe open for ever.
        await asyncio.wait([reading], timeout=1.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        await asyncio.shield(process.wait())
    return code, readable(kept.join()[0])


async def _read(stream: asyncio.StreamReader, kept: OutputBuffer) -> None:
    while data := await stream.read(_CHUNK_BYTES):
        kept.add(data)


def _steps_in(path: Path) -> Iterator[Step]:
    """Yield the steps that a program wrote down; what is no step is left out."""
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_CHARACTERS).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            step = Step.from_json(json.loads(line))
            texts = [type(each) for each in (step.kind, step.action, step.output, step.message, step.reason)]
        except (ValueError, RecursionError, AttributeError, TypeError):
            continue
        if set(texts) == {str}:
            yield step
