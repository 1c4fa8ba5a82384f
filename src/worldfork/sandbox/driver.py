"""What a driver is: it starts a root from layers, gives a connection to its init, and can change its root."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from worldfork.records.sandbox import SandboxFacts
from worldfork.sandbox.connection import Connection


@dataclass(frozen=True)
class Capabilities:
    """What sandboxes of a driver can do on this host."""

    form: str
    """"trusted" (real root) or "user" (a user namespace)."""
    rename_base_dirs: bool
    """Whether a directory of a lower layer can be renamed; else it is EXDEV and tools copy."""
    limits: bool
    """Whether memory, CPU and processes are limited by cgroups; else by rlimits alone."""
    other_users: bool
    """Whether commands can run as, and files belong to, others than root; not where one id is mapped alone."""
    memory_checkpoint: bool = False
    """Whether a checkpoint can hold processes and memory besides the disk."""
    disk_on_host: bool = True
    """Whether what a sandbox writes lies in a directory of the host, which a checkpoint can take as it is."""
    host_base: bool = True
    """Whether a sandbox can start from the host's own userland."""
    host_network: bool = True
    """Whether `network="host"` is the host's own interfaces; else a translated network of the sandbox's own."""
    live_mounts: bool = True
    """Whether a shown directory of the host follows its later changes; else it stays as it was at the start."""
    adopts: bool = True
    """Whether the disk of a live sandbox can be exchanged for a snapshot's."""
    host_processes: bool = True
    """Whether what runs in a sandbox are processes of the host, seen and counted there."""


@dataclass(frozen=True)
class Ground:
    """The directories of one overlay, as paths on the host."""

    layers: tuple[str, ...]
    """Top first; the base's own directory last."""
    upper: str
    work: str


@dataclass(frozen=True)
class ShownTree:
    """One directory that a sandbox shows read-only."""

    target: str
    """Absolute path inside."""
    path: str
    """The directory: of this machine, or within the layers."""
    layers: tuple[str, ...] = ()
    """Directories on the host, top first; at least two where there are any."""


@dataclass(frozen=True)
class StartPlan:
    """Everything that a driver needs to start one sandbox."""

    facts: SandboxFacts
    ground: Ground
    lock: str
    """Path of the file that PID 1 locks as long as it lives."""
    hostname: str
    identity: tuple[tuple[str, str], ...] = ()
    """(path inside, content): mounted from the sandbox's own tmpfs."""
    binds: tuple[tuple[str, str], ...] = ()
    """(host path, path inside), read-only, besides those of the base."""
    shown: tuple[ShownTree, ...] = ()
    shm_bytes: int = 64 << 20
    layer_ids: tuple[str, ...] = ()
    """Ids of the layers in `ground`, top first; a base's directory and what stands for mount points have none."""
    memory: Path | None = None
    """A memory directory to be restored: the sandbox goes on where that was saved, and nothing is launched in it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What every command of the sandbox starts with; only where `memory` is restored, for the hook after that."""


@dataclass
class Started:
    """A sandbox that answers."""

    pid: int
    """Of its PID 1, as this process sees it; a child of this process."""
    connection: Connection
    leash: int
    """Descriptor whose last copy's closing ends the sandbox, unless it is detached."""


@dataclass(frozen=True)
class Begun:
    """A start under way whose plan is still to come."""

    pid: int
    """Of the launcher, a child of this process."""
    sock: socket.socket


class Driver(Protocol):
    """One way to isolate."""

    name: str
    form: str
    """Of its overlays, as in `Capabilities`."""
    ids: str
    """The map of ids of its sandboxes, as text; empty where root is the only one in them, or ids are the machine's."""
    overlay: str
    """"new" or "legacy": how overlays are made; "legacy" needs the directory `scratch` in `run`."""

    def capabilities(self) -> Capabilities:
        """Return what this driver can do here, without starting anything."""
        ...

    def cgroups_of(self, sandbox_id: str) -> tuple[str, ...]:
        """Return the cgroup directories that `start` will make, so that they are known before they exist."""
        ...

    def begin(self, network: str) -> Begun:
        """Begin a start before its plan is known, so that the two overlap. Then call `start` or `abandon`.

        Raises:
            LaunchFailed: the host is at a limit.
        """
        ...

    def stock(self) -> None:
        """Begin one start beforehand, so that the next fork finds part of its work done."""
        ...

    def drop_spare(self, unused_s: float = 0.0) -> bool:
        """Take such a start back if it has not been used for `unused_s`; return whether one remains. Blocking."""
        ...

    async def abandon(self, begun: Begun) -> None:
        """Take back a start that was begun; nothing of it is left."""
        ...

    async def start(self, plan: StartPlan, begun: Begun | None = None) -> Started:
        """Start a sandbox; on failure or cancellation nothing of it is left running, what was begun included.

        Raises:
            DriverUnavailable, LaunchFailed, OutOfSpace: with the remedy.
        """
        ...

    async def reroot(
        self, facts: SandboxFacts, ground: Ground, namespaces: list[int], kept: tuple[int, ...]
    ) -> asyncio.Future[None]:
        """Move a held sandbox, in which only init runs, onto `ground`.

        Returns once the sandbox lives on it, with a future that is done when the old root's caches are dropped.

        Args:
            kept: descriptors that whoever changes the root keeps open until it is done: a lock, and the connection
                that holds the sandbox, must outlive a caller who is killed meanwhile.
        Raises:
            NotCapturable: something still uses the old root; the sandbox is as before.
            SandboxDied: it broke half-way and must be ended.
        """
        ...

    async def upper_of(self, facts: SandboxFacts, namespaces: list[int]) -> str:
        """Return the name of the directory that the sandbox writes to now, such as `upper.0`."""
        ...
