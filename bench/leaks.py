"""What must be as before when the sandboxes of a bench are gone."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WAIT_S = 20.0


@dataclass(frozen=True)
class Footprint:
    """Counts that only this store, or this process, can change."""

    children: int
    """Processes below this one."""
    descriptors: int
    mounts: int
    """Mounts in this process's own mount namespace."""
    run_entries: int
    """Entries of the store's run directory."""
    groups: int
    """Control groups whose name holds a sandbox id of this store."""
    threads: int


def footprint(home: Path) -> Footprint:
    """Count now."""
    run = home / "run"
    return Footprint(
        children=len(_descendants(os.getpid())),
        descriptors=len(os.listdir("/proc/self/fd")),
        mounts=len(Path("/proc/self/mountinfo").read_text().splitlines()),
        run_entries=len(os.listdir(run)) if run.is_dir() else 0,
        groups=_groups(),
        threads=len(os.listdir("/proc/self/task")),
    )


def kernel_group_counts() -> dict[str, int]:
    """The kernel's own count of control groups by controller; other programs move it too."""
    rows = [line.split() for line in Path("/proc/cgroups").read_text().splitlines() if not line.startswith("#")]
    return {row[0]: int(row[2]) for row in rows}


def network_namespace_count() -> int:
    """Network namespaces that have a process."""
    seen = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                seen.add(os.readlink(f"/proc/{entry}/ns/net"))
            except OSError:
                continue
    return len(seen)


def leak_check(home: Path, before: Footprint, *, threads: int = 64, descriptors: int = 16) -> dict[str, Any]:
    """Wait a bounded time for the counts to come back; a bar that tells what did not.

    Threads of a pool and cached descriptors may stay, up to the given numbers.
    """
    deadline = time.monotonic() + _WAIT_S
    while True:
        left = _left(before, footprint(home), threads, descriptors)
        if not left or time.monotonic() > deadline:
            return {"what": "nothing left afterwards", "left": left, "passed": not left}
        time.sleep(0.1)


def _left(before: Footprint, now: Footprint, threads: int, descriptors: int) -> dict[str, int]:
    allowed = {"threads": threads, "descriptors": descriptors}
    grown = {name: getattr(now, name) - getattr(before, name) for name in Footprint.__dataclass_fields__}
    return {name: more for name, more in grown.items() if more > allowed.get(name, 0)}


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue
        parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry))
    found: list[int] = []
    todo = [root]
    while todo:
        below = parents.get(todo.pop(), [])
        found.extend(below)
        todo.extend(below)
    return found


def _groups() -> int:
    count = 0
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        count += sum(1 for name in names if "sb-" in name)
        if Path(directory).name.startswith("worldfork-bench-"):
            names.clear()
    return count
