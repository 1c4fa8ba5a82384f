"""What must be as before when the sandboxes of a bench are gone: the look of the tests, and the kernel's own counts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.leaks import Look, look, wait_until_clean

_WAIT_S = 20.0
_SHOWN = 20


def footprint(home: Path) -> Look:
    """Look at this process, the store in `home` and the machine."""
    return look(home)


def leak_check(home: Path, before: Look) -> dict[str, Any]:
    """Wait a bounded time for things to be as before; a bar that tells what is not."""
    left = wait_until_clean(before, home, deadline_s=_WAIT_S)
    return {"what": "nothing left afterwards", "left": left[:_SHOWN], "left_n": len(left), "passed": not left}


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
