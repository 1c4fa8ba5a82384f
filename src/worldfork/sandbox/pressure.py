"""The kernel's own counts of what met a limit: of one sandbox's groups, and of the whole host."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from worldfork.records.death import LimitHits

_VMSTAT = Path("/proc/vmstat")
_COUNTS_BYTES = 16_384
"""More than any of these files has."""


def limit_hits(groups: Iterable[str]) -> LimitHits:
    """Return what a sandbox's groups counted since they were made; a group that is gone counts nothing.

    A group counts a process that was killed for memory whoever was short of it. Version 2 also counts how often the
    group itself had no more; of version 1 it is only known whether it ever reached its limit.
    """
    memory = host_memory = pids = 0
    for group in groups:
        events = _counts(f"{group}/memory.events")
        kills, own = events.get("oom_kill", 0), events.get("oom", 0)
        if not events:
            kills = _counts(f"{group}/memory.oom_control").get("oom_kill", 0)
            own = kills if kills and _number(f"{group}/memory.failcnt") else 0
        memory += min(kills, own)
        host_memory += max(0, kills - own)
        pids += _counts(f"{group}/pids.events").get("max", 0)
    return LimitHits(memory, host_memory, pids)


class HostKills:
    """How many processes the kernel killed for memory of late, in every group of the host."""

    def __init__(self) -> None:
        self._before = self._last = 0

    def restart(self) -> None:
        """Forget what was before this moment."""
        self._before = self._last = self._total()

    def look(self) -> None:
        """Move on: what was before the look before this one is old."""
        self._before, self._last = self._last, self._total()

    def lately(self) -> int:
        """Return how many there were since the look before the last."""
        return max(0, self._total() - self._before)

    def _total(self) -> int:
        return _counts(str(_VMSTAT), 1 << 16).get("oom_kill", 0)


def _counts(path: str, size_bytes: int = _COUNTS_BYTES) -> dict[str, int]:
    found = {}
    for line in _text(path, size_bytes).splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            found[name] = int(value)
    return found


def _number(path: str) -> int:
    text = _text(path, 64).strip()
    return int(text) if text.isdigit() else 0


def _text(path: str, size_bytes: int) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        data = b""
        while len(data) < size_bytes and (piece := os.read(fd, size_bytes - len(data))):
            data += piece
        return data.decode(errors="replace")
    except OSError:  # the group is just being removed
        return ""
    finally:
        os.close(fd)
