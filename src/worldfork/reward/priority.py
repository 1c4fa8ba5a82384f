"""Whether a process stands back for others by its own wish: what it then waits for a CPU is no sign of a full machine.

Lowering oneself needs no privilege, so the waiting of a process counts only while it has the priority, the scheduling
class and the CPUs that this process has, from which every sandbox gets its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

_NICE, _POLICY = 16, 38
"""Where they are in /proc/PID/stat, counted from what follows the name."""


def stands_back(stat: Sequence[bytes]) -> bool:
    """Tell whether a process has a lower priority than ours, or another scheduling class.

    Args:
        stat: the fields of /proc/PID/stat after the name.

    Raises:
        ValueError, IndexError: they are none.
    """
    if int(stat[_NICE]) > os.getpriority(os.PRIO_PROCESS, 0):
        return True
    return int(stat[_POLICY]) != os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def is_confined(status: bytes, group: bytes) -> bool:
    """Tell whether a process keeps off CPUs that we may use, or its session stands back for others.

    Args:
        status: /proc/PID/status.
        group: /proc/PID/autogroup; empty where the kernel has none.
    """
    ours = sum(1 << each for each in os.sched_getaffinity(0))
    for line in status.splitlines():
        name, _, value = line.partition(b":")
        if name == b"Cpus_allowed":
            if ours & ~int(value.strip().replace(b",", b""), 16):
                return True
            break
    return _group_nice(group) > _group_nice(_own_group())


def _group_nice(group: bytes) -> int:
    number = group.rpartition(b" ")[2].strip()
    return int(number) if number else 0


def _own_group() -> bytes:
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "rb") as file:
        return file.read()
    return b""
