"""What a policy does in its sandbox, written down as it happens: the trajectory of a rollout.

A policy is given a `RecordedSandbox`, which is the sandbox with a recorder beside it. Nothing that runs inside can
reach the record, and it is bounded whatever a policy does.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import ConfigError, WorldforkError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.snapshots import ForkResults, SnapshotInfo
from worldfork.records.sandbox import ProcessInfo
from worldfork.records.trajectory import HARNESS, MAX_OUTPUT_CHARACTERS, POLICY, Step, Trajectory
from worldfork.sandbox.command import CommandResult
from worldfork.sandbox.process import Process

MAX_STEPS = 10_000
MAX_CHARACTERS = 16 << 20
"""Of all steps of one trajectory together."""
MAX_FACTS_CHARACTERS = 64_000


class Recorder:
    """Collects the steps of one rollout. For one event loop; commands may overlap.

    Args:
        clock: what times are taken by.
        ago_s: how long ago the rollout started; by default the recorder is there from its start.
        log: called with each step and fact as a line that `replay` takes.
    """

    def __init__(
        self, clock: Clock | None = None, *, ago_s: float = 0.0, log: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._clock = clock or SystemClock()
        self._began_s = self._clock.monotonic_s() - ago_s
        self._log = log
        self._steps: list[Step] = []
        self._characters = 0
        self._truncated = False
        self._facts: dict[str, Any] = {}
        self._said: Step | None = None
        self._running = 0
        self._busy_since_s = 0.0
        self._busy_s = 0.0

    def now_s(self) -> float:
        """Return seconds since the rollout's start."""
        return self._clock.monotonic_s() - self._began_s

    def message(
        self,
        text: str,
        *,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        log_probability: float | None = None,
    ) -> None:
        """Record what the policy said. It belongs to the next action; without one it is a step of its own.

        Args:
            text: the policy's words.
            prompt_tokens, completion_tokens: how many the model read and wrote for them.
            log_probability: sum over the completion tokens, natural logarithm.
        """
        self._settle()
        now_s = self.now_s()
        self._said = Step(
            "message",
            "",
            began_s=now_s,
            ended_s=now_s,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            log_probability=log_probability,
            message=bounded(text),
        )

    def note(self, text: str) -> None:
        """Record a line for people, such as which of its choices a policy took."""
        now_s = self.now_s()
        self._add(Step("note", bounded(text), began_s=now_s, ended_s=now_s))

    def fact(self, name: str, value: Any) -> None:
        """Keep a plain JSON value with the trajectory, such as the model's name.

        Raises:
            ConfigError: JSON cannot say it, or there is too much.
        """
        try:
            wanted = json.loads(json.dumps({**self._facts, str(name): value}, allow_nan=False))
            size = len(json.dumps(wanted))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"fact {name!r} is no plain JSON value: {error}", field="facts") from None
        if size > MAX_FACTS_CHARACTERS:
            raise ConfigError(f"facts take more than {MAX_FACTS_CHARACTERS} characters", field="facts")
        self._facts = wanted
        self._tell({"facts": wanted})

    def step(self, step: Step) -> None:
        """Add an action that is over; what the policy said before it goes with it, if it is the policy's."""
        said = None
        if step.actor == POLICY:
            said, self._said = self._said, None
        if said is not None:
            step = replace(
                step,
                message=step.message or said.message,
                prompt_tokens=said.prompt_tokens if step.prompt_tokens is None else step.prompt_tokens,
                completion_tokens=said.completion_tokens if step.completion_tokens is None else step.completion_tokens,
                log_probability=said.log_probability if step.log_probability is None else step.log_probability,
            )
        self._add(replace(step, action=bounded(step.action), output=bounded(step.output)))

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take up what other recorders of the same rollout logged; lines that are none are left out."""
        runs: list[tuple[float, float]] = []
        cut = False
        for line in lines:
            with contextlib.suppress(ConfigError, TypeError, AttributeError, KeyError):
                if "truncated" in line:
                    cut = True
                    continue
                if "facts" in line:
                    self._facts.update(line["facts"])
                    continue
                step = Step.from_json(line["step"])
                self._add(step)
                if step.kind == "command":
                    runs.append((step.began_s, step.ended_s))
        # After all: another recorder may have written on.
        self._truncated = self._truncated or cut
        end_s = 0.0
        for began_s, ended_s in sorted(runs):
            self._busy_s += max(0.0, ended_s - max(began_s, end_s))
            end_s = max(end_s, ended_s)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the block as time in which a command ran."""
        if not self._running:
            self._busy_since_s = self.now_s()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._busy_s += self.now_s() - self._busy_since_s

    @property
    def commands_s(self) -> float:
        """Wall time in which at least one command ran."""
        return self._busy_s + (self.now_s() - self._busy_since_s if self._running else 0.0)

    def trajectory(self) -> Trajectory:
        """Return what was recorded so far, in the order in which the steps ended."""
        self._settle()
        return Trajectory(tuple(self._steps), self._truncated, dict(self._facts))

    def _settle(self) -> None:
        said, self._said = self._said, None
        if said is not None:
            self._add(replace(said, action=said.message, message=""))

    def _add(self, step: Step) -> None:
        size = len(step.action) + len(step.output) + len(step.message)
        # Once a step is missing the later ones are too: a record with a hole would read as if nothing had been there.
        if self._truncated or len(self._steps) >= MAX_STEPS or self._characters + size > MAX_CHARACTERS:
            if not self._truncated:
                self._truncated = True
                self._tell({"truncated": True})
            return
        self._steps.append(step)
        self._characters += size
        self._tell({"step": step.to_json()})

    def _tell(self, line: dict[str, Any]) -> None:
        if self._log is not None:
            self._log(line)


