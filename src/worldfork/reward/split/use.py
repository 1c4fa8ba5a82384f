"""How the CPU was used in a sandbox: whether a process that is late had one."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from worldfork.core.errors import PathError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.reward.blame import STARVED_SHARE
from worldfork.reward.priority import is_confined, stands_back


@dataclass(frozen=True)
class Use:
    """How a process and its sandbox have used the CPU so far."""

    cpu_s: float = 0.0
    """Of the process, and of its children that it waited for."""
    waited_s: float = 0.0
    """How long the process was ready to run and had no CPU."""
    all_cpu_s: float = 0.0
    """Of everything in its sandbox."""
    crowded: bool = False
    """Whether other processes in the sandbox want a CPU."""
    stood_back: bool = False
    """Whether a process in the sandbox leaves the CPU to others by its own wish."""

    def is_starved(self, before: Use, wall_s: float) -> bool:
        """Whether the process had no CPU for the most part of `wall_s`, and that was not its own sandbox's doing."""
        if self.stood_back or before.stood_back:
            return False
        waited_s, all_cpu_s = self.waited_s - before.waited_s, self.all_cpu_s - before.all_cpu_s
        return waited_s >= STARVED_SHARE * wall_s > all_cpu_s and not self.crowded


async def sandbox_use(sandbox: AsyncSandbox, pid: int) -> Use:
    """Ask a sandbox's kernel how the CPU was used.

    Raises:
        SandboxDied: it is gone.
    """
    found: dict[int, list[bytes]] = {}
    for entry in (await sandbox.list_directory("/proc")).entries:
        if entry.name.isdigit():
            with contextlib.suppress(PathError):
                stat = await sandbox.read_file(f"/proc/{entry.name}/stat", max_bytes=4096)
                found[int(entry.name)] = stat.rpartition(b")")[2].split()
    waits, status, group = [await _read(sandbox, pid, name) for name in ("schedstat", "status", "autogroup")]
    used_s = {each: sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") for each, fields in found.items()}
    return Use(
        cpu_s=used_s.get(pid, 0.0),
        # The kernel's sched-stats: on a CPU, ready without one, turns.
        waited_s=int(waits.split()[1]) / 1e9 if waits else 0.0,
        all_cpu_s=sum(used_s.values()),
        crowded=any(fields[0] == b"R" for each, fields in found.items() if each not in (1, pid)),
        stood_back=any(map(stands_back, found.values())) or is_confined(status, group),
    )


async def _read(sandbox: AsyncSandbox, pid: int, name: str) -> bytes:
    with contextlib.suppress(PathError):
        return await sandbox.read_file(f"/proc/{pid}/{name}", max_bytes=4096)
    return b""
