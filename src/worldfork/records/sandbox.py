"""What a live sandbox is made of, and what is told of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

from worldfork.records.shown import Shown


class SandboxStatus(str, Enum):
    """The life of a sandbox, in the words of the SDK that this API mirrors."""

    PENDING = "pending"
    RUNNING = "running"
    SNAPSHOTTING = "snapshotting"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    TERMINATED = "terminated"
    TIMEOUT = "timeout"
    FAILED = "failed"


class ProcessStatus(str, Enum):
    """How a started process is doing."""

    RUNNING = "running"
    EXITED = "exited"
    SIGNALED = "signaled"
    OOM_KILLED = "oom_killed"


class StdinMode(str, Enum):
    """Whether a started process has an input that can be written."""

    CLOSED = "closed"
    PIPE = "pipe"


class OutputMode(str, Enum):
    """Whether a started process's output is kept."""

    CAPTURE = "capture"
    DISCARD = "discard"


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use; None is no limit."""

    cpus: float | None = 1.0
    """Cores' worth of CPU time."""
    memory_mb: int | None = 1024
    """MiB of memory and page cache charged to its commands."""
    disk_mb: int | None = None
    """MiB that its own difference may take on the host's disk."""
    pids: int | None = 1024
    """Processes and threads."""


@dataclass(frozen=True)
class Base:
    """The read-only ground below every layer."""

    kind: str
    """"host" (the machine's own userland), "dir" (any root file system) or "layers" (the lowest layer is the base)."""
    path: str = ""
    """The lowest directory of the stack; of "dir" alone."""
    binds: tuple[tuple[str, str], ...] = ()
    """(host path, path inside), mounted read-only."""
    fingerprint: str = ""
    """What the host's userland was, as text; compared at restore."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Base:
        """Read what `to_json` wrote."""
        return cls(
            kind=data["kind"],
            path=data.get("path", ""),
            binds=tuple((source, target) for source, target in data.get("binds", ())),
            fingerprint=data.get("fingerprint", ""),
        )


@dataclass(frozen=True)
class SandboxFacts:
    """All that another process needs to reach, checkpoint or clear away a sandbox."""

    sandbox_id: str
    name: str
    run: str
    """Its directory under the store's run/: socket, uppers, mount point."""
    form: str
    """"trusted" or "user"; what its layers' bookkeeping looks like."""
    driver: str
    base: Base
    snapshot_id: str | None
    """The snapshot that it started from."""
    layers: tuple[str, ...]
    """Ids, top first."""
    checkpoint_id: str | None = None
    """Its own last checkpoint, which may be deleted by now: the parent of the next."""
    generation: int = 0
    """Number of its present upper, `upper.N` and `work.N` in `run`."""
    moving: str = ""
    """The layer that its upper is just becoming; if whoever does that dies, the next one who comes sees to it."""
    next_layers: tuple[str, ...] = ()
    """What will lie below that layer: fewer layers of the same content; empty where it is `layers`."""
    ids: str = ""
    """The map of its ids, as `core.idmap` writes it; empty where root is the only one, or ids are the machine's."""
    cgroups: tuple[str, ...] = ()
    """Its cgroup directories."""
    network: str = "none"
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    working_dir: str = "/workspace"
    limits: Limits = field(default_factory=Limits)
    detached: bool = False
    created_s: float = 0.0
    timeout_s: float | None = None
    fork_index: int = 0
    seed: int = 0
    owner_id: str = ""
    network_env: dict[str, str] = field(default_factory=dict)
    """Variables that came with the host's network; never stored in a snapshot."""
    mounts: tuple[Shown, ...] = ()
    """What it shows read-only besides its disk; no snapshot of it has that."""
    woken: bool = False
    """Whether it went on where its snapshot's memory stopped; else it started from the disk alone."""
    resumed: bool = False
    """Whether it had been suspended: its snapshot is its own and goes once somebody ends it."""

    def to_json(self) -> str:
        """Return one line of JSON."""
        # `asdict` would copy all of it first, which a fork has to wait for.
        return json.dumps(vars(self), default=vars, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> SandboxFacts:
        """Read what `to_json` wrote; fields that this version does not know are left out, so that it can clear away."""
        known = {each.name for each in fields(cls)}
        data = {name: value for name, value in json.loads(text).items() if name in known}
        data["base"] = Base.from_json(data["base"])
        data["limits"] = Limits(**data["limits"])
        data["layers"] = tuple(data["layers"])
        data["next_layers"] = tuple(data.get("next_layers", ()))
        data["cgroups"] = tuple(data["cgroups"])
        data["mounts"] = tuple(map(Shown.from_json, data.get("mounts", ())))
        return cls(**data)


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as `list` and `info` show it."""

    sandbox_id: str
    name: str
    status: SandboxStatus
    driver: str
    base: str
    network: str
    limits: Limits
    snapshot_id: str | None
    created_at: float
    """Seconds since the epoch."""
    detached: bool
    fork_index: int
    seed: int
    layers: int
    """Depth of its stack, the base not counted."""
    timeout_secs: float | None = None
    isolation: str = "namespaces"
    """What stands between it and the host: "namespaces"; of a machine "kvm", or "none (tcg)", which is no boundary, and
    "unknown" while it rests."""
    commands: int | None = None
    """Commands running now; None where nobody asked the sandbox."""
    processes: int | None = None

    @property
    def id(self) -> str:
        """The same as `sandbox_id`."""
        return self.sandbox_id

    @property
    def resources(self) -> Limits:
        """The same as `limits`."""
        return self.limits

    @property
    def image(self) -> str:
        """The same as `base`."""
        return self.base

    @property
    def namespace(self) -> str:
        """One home is one namespace."""
        return "default"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `--json`."""
        data = asdict(self)
        data["status"] = self.status.value
        return data


@dataclass(frozen=True)
class ProcessInfo:
    """A process that `start_process` started, or a command that runs."""

    pid: int
    """Inside the sandbox."""
    status: ProcessStatus
    command: str
    args: tuple[str, ...]
    exit_code: int | None
    signal: int | None
    stdin_writable: bool
    started_at: float
    """Seconds since the epoch, as is `ended_at`."""
    ended_at: float | None
    name: str | None = None


@dataclass(frozen=True)
class OutputResponse:
    """What a process has printed so far, as lines."""

    pid: int
    lines: tuple[str, ...]

    @property
    def line_count(self) -> int:
        """How many lines."""
        return len(self.lines)


@dataclass(frozen=True)
class OutputEvent:
    """One line, as it came."""

    line: str
    stream: str
    """"stdout" or "stderr"."""
    timestamp: float
    """When it was read; seconds since the epoch."""


@dataclass(frozen=True)
class DirectoryEntry:
    """One entry of a directory inside a sandbox."""

    name: str
    is_dir: bool
    size: int | None
    """Bytes; None for a directory."""
    modified_at: float
    """Seconds since the epoch."""
    kind: str = "f"
    """f file, d directory, l link, p FIFO, s socket, b or c device."""
    mode: int = 0
    link_target: str | None = None


@dataclass(frozen=True)
class ListDirectoryResponse:
    """A directory inside a sandbox."""

    path: str
    entries: tuple[DirectoryEntry, ...]