class RecordedSandbox(AsyncSandbox):
    """The sandbox of a rollout, which writes down what its policy does in it.

    Commands and changes of files are recorded; looking at files is not, nor is what a streamed program prints.

    Args:
        inner: the sandbox itself.
        recorder: where the steps go.
        actor: whose doing they are.
    """

    def __init__(self, inner: AsyncSandbox, recorder: Recorder, *, actor: str = POLICY) -> None:
        # The same handle, with everything that it holds: what is not recorded works as it does there.
        self.__dict__.update(vars(inner))
        self._inner = inner
        self._recorder = recorder
        self._actor = actor

    def by_harness(self) -> RecordedSandbox:
        """Return this sandbox for what is done in it to run the policy, and not by the policy."""
        return RecordedSandbox(self._inner, self._recorder, actor=HARNESS)

    async def run(self, command: str, args: Iterable[str] | None = None, *rest: Any, **options: Any) -> CommandResult:
        """Run a program; see `AsyncSandbox.run`."""
        words = list(args or ())
        with self._command(spelled([command, *words])) as done:
            return done(await self._inner.run(command, words, *rest, **options))

    async def sh(self, line: str, *rest: Any, **options: Any) -> CommandResult:
        """Run one line in the world's shell; see `AsyncSandbox.sh`."""
        with self._command(line) as done:
            return done(await self._inner.sh(line, *rest, **options))

    async def stream(self, argv: Iterable[str], **options: Any) -> Process:
        """Start a program whose streams the caller handles; see `AsyncSandbox.stream`."""
        words = list(argv)
        with self._plain("command", spelled(words), reason="streamed"):
            return await self._inner.stream(words, **options)

    async def start_process(
        self, command: str, args: Iterable[str] | None = None, *rest: Any, **options: Any
    ) -> ProcessInfo:
        """Start a program that outlives this call; see `AsyncSandbox.start_process`."""
        words = list(args or ())
        with self._plain("command", spelled([command, *words]), reason="started"):
            return await self._inner.start_process(command, words, *rest, **options)

    async def write_file(self, path: str, content: bytes | str, **options: Any) -> None:
        """Write a regular file; see `AsyncSandbox.write_file`."""
        text = content if isinstance(content, str) else readable(content)
        with self._plain("write", path, output=text):
            await self._inner.write_file(path, content, **options)

    async def lay_files(
        self, directory: str, files: Mapping[str, tuple[bytes, int]], *, removed: Iterable[str] = ()
    ) -> None:
        """Remove paths and write regular files, at once; see `AsyncSandbox.lay_files`."""
        removed = tuple(removed)
        with contextlib.ExitStack() as steps:
            for path in removed:
                steps.enter_context(self._plain("write", f"{directory}/{path}", reason="deleted"))
            for path, (content, _) in files.items():
                steps.enter_context(self._plain("write", f"{directory}/{path}", output=readable(content)))
            await self._inner.lay_files(directory, files, removed=removed)

    async def delete_file(self, path: str, **options: Any) -> None:
        """Remove what is at a path; see `AsyncSandbox.delete_file`."""
        with self._plain("write", path, reason="deleted"):
            await self._inner.delete_file(path, **options)

    async def upload_file(self, local_path: str | Path, path: str) -> None:
        """Copy a file of the host into the sandbox; see `AsyncSandbox.upload_file`."""
        with self._plain("write", path, reason="uploaded"):
            await self._inner.upload_file(local_path, path)

    async def upload_directory(self, local_path: str | Path, path: str) -> None:
        """Copy a directory of the host into the sandbox; see `AsyncSandbox.upload_directory`."""
        with self._plain("write", path, reason="uploaded"):
            await self._inner.upload_directory(local_path, path)

    async def fork(self, n: int = 1, **options: Any) -> ForkResults[Any]:
        """Checkpoint this sandbox and start `n` from it, which are not recorded; see `AsyncSandbox.fork`."""
        with self._plain("note", f"forked into {n}"):
            return await self._inner.fork(n, **options)

    async def checkpoint(self, *rest: Any, **options: Any) -> SnapshotInfo:
        """Freeze the disk into a snapshot; see `AsyncSandbox.checkpoint`."""
        with self._plain("note", "checkpoint"):
            return await self._inner.checkpoint(*rest, **options)

    async def adopt(self, snapshot_id: str, **options: Any) -> SnapshotInfo:
        """Take on the state of a snapshot; see `AsyncSandbox.adopt`."""
        with self._plain("note", f"adopted {snapshot_id}"):
            return await self._inner.adopt(snapshot_id, **options)

    @classmethod
    async def create(cls, *rest: Any, **options: Any) -> Any:
        """Start a sandbox of its own, which is not recorded; see `AsyncSandbox.create`."""
        return await AsyncSandbox.create(*rest, **options)

    @classmethod
    async def connect(cls, sandbox_id: str, **options: Any) -> Any:
        """Attach to a live sandbox, which is not recorded; see `AsyncSandbox.connect`."""
        return await AsyncSandbox.connect(sandbox_id, **options)

    @classmethod
    async def fork_snapshot(cls, snapshot_id: str, n: int = 1, **options: Any) -> ForkResults[Any]:
        """Start sandboxes from a snapshot, which are not recorded; see `AsyncSandbox.fork_snapshot`."""
        return await AsyncSandbox.fork_snapshot(snapshot_id, n, **options)

    @contextlib.contextmanager
    def _command(self, action: str) -> Iterator[Callable[[CommandResult], CommandResult]]:
        recorder, results = self._recorder, list[CommandResult]()

        def done(result: CommandResult) -> CommandResult:
            results.append(result)
            return result

        began_s = recorder.now_s()
        reason = ""
        try:
            with recorder.running():
                yield done
        except BaseException as error:
            reason = _cause(error)
            # With check=True the result is in the error.
            result = getattr(error, "result", None)
            if isinstance(result, CommandResult):
                results.append(result)
            raise
        finally:
            step = _command_step(action, results, reason, began_s, recorder.now_s())
            recorder.step(replace(step, actor=self._actor))

    @contextlib.contextmanager
    def _plain(self, kind: str, action: str, *, output: str = "", reason: str = "") -> Iterator[None]:
        recorder = self._recorder
        began_s = recorder.now_s()
        try:
            yield
        except BaseException as error:
            reason = _cause(error)
            raise
        finally:
            step = Step(kind, action, bounded(output), reason=reason, began_s=began_s, ended_s=recorder.now_s())
            recorder.step(replace(step, actor=self._actor))


