"""What a caller holds of a snapshot, and the results of forking it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from worldfork.core.errors import ForkError, WorldforkError
from worldfork.records.snapshot import CheckpointType, SnapshotLevel, SnapshotRecord, SnapshotStatus

if TYPE_CHECKING:
    from worldfork.lineage.asynchronous import AsyncSandbox
    from worldfork.lineage.synchronous import Sandbox

S = TypeVar("S")


@dataclass(frozen=True)
class SnapshotInfo:
    """A snapshot. A plain value: it pickles, and holds nothing open."""

    snapshot_id: str
    sandbox_id: str | None
    """The sandbox that was frozen."""
    status: SnapshotStatus
    """LOCAL_READY: forkable. COMPLETED: it survives a crash of the machine too. REPLICATING: so it does, and is to be
    copied to the remote yet."""
    snapshot_type: CheckpointType
    created_at: float
    """Seconds since the epoch."""
    base_image: str
    """The base below its layers, such as `host`."""
    parent_id: str | None
    layers: int
    """Depth of its stack, the base not counted."""
    size_bytes: int | None = None
    """Of the layer that it added; None where that was not counted."""
    label: str | None = None
    level: SnapshotLevel = SnapshotLevel.LOCAL
    """What it is kept against."""
    digest: str | None = None
    """Of the whole state as it looks from inside; None until somebody asked for it."""
    exported: str | None = None
    """Where a copy of it is; None where there is none."""
    warnings: tuple[str, ...] = ()
    """What the snapshot does not hold although it was there: files in /dev/shm, for example."""
    pause_s: float | None = field(default=None, compare=False)
    """How long the sandbox stood still; None on a snapshot that was looked up."""
    total_s: float | None = field(default=None, compare=False)

    @property
    def id(self) -> str:
        """The same as `snapshot_id`."""
        return self.snapshot_id

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        return {
            "snapshot_id": self.snapshot_id,
            "sandbox_id": self.sandbox_id,
            "status": self.status.value,
            "snapshot_type": self.snapshot_type.value,
            "created_at": self.created_at,
            "base": self.base_image,
            "parent_id": self.parent_id,
            "layers": self.layers,
            "size_bytes": self.size_bytes,
            "label": self.label,
            "level": self.level.value,
            "digest": self.digest,
            "exported": self.exported,
            "warnings": list(self.warnings),
        }

    def fork(self, n: int = 1, **options: Any) -> ForkResults[Sandbox]:
        """Start `n` sandboxes from this snapshot; see `Sandbox.fork_snapshot` for the options."""
        from worldfork.lineage.synchronous import Sandbox

        return Sandbox.fork_snapshot(self.snapshot_id, n, **options)

    async def fork_async(self, n: int = 1, **options: Any) -> ForkResults[AsyncSandbox]:
        """The same for a program that runs an event loop."""
        from worldfork.lineage.asynchronous import AsyncSandbox

        return await AsyncSandbox.fork_snapshot(self.snapshot_id, n, **options)


def _status(record: SnapshotRecord) -> SnapshotStatus:
    if record.state != "durable":
        return SnapshotStatus.LOCAL_READY
    waits = record.level == SnapshotLevel.EXPORTED.value and record.exported is None
    return SnapshotStatus.REPLICATING if waits else SnapshotStatus.COMPLETED


def snapshot_info(record: SnapshotRecord, **more: Any) -> SnapshotInfo:
    """Return a stored record as a caller sees it."""
    base = record.base
    return SnapshotInfo(
        snapshot_id=record.snapshot_id,
        sandbox_id=record.sandbox_id,
        status=_status(record),
        snapshot_type=CheckpointType(record.kind),
        created_at=record.created_s,
        base_image=f"dir:{base['path']}" if base.get("kind") == "dir" else str(base.get("kind", "")),
        parent_id=record.parent_id,
        layers=len(record.layers),
        size_bytes=record.size_bytes,
        label=record.label,
        level=SnapshotLevel(record.level),
        digest=record.digest,
        exported=record.exported,
        **more,
    )


@dataclass(frozen=True)
class ForkResult(Generic[S]):
    """One child of a fork: a sandbox, or why there is none."""

    index: int
    sandbox: S | None
    error: Exception | None

    def unwrap(self) -> S:
        """Return the sandbox.

        Raises:
            WorldforkError: the child's own error.
        """
        if self.sandbox is None:
            raise self.error if self.error is not None else ForkError(f"fork {self.index} has no sandbox")
        return self.sandbox


class ForkResults(Sequence[ForkResult[S]]):
    """The children of one fork, by index."""

    def __init__(self, results: Sequence[ForkResult[S]]) -> None:
        self._results = tuple(results)

    def __getitem__(self, index: Any) -> Any:
        return self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[ForkResult[S]]:
        return iter(self._results)

    @property
    def sandboxes(self) -> list[S]:
        """Those that started."""
        return [result.sandbox for result in self._results if result.sandbox is not None]

    @property
    def errors(self) -> list[Exception]:
        """What the others met."""
        return [result.error for result in self._results if result.error is not None]

    def unwrap(self) -> list[S]:
        """Return all sandboxes.

        Raises:
            ForkError: a child failed; `sandboxes` has those that run, `errors` the reasons.
        """
        errors = self.errors
        if errors:
            first = errors[0]
            raise ForkError(
                f"{len(errors)} of {len(self)} forks failed, the first with: {first}",
                remedy=first.remedy if isinstance(first, WorldforkError) else "",
                sandboxes=self.sandboxes,
                errors=errors,
            ) from first
        return self.sandboxes


async def wait_durable(future: Any) -> None:
    """Wait for a synchronisation that runs in a thread."""
    if future is not None:
        # Whoever gives up waiting does not call off what others wait for too.
        await asyncio.shield(asyncio.wrap_future(future))
