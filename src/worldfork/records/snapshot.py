"""What a snapshot is: layers over a base, and the facts that a restore needs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class CheckpointType(str, Enum):
    """What a checkpoint holds."""

    MEMORY = "memory"
    FILESYSTEM = "filesystem"


class SnapshotStatus(str, Enum):
    """The life of a snapshot, in the words of the SDK that this API mirrors."""

    IN_PROGRESS = "in_progress"
    LOCAL_READY = "local_ready"
    COMPLETED = "completed"
    FAILED = "failed"
    DELETING = "deleting"
    REPLICATING = "replicating"
    UNKNOWN = "unknown"


class SnapshotWaitCondition(str, Enum):
    """What `checkpoint` waits for: forkable, or safe from a crash of the machine too."""

    LOCAL_READY = "local_ready"
    COMPLETED = "completed"


@dataclass(frozen=True)
class LayerRecord:
    """One read-only difference on disk."""

    layer_id: str
    form: str
    """"trusted" or "user": the bookkeeping of deletions in it."""
    state: str
    """"building", "ready" or "durable"."""
    size_bytes: int | None
    digest: str | None
    """Of its content; None until the layer is sealed."""
    created_s: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class SnapshotRecord:
    """One snapshot, as the store keeps it."""

    snapshot_id: str
    parent_id: str | None
    """The snapshot that its sandbox started from."""
    sandbox_id: str | None
    """The sandbox that was frozen."""
    created_s: float
    """Seconds since the epoch."""
    kind: str
    """"filesystem"."""
    state: str
    """"ready" (forkable) or "durable" (survives a crash of the machine)."""
    form: str
    base: dict[str, Any]
    layers: tuple[str, ...]
    """Ids, top first; the base lies below the last."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a restore needs besides the disk: env, user, working_dir, limits."""
    size_bytes: int | None = None
    label: str | None = None

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> SnapshotRecord:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        data["layers"] = tuple(data["layers"])
        return cls(**data)
