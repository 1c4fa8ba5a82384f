"""`Sandbox`: the synchronous face of `AsyncSandbox`. Every method does what its coroutine does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.commands import SH_OUTPUT_BYTES
from worldfork.lineage.door import through, through_each
from worldfork.lineage.handle import Rlimits
from worldfork.lineage.snapshots import ForkResult, ForkResults, SnapshotInfo
from worldfork.records.cpu import CpuUse
from worldfork.records.death import Death, LimitHits
from worldfork.records.sandbox import (
    DirectoryEntry,
    ListDirectoryResponse,
    OutputEvent,
    OutputResponse,
    ProcessInfo,
    SandboxInfo,
    SandboxStatus,
)
from worldfork.records.shown import Shown
from worldfork.records.snapshot import CheckpointType, SnapshotLevel, SnapshotWaitCondition
from worldfork.sandbox.command import CommandResult
from worldfork.sandbox.connection import MAX_OUTPUT_BYTES
from worldfork.sandbox.files import MAX_READ_BYTES

if TYPE_CHECKING:
    from worldfork.lineage.explaining import CheckpointCosts


class Sandbox:
    """A live, isolated place that runs commands; safe to use from many threads. See `AsyncSandbox`."""

    def __init__(self, inner: AsyncSandbox) -> None:
        self._inner = inner

    @classmethod
    def create(
        cls,
        image: str | None = None,
        cpus: float | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        **arguments: Any,
    ) -> Self:
        """Start a sandbox; see `AsyncSandbox.create` for the arguments."""
        return cls(through(AsyncSandbox.create, image, cpus, memory_mb, disk_mb, **arguments))

    @classmethod
    def connect(cls, sandbox_id: str, **arguments: Any) -> Self:
        """Attach to a live sandbox by id or name."""
        return cls(through(AsyncSandbox.connect, sandbox_id, **arguments))

    @classmethod
    def get_or_create(cls, name: str, **arguments: Any) -> Self:
        """Attach to the live sandbox of this name, or create it."""
        return cls(through(AsyncSandbox.get_or_create, name, **arguments))

    @classmethod
    def list(cls, **arguments: Any) -> Sequence[SandboxInfo]:
        """Return the live sandboxes of this home, oldest first; then those that are suspended."""
        return through(AsyncSandbox.list, **arguments)

    @classmethod
    def get_snapshot(cls, snapshot_id: str, **arguments: Any) -> SnapshotInfo:
        """Return a snapshot."""
        return through(AsyncSandbox.get_snapshot, snapshot_id, **arguments)

    @classmethod
    def delete_snapshot(cls, snapshot_id: str, **arguments: Any) -> None:
        """Delete a snapshot that no live sandbox started from."""
        through(AsyncSandbox.delete_snapshot, snapshot_id, **arguments)

    @classmethod
    def list_all_snapshots(cls) -> Sequence[SnapshotInfo]:
        """Return every snapshot of this home, oldest first."""
        return through(AsyncSandbox.list_all_snapshots)

    @classmethod
    def fork_snapshot(cls, snapshot_id: str, n: int = 1, **options: Any) -> ForkResults[Self]:
        """Start `n` sandboxes from a snapshot: for each child a sandbox or its error."""
        return cls._wrap(through(AsyncSandbox.fork_snapshot, snapshot_id, n, **options))

    def fork(self, n: int = 1, **options: Any) -> ForkResults[Self]:
        """Checkpoint this live sandbox and start `n` from the snapshot; it goes on untouched."""
        return self._wrap(through(self._inner.fork, n, **options))

    def explain(self) -> CheckpointCosts:
        """Return what a checkpoint of either kind would take now."""
        return through(self._inner.explain)

    def suspend(self, wait: bool = True, timeout: float = 300, poll_interval: float = 1.0, **options: Any) -> str:
        """Save this machine with its memory and end it; return the id of the snapshot in which it rests."""
        return through(self._inner.suspend, wait, timeout, poll_interval, **options)

    @classmethod
    def resume(cls, sandbox_id: str, **options: Any) -> Self:
        """Let a suspended sandbox go on as it was, called by its id or name."""
        return cls(through(AsyncSandbox.resume, sandbox_id, **options))

    def checkpoint(
        self,
        wait: bool = True,
        timeout: float = 300,
        poll_interval: float = 1.0,
        checkpoint_type: CheckpointType | str | None = None,
        wait_until: SnapshotWaitCondition | str = SnapshotWaitCondition.LOCAL_READY,
        *,
        stop: bool = False,
        label: str | None = None,
        level: SnapshotLevel | str = SnapshotLevel.LOCAL,
        verify: Sequence[str] | str | None = None,
        outside: str = "refuse",
    ) -> SnapshotInfo:
        """Freeze the disk into a snapshot, or the disk with memory; the sandbox goes on, unless `stop`."""
        more: dict[str, Any] = {"stop": stop, "label": label, "level": level, "verify": verify, "outside": outside}
        return through(self._inner.checkpoint, wait, timeout, poll_interval, checkpoint_type, wait_until, **more)

    def run(
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
        """Run a program to its end; never raises for exit codes or time unless `check`."""
        return through(
            self._inner.run,
            command,
            args,
            env,
            working_dir,
            timeout,
            user,
            stdin=stdin,
            check=check,
            max_output_bytes=max_output_bytes,
            rlimits=rlimits,
        )

    def sh(
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
        """Run one line in the world's shell; merged output, head and tail kept."""
        return through(
            self._inner.sh,
            line,
            timeout,
            env=env,
            working_dir=working_dir,
            user=user,
            check=check,
            max_output_bytes=max_output_bytes,
        )

    def start_process(
        self,
        command: str,
        args: Iterable[str] | None = None,
        env: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        **options: Any,
    ) -> ProcessInfo:
        """Start a program that outlives this call; see `AsyncSandbox.start_process`."""
        return through(self._inner.start_process, command, args, env, working_dir, **options)

    def list_processes(self) -> Sequence[ProcessInfo]:
        """Return every command that runs, and started processes that ended."""
        return through(self._inner.list_processes)

    def get_process(self, p: int | str) -> ProcessInfo:
        """Return one process by pid or name."""
        return through(self._inner.get_process, p)

    def kill_process(self, p: int | str) -> None:
        """Kill a process and all that it started."""
        through(self._inner.kill_process, p)

    def send_signal(self, p: int | str, signal: int) -> None:
        """Send a signal to one process."""
        through(self._inner.send_signal, p, signal)

    def write_stdin(self, p: int | str, data: bytes) -> None:
        """Write to a process's input."""
        through(self._inner.write_stdin, p, data)

    def close_stdin(self, p: int | str) -> None:
        """End a process's input."""
        through(self._inner.close_stdin, p)

    def get_stdout(self, p: int | str) -> OutputResponse:
        """Return what a process printed so far."""
        return through(self._inner.get_stdout, p)

    def get_stderr(self, p: int | str) -> OutputResponse:
        """The same for stderr."""
        return through(self._inner.get_stderr, p)

    def get_output(self, p: int | str) -> OutputResponse:
        """The same for both."""
        return through(self._inner.get_output, p)

    def follow_output(self, p: int | str) -> Iterator[OutputEvent]:
        """Yield a process's lines as they come, until it ends."""
        return through_each(self._inner.follow_output(p))

    def follow_stdout(self, p: int | str) -> Iterator[OutputEvent]:
        """The same for stdout alone."""
        return through_each(self._inner.follow_stdout(p))

    def follow_stderr(self, p: int | str) -> Iterator[OutputEvent]:
        """The same for stderr alone."""
        return through_each(self._inner.follow_stderr(p))

    def write_file(self, path: str, content: bytes | str, *, mode: int | None = None) -> None:
        """Write a regular file, with its parents."""
        through(self._inner.write_file, path, content, mode=mode)

    def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return a regular file's content."""
        return through(self._inner.read_file, path, max_bytes=max_bytes)

    def lay_files(self, directory: str, files: Mapping[str, tuple[bytes, int]], *, removed: Iterable[str] = ()) -> None:
        """Remove paths below a directory and write regular files there, at once; see `AsyncSandbox.lay_files`."""
        through(self._inner.lay_files, directory, files, removed=removed)

    def upload_file(self, local_path: str | Path, path: str) -> None:
        """Copy a file of the host into the sandbox."""
        through(self._inner.upload_file, local_path, path)

    def download_file(self, path: str, local_path: str | Path) -> None:
        """Copy a file of the sandbox to the host."""
        through(self._inner.download_file, path, local_path)

    def upload_directory(self, local_path: str | Path, path: str) -> None:
        """Copy a directory of the host into the sandbox."""
        through(self._inner.upload_directory, local_path, path)

    def download_directory(self, path: str, local_path: str | Path) -> None:
        """Copy a directory of the sandbox to the host."""
        through(self._inner.download_directory, path, local_path)

    def list_directory(self, path: str) -> ListDirectoryResponse:
        """Return a directory's entries."""
        return through(self._inner.list_directory, path)

    def stat_file(self, path: str, *, follow_links: bool = True) -> DirectoryEntry:
        """Return what is at a path."""
        return through(self._inner.stat_file, path, follow_links=follow_links)

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents."""
        through(self._inner.make_directory, path)

    def delete_file(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link, or a directory."""
        through(self._inner.delete_file, path, recursive=recursive)

    def adopt(self, snapshot_id: str, *, label: str | None = None) -> SnapshotInfo:
        """Make the disk what a snapshot holds, and return a snapshot of what it was before; see `AsyncSandbox.adopt`.

        Raises:
            NotCapturable: processes run in it. ConfigError: it stands on another base. NotFound: there is none.
        """
        return through(self._inner.adopt, snapshot_id, label=label)

    def list_snapshots(self) -> Sequence[SnapshotInfo]:
        """Return the snapshots taken of this sandbox."""
        return through(self._inner.list_snapshots)

    def info(self) -> SandboxInfo:
        """Return what this sandbox is and does now."""
        return through(self._inner.info)

    @property
    def status(self) -> SandboxStatus:
        """RUNNING or TERMINATED, asked anew each time."""
        return through(self._inner.status)

    def cause_of_death(self) -> Death | None:
        """Return how this sandbox ended; None while it lives."""
        return through(self._inner.cause_of_death)

    def limit_hits(self) -> LimitHits:
        """Return how often its processes met its limits."""
        return through(self._inner.limit_hits)

    def cpu_use(self) -> CpuUse | None:
        """Return the CPU seconds of all that ever ran in it, and its threads; see `AsyncSandbox.cpu_use`."""
        return through(self._inner.cpu_use)

    def terminate(self) -> None:
        """End the sandbox and clear it away. Idempotent."""
        through(self._inner.terminate)

    def close(self) -> None:
        """Let go of a sandbox that this handle only attached to."""
        self._inner.close()

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return self._inner.sandbox_id

    @property
    def name(self) -> str:
        """Its name."""
        return self._inner.name

    @property
    def fork_index(self) -> int:
        """Which child of its fork it is, from 0."""
        return self._inner.fork_index

    @property
    def seed(self) -> int:
        """WORLDFORK_SEED inside."""
        return self._inner.seed

    @property
    def mounts(self) -> Sequence[Shown]:
        """What it shows read-only besides its disk."""
        return self._inner.mounts

    @property
    def bind_outcome(self) -> str:
        """How `get_or_create` came by it: created, attached or resumed."""
        return self._inner.bind_outcome

    @classmethod
    def _wrap(cls, children: ForkResults[AsyncSandbox]) -> ForkResults[Self]:
        return ForkResults([
            ForkResult(child.index, cls(child.sandbox) if child.sandbox is not None else None, child.error)
            for child in children
        ])  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._inner.bind_outcome in ("created", "resumed"):
            self.terminate()
        else:
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).connect, (self.sandbox_id,)

    def __repr__(self) -> str:
        return f"Sandbox({self.sandbox_id!r})"
