"""What can be done inside a live sandbox, as coroutines: commands, processes, files."""

from __future__ import annotations

import posixpath
import signal as signals
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from worldfork.core.clock import SystemClock
from worldfork.core.errors import ConfigError, SandboxError
from worldfork.lineage.identity import command_env
from worldfork.lineage.live import Live
from worldfork.records.sandbox import (
    DirectoryEntry,
    ListDirectoryResponse,
    OutputEvent,
    OutputResponse,
    ProcessInfo,
)
from worldfork.sandbox import download, files, upload
from worldfork.sandbox.command import CommandResult, CommandSpec, Reason
from worldfork.sandbox.connection import MAX_OUTPUT_BYTES
from worldfork.sandbox.process import Process
from worldfork.sandbox.replies import ListedProcess

SH_OUTPUT_BYTES = 64 * 1024
"""What `sh` keeps, head and tail: about what an agent's context takes."""
_CLOCK = SystemClock()

Rlimits = Iterable[tuple[int, int, int]]
"""(resource, soft, hard) as `resource.RLIMIT_*` numbers them; -1 is no limit."""


class _Where(TypedDict):
    user: str
    working_dir: str


class Calls:
    """The calls that every handle on a live sandbox has."""

    _live: Live

    async def run(
        self,
        command: str,
        args: Iterable[str] | None = None,
        env: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        timeout: float | None = None,
        user: str | None = None,
        *,
        stdin: bytes | str | None = None,
        check: bool = False,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        rlimits: Rlimits = (),
    ) -> CommandResult:
        """Run a program to its end and return what it printed and how it ended.

        Never raises for an exit code, a time limit or an output limit unless `check`; see `CommandResult.reason`.
        Cancelling the call kills the whole process tree.

        Args:
            timeout: seconds of wall time; the whole tree ends at it, what was printed is kept.
            stdin: sent, then closed; /dev/null without it.
            max_output_bytes: above it, on either stream, the tree is killed with the reason `output_limit`.

        Raises:
            SandboxDied: the sandbox is gone; CommandFailed, CommandTimeout: with `check` only.
        """
        connection = await self._live.connection()
        data = stdin.encode() if isinstance(stdin, str) else stdin
        spec = self._spec(
            (command, *(args or ())), env, working_dir, timeout, user, stdin=data or False, rlimits=rlimits
        )
        result = await connection.run(spec, max_output_bytes=max_output_bytes)
        return result.check() if check else result

    async def sh(
        self,
        line: str,
        timeout: float | None = None,
        *,
        env: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        user: str | None = None,
        check: bool = False,
        max_output_bytes: int = SH_OUTPUT_BYTES,
    ) -> CommandResult:
        """Run one line in the world's shell (bash, else sh), as an agent sends it.

        stderr goes into stdout in the order written. Of a long output the first and the last part are kept, with a
        line between them that says how much is missing; the command goes on.
        """
        connection = await self._live.connection()
        while True:
            spec = self._spec((self._live.shell, "-c", line), env, working_dir, timeout, user, merge=True)
            result = await connection.run(spec, max_output_bytes=max_output_bytes, keep_tail=True)
            if result.reason is not Reason.NOT_STARTED or result.exit_code != 127 or self._live.shell == "sh":
                return result.check() if check else result
            self._live.shell = "sh"

    async def stream(
        self,
        argv: Iterable[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        working_dir: str | None = None,
        timeout: float | None = None,
        stdin: bool = False,
        tty: tuple[int, int] | None = None,
    ) -> Process:
        """Start a program whose streams the caller handles as they come: iterate the process, write to it, await it.

        Its output is read no faster than it is taken, and it is killed when this connection ends.

        Args:
            tty: (rows, columns) of a terminal to run it on.
        """
        connection = await self._live.connection()
        spec = self._spec(tuple(argv), env, working_dir, timeout, user, stdin=stdin)
        return await connection.start(replace(spec, tty=tty))

    async def start_process(
        self,
        command: str,
        args: Iterable[str] | None = None,
        env: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        stdin_mode: str = "closed",
        stdout_mode: str = "capture",
        stderr_mode: str = "capture",
        user: str | None = None,
        name: str | None = None,
    ) -> ProcessInfo:
        """Start a program that outlives this call and this connection; its last output is kept in the sandbox.

        Args:
            stdin_mode: "pipe" lets `write_stdin` reach it.
            stdout_mode, stderr_mode: "capture" or "discard".
            name: another word for its pid in the calls below, on this handle.

        Raises:
            ConfigError: an unknown mode. SandboxError: it could not be started.
        """
        if stdin_mode not in ("closed", "pipe") or {stdout_mode, stderr_mode} - {"capture", "discard"}:
            raise ConfigError("stdin_mode is closed or pipe, stdout_mode and stderr_mode are capture or discard")
        connection = await self._live.connection()
        spec = self._spec(
            (command, *(args or ())),
            env,
            working_dir,
            None,
            user,
            stdin=stdin_mode == "pipe",
            keep=True,
            discard_stdout=stdout_mode == "discard",
            discard_stderr=stderr_mode == "discard",
        )
        process = await connection.start(spec)
        if process.ended:
            result = await process.wait()
            if result.reason is Reason.NOT_STARTED:
                raise SandboxError(f"could not start {result.stderr.strip() or command}", exit_code=result.exit_code)
        pid = process.pid
        process.detach()
        if name is not None:
            self._live.names[name] = pid
        return await self.get_process(pid)

    async def list_processes(self) -> list[ProcessInfo]:
        """Return every command that runs, and those of `start_process` that ended (the last 256)."""
        connection = await self._live.connection()
        names = {pid: name for name, pid in self._live.names.items()}
        return [_process_info(row, names.get(row.pid)) for row in await connection.processes()]

    async def get_process(self, p: int | str) -> ProcessInfo:
        """Return one process by its pid inside or its name.

        Raises:
            SandboxError: there is none.
        """
        pid = self._pid(p)
        for info in await self.list_processes():
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

    async def write_file(self, path: str, content: bytes | str, *, mode: int | None = None) -> None:
        """Write a regular file, with its parents where they are missing."""
        data = content.encode() if isinstance(content, str) else content
        await files.write_file(await self._live.connection(), path, data, mode=mode, **self._where())

    async def read_file(self, path: str, *, max_bytes: int = files.MAX_READ_BYTES) -> bytes:
        """Return a regular file's content.

        Raises:
            PathError: no such file, not a regular one, or larger than `max_bytes`.
        """
        return await files.read_file(await self._live.connection(), path, max_bytes=max_bytes, **self._where())

    async def upload_file(self, local_path: str | Path, path: str) -> None:
        """Copy a file of the host into the sandbox, with its mode."""
        await upload.upload_file(await self._live.connection(), Path(local_path), path, **self._where())

    async def download_file(self, path: str, local_path: str | Path) -> None:
        """Copy a file of the sandbox, of any size, to the host."""
        await download.download_file(await self._live.connection(), path, Path(local_path), **self._where())

    async def upload_directory(self, local_path: str | Path, path: str) -> None:
        """Copy a directory of the host into the sandbox; links stay links, modes are kept."""
        await upload.upload_tree(
            await self._live.connection(), local_path, self._full(path), user=self._live.facts.user
        )

    async def download_directory(self, path: str, local_path: str | Path) -> None:
        """Copy a directory of the sandbox to the host; nothing is written outside the target."""
        await download.download_tree(
            await self._live.connection(), self._full(path), local_path, user=self._live.facts.user
        )

    async def list_directory(self, path: str) -> ListDirectoryResponse:
        """Return a directory's entries, by name."""
        records = await files.list_directory(await self._live.connection(), path, **self._where())
        entries = tuple(
            DirectoryEntry(
                name=record.name,
                is_dir=record.kind == "d",
                size=None if record.kind == "d" else record.size_bytes,
                modified_at=record.mtime_ns / 1e9,
                kind=record.kind,
                mode=record.mode & 0o7777,
                link_target=record.target or None,
            )
            for record in records
        )
        return ListDirectoryResponse(path, entries)

    async def make_directory(self, path: str) -> None:
        """Make a directory and its parents; one that exists is fine."""
        await files.make_directory(await self._live.connection(), path, **self._where())

    async def delete_file(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link, an empty directory or, with `recursive`, a whole one."""
        await files.delete(await self._live.connection(), path, recursive=recursive, **self._where())

    def _full(self, path: str) -> str:
        return posixpath.join(self._live.facts.working_dir, path)

    def _where(self) -> _Where:
        return {"user": self._live.facts.user, "working_dir": self._live.facts.working_dir}

    def _spec(
        self,
        argv: tuple[str, ...],
        env: Mapping[str, str] | None,
        working_dir: str | None,
        timeout: float | None,
        user: str | None,
        *,
        stdin: bool | bytes = False,
        merge: bool = False,
        keep: bool = False,
        discard_stdout: bool = False,
        discard_stderr: bool = False,
        rlimits: Rlimits = (),
    ) -> CommandSpec:
        facts = self._live.facts
        return CommandSpec(
            argv,
            env={**command_env(facts), **(env or {})},
            working_dir=working_dir or facts.working_dir,
            user=facts.user if user is None else user,
            stdin=stdin,
            merge=merge,
            keep=keep,
            timeout_s=timeout,
            rlimits=(*self._live.rlimits(), *rlimits),
            discard_stdout=discard_stdout,
            discard_stderr=discard_stderr,
        )

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
        text = "".join(b"".join(parts[stream]).decode("utf-8", "replace") for stream in streams)
        return OutputResponse(self._pid(p), tuple(text.splitlines()))

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


def _process_info(row: ListedProcess, name: str | None) -> ProcessInfo:
    return ProcessInfo(
        pid=row.pid,
        status=row.status,
        command=row.argv[0] if row.argv else "",
        args=tuple(row.argv[1:]),
        exit_code=row.exit_code,
        signal=row.signal,
        stdin_writable=row.stdin_open,
        started_at=row.started_s,
        ended_at=row.ended_s,
        name=name,
    )
