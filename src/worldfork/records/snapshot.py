"""What a snapshot is: layers over a base, and the facts that a restore needs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, NoReturn

from worldfork.core.errors import ConfigError

_LONGEST_LABEL_BYTES = 64 << 10


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


class SnapshotLevel(str, Enum):
    """What a snapshot is kept against, chosen when it is taken."""

    VOLATILE = "volatile"
    """Throw-away: never synchronised, gone after a crash of the machine, first to go when the quota is met."""
    LOCAL = "local"
    """Survives a crash of the machine once it is durable."""
    EXPORTED = "exported"
    """Durable here, and then copied to the remote of the settings."""


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
    entries: int | None = None
    """How many paths it has; None until the layer is sealed, as the two sizes."""
    logical_bytes: int | None = None
    """What its files hold."""
    stored_bytes: int | None = None
    """What it takes on disk."""
    covers: tuple[str, ...] = ()
    """Of a merged layer: the ids that it stands for, top first."""
    level: int = 0
    """Of a merged layer: how many times its content has been merged."""


@dataclass(frozen=True)
class SnapshotRecord:
    """One snapshot, as the store keeps it."""

    snapshot_id: str
    parent_id: str | None
    """The last snapshot of its sandbox before it, or the one that the sandbox started from."""
    sandbox_id: str | None
    """The sandbox that was frozen."""
    created_s: float
    """Seconds since the epoch."""
    kind: str
    """A `CheckpointType`."""
    state: str
    """"ready" (forkable) or "durable" (survives a crash of the machine)."""
    form: str
    base: dict[str, Any]
    layers: tuple[str, ...]
    """Ids, top first; the base lies below the last."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What a restore needs besides the disk: env, user, working_dir, limits. Of one with memory: `memory`, its sizes
    and by what it was made; `connections`, those that left the sandbox, and what was decided about them; `suspended`,
    the sandbox that is to go on from it."""
    size_bytes: int | None = None
    label: str | None = None
    made_by: str = ""
    """What made it: "checkpoint", "base" or "import"."""
    level: str = "local"
    """A `SnapshotLevel`."""
    digest: str | None = None
    """Of the whole state as it looks from inside; None until somebody asked for it."""
    exported: str | None = None
    """Where a copy of it was pushed to last."""

    def to_json(self) -> str:
        """Return one line of JSON.

        Raises:
            ValueError: a number in it is not finite.
        """
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    def check(self) -> None:
        """Refuse what the metadata could not bear: one such record would keep all others from being listed.

        Variables, paths and users come from the system and may hold any bytes (as `os.fsdecode` has them), which JSON
        escapes. A label is read out by SQLite, and is text.

        Raises:
            ConfigError: a number is not finite, or a text is none.
        """
        check_label(self.label)
        try:
            # Nearly all records end here: what is no text is escaped as a surrogate.
            if "\\ud" in self.to_json():
                _check_texts(asdict(self))
        except ValueError as error:
            raise ConfigError(f"{self.snapshot_id} cannot be stored: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> SnapshotRecord:
        """Read what `to_json` wrote; what a later version has added is left out."""
        data = _READER.decode(text)
        known = {field.name for field in fields(cls)}
        record = {name: value for name, value in data.items() if name in known}
        record["layers"] = tuple(record["layers"])
        return cls(**record)


def expect_filesystem(record: SnapshotRecord, doing: str) -> None:
    """Refuse a snapshot that holds a machine's memory, whose disk is no tree of files on this host.

    Args:
        record: the snapshot.
        doing: what is to be done with it, as a participle.
    Raises:
        ConfigError: it does.
    """
    if record.kind == CheckpointType.MEMORY.value:
        raise ConfigError(
            f"{record.snapshot_id} holds the memory of a machine and cannot be {doing}",
            remedy="restore it, and take a filesystem checkpoint of that sandbox",
            snapshot_id=record.snapshot_id,
        )


def check_label(label: str | None) -> None:
    """Refuse a label that is no text, or a book.

    Raises:
        ConfigError: it holds bytes that are not UTF-8, or more of them than 64 KiB.
    """
    try:
        size_bytes = len((label or "").encode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{label!r} cannot be a label: it is not UTF-8", remedy="use text") from error
    if size_bytes > _LONGEST_LABEL_BYTES:
        raise ConfigError(f"a label of {size_bytes} bytes", remedy=f"use {_LONGEST_LABEL_BYTES} at most")


def _check_texts(value: object) -> None:
    if isinstance(value, str):
        os.fsencode(value)
    elif isinstance(value, dict):
        for name, below in value.items():
            _check_texts(name)
            _check_texts(below)
    elif isinstance(value, (list, tuple)):
        for below in value:
            _check_texts(below)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_READER = json.JSONDecoder(parse_constant=_refuse)


@dataclass(frozen=True)
class FileChange:
    """One path that is not the same in two snapshots."""

    path: str
    """From the root, with a leading slash."""
    change: str
    """"added", "removed" or "changed"."""
    what: tuple[str, ...]
    """Of a changed one: "kind", "content", "target", "device", "mode", "owner", "attributes", "time"."""
    old_kind: str | None
    """f file, d directory, l link, p FIFO, s socket, b or c device; None where there was nothing."""
    new_kind: str | None
    old_bytes: int | None
    """Of a file's content, as is `new_bytes`."""
    new_bytes: int | None
    patch: bytes | None = None
    """A unified diff, where one was asked for and both are text."""