def _command_step(action: str, results: Sequence[CommandResult], reason: str, began_s: float, ended_s: float) -> Step:
    if not results:
        return Step("command", action, reason=reason, began_s=began_s, ended_s=ended_s)
    result = results[0]
    output = bounded(readable(result.stdout_bytes))
    errors = bounded(readable(result.stderr_bytes))
    between = "\n" if output and errors and not output.endswith("\n") else ""
    return Step(
        "command",
        action,
        bounded(output + between + errors),
        exit_code=result.exit_code,
        reason=result.reason.value,
        began_s=began_s,
        ended_s=ended_s,
        cpu_s=result.cpu_s,
    )


def bounded(text: str, limit: int = MAX_OUTPUT_CHARACTERS) -> str:
    """Return a text of at most `limit` characters: of a longer one the head and the tail, with a line between."""
    text = text.encode("utf-8", "replace").decode("utf-8") if not _is_plain(text) else text
    if len(text) <= limit:
        return text
    between = f"\n[... {len(text) - limit} characters or more left out ...]\n"
    room = max(0, limit - len(between))
    return text[: room - room // 2] + between[: limit - room] + text[len(text) - room // 2 :]


def _is_plain(text: str) -> bool:
    """Tell whether UTF-8 can hold a text: a lone surrogate would make its record unreadable elsewhere."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def readable(data: bytes) -> str:
    """Return bytes as text: UTF-8, with U+FFFD for what is none."""
    # Decoding more than is kept would only take memory.
    if len(data) > 8 * MAX_OUTPUT_CHARACTERS:
        half = 4 * MAX_OUTPUT_CHARACTERS
        return readable(data[:half]) + readable(data[-half:])
    return data.decode("utf-8", "replace")


def spelled(argv: Sequence[str | bytes]) -> str:
    """Return an argument list as one line for a shell."""
    return shlex.join(word if isinstance(word, str) else readable(word) for word in argv)


def _cause(error: BaseException) -> str:
    if isinstance(error, WorldforkError):
        return error.code
    return "cancelled" if not isinstance(error, Exception) else type(error).__name__
