"""Processes of a live sandbox that outlive the call that started them."""

from __future__ import annotations

import signal as signals
from collections.abc import AsyncIterator, Iterable, Mapping

from worldfork.core.clock import SystemClock
from worldfork.core.errors import ConfigError, SandboxError
from worldfork.lineage.handle import Handle
from worldfork.records.sandbox import OutputEvent, OutputMode, OutputResponse, ProcessInfo, ProcessStatus, StdinMode
from worldfork.sandbox.command import Reason
from worldfork.sandbox.process import Process
from worldfork.sandbox.replies import ListedProcess

_CLOCK = SystemClock()


class Processes(Handle):
    """The calls about started processes."""

    async def start_process(
        self,
        command: str,
        args: Iterable[str] | None = None,
        env: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        stdin_mode: StdinMode | str = StdinMode.CLOSED,
        stdout_mode: OutputMode | str = OutputMode.CAPTURE,
        stderr_mode: OutputMode | str = OutputMode.CAPTURE,
        user: str | None = None,
        name: str | None = None,
        restart: str | None = None,
    ) -> ProcessInfo:
        """Start a program that outlives this call and this connection; its last output is kept in the sandbox.

        Args:
            stdin_mode: "pipe" lets `write_stdin` reach it.
            stdout_mode, stderr_mode: "capture" or "discard".
            restart: only "never".
            name: another word for its pid in the calls below, on this handle.

        Raises:
            ConfigError: an unknown mode. SandboxError: it could not be started.
        """
        _check_modes(stdin_mode, (stdout_mode, stderr_mode), restart)
        connection = await self._live.connection()
        spec = self._spec(
            (command, *(args or ())),
            env,
            working_dir,
            None,
            user,
            stdin=stdin_mode == StdinMode.PIPE,
            keep=True,
            discard_stdout=stdout_mode == OutputMode.DISCARD,
            discard_stderr=stderr_mode == OutputMode.DISCARD,
        )
        process = await connection.start(spec)
        if process.ended:
            result = await process.wait()
            if result.reason is Reason.NOT_STARTED:
                raise SandboxError(result.stderr.strip() or f"cannot run {command}", exit_code=result.exit_code)
        pid = process.pid
        process.detach()
        if name is not None:
            self._live.names[name] = pid
        return await self.get_process(pid)

    async def list_processes(self) -> list[ProcessInfo]:
        """Return every command that runs, and those of `start_process` that ended (the last 256), oldest first."""
        connection = await self._live.connection()
        names = {pid: name for name, pid in self._live.names.items()}
        rows = sorted(await connection.processes(), key=lambda row: (row.started_s, row.pid))
        return [_process_info(row, names.get(row.pid)) for row in rows]

    async def get_process(self, p: int | str) -> ProcessInfo:
        """Return one process by its pid inside or its name.

        Raises:
            SandboxError: there is none.
        """
        pid = self._pid(p)
        for info in reversed(await self.list_processes()):  # a number may have been given out again
            if info.pid == pid:
                return info
        raise SandboxError(f"there is no process {p} in {self._live.sandbox_id}")

    async def kill_process(self, p: int | str) -> None:
        """Kill a process and all that it started."""
        process = await self._attach(p, output=False)
        process.signal(signals.SIGKILL, tree=True)
        await process.wait()

    async def send_signal(self, p: int | str, signal: int) -> None:
        """Send a signal to one process."""
        process = await self._attach(p, output=False)
        process.signal(signal)
        process.detach()

    async def write_stdin(self, p: int | str, data: bytes) -> None:
        """Write to a process that was started with `stdin_mode="pipe"`."""
        process = await self._attach(p, output=False, claim_stdin=True)
        await process.write_stdin(data)
        process.detach()

    async def close_stdin(self, p: int | str) -> None:
        """End a process's input."""
        process = await self._attach(p, output=False, claim_stdin=True)
        process.close_stdin()
        process.detach()

    async def get_stdout(self, p: int | str) -> OutputResponse:
        """Return what a process printed so far, as lines; of much output the last MiB."""
        return await self._kept(p, ("stdout",))

    async def get_stderr(self, p: int | str) -> OutputResponse:
        """The same for stderr."""
        return await self._kept(p, ("stderr",))

    async def get_output(self, p: int | str) -> OutputResponse:
        """The same for both, first stdout."""
        return await self._kept(p, ("stdout", "stderr"))

    async def follow_output(self, p: int | str) -> AsyncIterator[OutputEvent]:
        """Yield a process's lines, those so far and then as they come, until it ends."""
        async for event in self._follow(p, ("stdout", "stderr")):
            yield event

    async def follow_stdout(self, p: int | str) -> AsyncIterator[OutputEvent]:
        """The same for stdout alone."""
        async for event in self._follow(p, ("stdout",)):
            yield event

    async def follow_stderr(self, p: int | str) -> AsyncIterator[OutputEvent]:
        """The same for stderr alone."""
        async for event in self._follow(p, ("stderr",)):
            yield event

    def _pid(self, p: int | str) -> int:
        if isinstance(p, int):
            return p
        try:
            return self._live.names[p] if p in self._live.names else int(p)
        except ValueError:
            raise SandboxError(f"there is no process named {p!r} on this handle") from None

    async def _attach(self, p: int | str, *, output: bool = True, claim_stdin: bool = False) -> Process:
        connection = await self._live.connection()
        return await connection.attach(self._pid(p), replay=output, output=output, claim_stdin=claim_stdin)

    async def _kept(self, p: int | str, streams: tuple[str, ...]) -> OutputResponse:
        connection = await self._live.connection()
        process = await connection.attach(self._pid(p), replay=True, follow=False)
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        async for stream, data in process:
            parts[stream].append(data)
        lines = [line for stream in streams for line in _lines(b"".join(parts[stream]))]
        return OutputResponse(self._pid(p), tuple(line.decode("utf-8", "replace") for line in lines))

    async def _follow(self, p: int | str, streams: tuple[str, ...]) -> AsyncIterator[OutputEvent]:
        process = await self._attach(p)
        rest: dict[str, bytes] = {}
        try:
            async for stream, data in process:
                if stream not in streams:
                    continue
                *lines, rest[stream] = (rest.get(stream, b"") + data).split(b"\n")
                for line in lines:
                    yield OutputEvent(line.decode("utf-8", "replace"), stream, _CLOCK.now_s())
            for stream, line in rest.items():
                if line:
                    yield OutputEvent(line.decode("utf-8", "replace"), stream, _CLOCK.now_s())
        finally:
            if not process.ended:
                process.detach()


def _lines(data: bytes) -> list[bytes]:
    """Split at line ends alone, as following does; the last line may lack its own."""
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


def _check_modes(stdin_mode: str, output_modes: tuple[str, str], restart: str | None) -> None:
    if stdin_mode not in list(StdinMode) or not set(output_modes) <= set(OutputMode):
        raise ConfigError("stdin_mode is closed or pipe, stdout_mode and stderr_mode are capture or discard")
    if restart not in (None, "never"):
        raise ConfigError(f"restart={restart!r} is not supported", remedy="start the process again when it has ended")


def _process_info(row: ListedProcess, name: str | None) -> ProcessInfo:
    return ProcessInfo(
        pid=row.pid,
        status=ProcessStatus(row.status),
        command=row.argv[0] if row.argv else "",
        args=tuple(row.argv[1:]),
        exit_code=row.exit_code,
        signal=row.signal,
        stdin_writable=row.stdin_open,
        started_at=row.started_s,
        ended_at=row.ended_s,
        name=name,
    )
