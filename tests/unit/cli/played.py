"""A played library for the verbs: it records what it was asked and answers from a script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from worldfork.core.errors import NotFound
from worldfork.lineage.explaining import CheckpointCosts
from worldfork.lineage.snapshots import ForkResult, ForkResults, SnapshotInfo
from worldfork.records.sandbox import Limits, SandboxInfo, SandboxStatus
from worldfork.records.snapshot import CheckpointType, SnapshotStatus
from worldfork.sandbox.command import CommandResult, Reason


def sandbox_info(sandbox_id: str = "sb-a", **changes: Any) -> SandboxInfo:
    facts: dict[str, Any] = {
        "sandbox_id": sandbox_id,
        "name": "",
        "status": SandboxStatus.RUNNING,
        "driver": "namespace",
        "base": "host",
        "network": "none",
        "limits": Limits(),
        "snapshot_id": None,
        "created_at": 1_700_000_000.0,
        "detached": True,
        "fork_index": 0,
        "seed": 0,
        "layers": 1,
    }
    return SandboxInfo(**{**facts, **changes})


def snapshot_info(snapshot_id: str = "sn-a", **changes: Any) -> SnapshotInfo:
    facts: dict[str, Any] = {
        "snapshot_id": snapshot_id,
        "sandbox_id": "sb-a",
        "status": SnapshotStatus.LOCAL_READY,
        "snapshot_type": CheckpointType.FILESYSTEM,
        "created_at": 1_700_000_000.0,
        "base_image": "host",
        "parent_id": None,
        "layers": 2,
    }
    return SnapshotInfo(**{**facts, **changes})


def command_result(**changes: Any) -> CommandResult:
    facts: dict[str, Any] = {
        "exit_code": 0,
        "stdout_bytes": b"out\n",
        "stderr_bytes": b"",
        "reason": Reason.EXITED,
        "signal": None,
        "wall_s": 0.1,
        "cpu_s": 0.05,
        "max_rss_bytes": 1 << 20,
    }
    return CommandResult(**{**facts, **changes})


@dataclass
class PlayedSandbox:
    """Stands where `Sandbox` does. Ids that hold "missing" are not found."""

    sandbox_id: str
    calls: ClassVar[list[tuple[str, Any]]] = []
    result: ClassVar[CommandResult] = command_result()
    live: ClassVar[list[SandboxInfo]] = []
    stored: ClassVar[list[SnapshotInfo]] = []
    failing_forks: ClassVar[set[int]] = set()

    @classmethod
    def note(cls, name: str, facts: Any = None) -> None:
        cls.calls.append((name, facts))

    @classmethod
    def create(cls, **options: Any) -> PlayedSandbox:
        cls.note("create", options)
        return cls("sb-new")

    @classmethod
    def connect(cls, sandbox_id: str) -> PlayedSandbox:
        if "missing" in sandbox_id:
            raise NotFound(f"there is no sandbox {sandbox_id!r}", remedy="worldfork ls")
        return cls(next((each.sandbox_id for each in cls.live if each.name == sandbox_id), sandbox_id))

    @classmethod
    def list_all_snapshots(cls) -> list[SnapshotInfo]:
        return cls.stored

    @classmethod
    def delete_snapshot(cls, snapshot_id: str) -> None:
        cls.connect(snapshot_id)
        cls.note("delete_snapshot", snapshot_id)

    @classmethod
    def list(cls) -> list[SandboxInfo]:
        return cls.live

    def info(self) -> SandboxInfo:
        return sandbox_info(self.sandbox_id)

    def close(self) -> None:
        self.note("close", self.sandbox_id)

    def terminate(self) -> None:
        self.note("terminate", self.sandbox_id)

    def run(self, command: str, args: list[str], **options: Any) -> CommandResult:
        self.note("run", (command, args, options))
        return self.result

    def explain(self) -> CheckpointCosts:
        memory = None if "plain" in self.sandbox_id else 9 << 20
        pause_s = None if memory is None else 0.012
        return CheckpointCosts("microvm", 3 << 20, pause_s and 0.25, memory, memory and 64 << 20, pause_s)

    def suspend(self, **options: Any) -> str:
        self.note("suspend", options)
        return "sn-rest"

    @classmethod
    def resume(cls, sandbox_id: str, **options: Any) -> PlayedSandbox:
        found = cls.connect(sandbox_id)
        cls.note("resume", options)
        return found

    def checkpoint(self, **options: Any) -> SnapshotInfo:
        self.note("checkpoint", options)
        return snapshot_info("sn-new", warnings=("/dev/shm holds 1 file",))

    @classmethod
    def fork_snapshot(cls, snapshot_id: str, n: int, **options: Any) -> ForkResults[PlayedSandbox]:
        cls.note("fork", (snapshot_id, n, options))
        return ForkResults(
            [
                ForkResult(index, None, OSError("no more of it"))
                if index in cls.failing_forks
                else ForkResult(index, cls(f"sb-{index}"), None)
                for index in range(n)
            ]
        )

    def fork(self, n: int, **options: Any) -> ForkResults[PlayedSandbox]:
        return self.fork_snapshot(self.sandbox_id, n, **options)
