"""How a sandbox ended, and how often it met its limits before."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class DeathCause(str, Enum):
    """Why a sandbox is no more. A memory or process limit ends single processes, never a sandbox: see `LimitHits`."""

    ENDED = "ended"
    """It was asked to: by a handle on it, or because its owner ended."""
    TIME = "time"
    """Its own `timeout_secs` ran out."""
    DISK = "disk"
    """It took more than its disk limit."""
    CRASHED = "crashed"
    """Its init broke. A signal from outside cannot do that, so what ran in it did."""
    HOST_DISK = "host_disk"
    """The host's disk fell below its reserve, and this sandbox had written the most."""
    HOST_MEMORY = "host_memory"
    """Its init was killed while the host, or what the host lets this program have, ran out of memory."""
    OUTSIDE = "outside"
    """Its init was killed from outside; nothing inside a sandbox can do that."""
    UNKNOWN = "unknown"
    """This process did not start it and cannot tell."""


_OWN = frozenset({DeathCause.TIME, DeathCause.DISK, DeathCause.CRASHED})


@dataclass(frozen=True)
class LimitHits:
    """How often a sandbox met its limits. All 0 where the host has no cgroups for it."""

    memory: int = 0
    """Processes killed for its own memory limit."""
    host_memory: int = 0
    """Processes killed for memory although it had never reached its own limit."""
    pids: int = 0
    """New processes and threads refused at its limit."""


@dataclass(frozen=True)
class Death:
    """How a sandbox ended."""

    cause: DeathCause
    detail: str
    """The evidence, one sentence."""
    hits: LimitHits = field(default_factory=LimitHits)
    """As last seen."""

    @property
    def own(self) -> bool:
        """Whether what ran in the sandbox caused it: then it is no fault of ours."""
        return self.cause in _OWN
