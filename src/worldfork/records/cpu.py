"""What the kernel counted of the CPU that a sandbox used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ThreadUse:
    """One thread that lives."""

    ran_s: float
    """Seconds on a CPU."""
    waited_s: float
    """Seconds ready to run without a CPU."""
    wants: bool
    """Whether it runs or is ready to, now."""
    stands_back: bool
    """Whether it leaves the CPU to others by its own wish: by priority, scheduling class or the CPUs it keeps to."""


@dataclass(frozen=True)
class CpuUse:
    """What everything in a sandbox has used so far, seen from outside."""

    used_s: float
    """CPU seconds of all that ever ran in it, on all CPUs together; what is gone counts too."""
    throttled_s: float
    """Seconds for which its own CPU limit held it back, on all CPUs together."""
    threads: Mapping[int, ThreadUse]
    """Those that live, by their ids on the host; the first of them where there are many."""
    whole: bool = True
    """Whether these are all threads: none is left out, and none ended while they were looked at."""
    init_s: float = 0.0
    """Of `used_s` what its PID 1 used, which is no thread of these."""
    cpus: int = 1
    """So many CPUs it may use at once, whoever else wants them."""
