"""The CPU use of a sandbox as its cgroup counts it, and its threads, read on the host: nothing inside takes part."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from worldfork.records.cpu import CpuUse, ThreadUse

_MAX_BYTES = 1 << 16
_MAX_THREADS = 64
"""Reading one takes tens of microseconds of an event loop."""
_NICE, _POLICY = 16, 38
"""Where they are in /proc/PID/stat, counted from what follows the name."""


@dataclass(frozen=True)
class Account:
    """Where the kernel counts one sandbox's CPU use."""

    usage: str
    """cpuacct.usage of version 1 or cpu.stat of version 2."""
    limit: str | None
    """The cpu.stat that says how long the sandbox's own CPU limit held it back."""
    threads: str
    """The list of the group's threads."""
    proc: str = "/proc"
    cpus: int = 1
    """So many the group, and what it is in, may use at once."""

    def read(self, init_pid: int | None = None) -> CpuUse | None:
        """Return the use so far; None where the group is gone.

        Args:
            init_pid: the sandbox's PID 1 as the host calls it. It is in no group, and what runs inside gives it work.
        """
        usage, limit = _text(self.usage), _counts(self.limit)
        # Version 1 has one number, in nanoseconds.
        used_s = int(usage) / 1e9 if usage.strip().isdigit() else _counts_in(usage).get("usage_usec", -1) / 1e6
        if used_s < 0:
            return None
        init_s = 0.0
        if init_pid is not None:
            with contextlib.suppress(OSError, ValueError, IndexError):
                init_s = int(_read(f"{self.proc}/{init_pid}/schedstat").split()[0]) / 1e9
        throttled_s = limit.get("throttled_time", 0) / 1e9 + limit.get("throttled_usec", 0) / 1e6
        threads = {}
        own = _Own()
        names = _text(self.threads).split()
        for name in names[:_MAX_THREADS]:
            with contextlib.suppress(OSError, ValueError, IndexError):
                threads[int(name)] = self._thread(name, own)
        return CpuUse(used_s + init_s, throttled_s, threads, len(threads) == len(names), init_s, self.cpus)

    def _thread(self, name: str, own: _Own) -> ThreadUse:
        stat = _read(f"{self.proc}/{name}/stat").rpartition(")")[2].split()
        ran_ns, waited_ns = map(int, _read(f"{self.proc}/{name}/schedstat").split()[:2])
        wants = stat[0] == "R"
        return ThreadUse(ran_ns / 1e9, waited_ns / 1e9, wants, own.stands_back(int(name), stat, wants, self.proc))


def find_account(groups: Iterable[str]) -> Account | None:
    """Return where a sandbox's groups count its CPU use; None where none does."""
    groups = tuple(groups)
    limit = next((path for path in _files(groups, "cpu.stat") if "throttled" in _text(path)), None)
    cpus = _cpus(groups)
    for usage in _files(groups, "cpuacct.usage"):
        return Account(usage, limit, os.path.join(os.path.dirname(usage), "tasks"), cpus=cpus)
    for usage in _files(groups, "cpu.stat"):
        if "usage_usec" in _text(usage):
            return Account(usage, limit, os.path.join(os.path.dirname(usage), "cgroup.threads"), cpus=cpus)
    return None


def _cpus(groups: Iterable[str]) -> int:
    """Return how many CPUs the groups may use at once: every group that they are in may have a quota."""
    cpus = float(len(os.sched_getaffinity(0)))
    # Of version 1 only one hierarchy has quotas, and looking through the others takes longer than all else.
    above = {
        parent
        for group in groups
        if any(os.path.exists(f"{group}/{name}") for name in ("cpu.cfs_quota_us", "cgroup.controllers"))
        for parent in _and_above(group)
    }
    for group in above:
        quota, period = (*_text(f"{group}/cpu.max").split(), "", "")[:2]
        if not quota:
            quota, period = (_text(f"{group}/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            cpus = min(cpus, int(quota) / int(period))
    return max(1, int(cpus))


def _and_above(path: str) -> Iterator[str]:
    while path != (above := os.path.dirname(path)):
        yield path
        path = above


def machine_used_s(stat: str = "/proc/stat") -> float:
    """Return the CPU seconds of all processes of the machine so far, and of its host's others; infinite where not told.

    What the kernel does on interrupts is in no process's count, whoever brought it about.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        # user, nice, system; then idle, iowait, irq, softirq; then steal.
        ticks = [int(each) for each in _read(stat).partition("\n")[0].split()[1:9]]
        return (sum(ticks[:3]) + ticks[7]) / os.sysconf("SC_CLK_TCK")
    return math.inf


class _Own:
    """This process's priority, class and CPUs, from which every sandbox gets its own."""

    def __init__(self) -> None:
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
        self._cpus = os.sched_getaffinity(0)
        self._group_nice: int | None = None

    def stands_back(self, thread: int, stat: Sequence[str], wants: bool, proc: str) -> bool:
        """Tell whether a thread stands back for what has our priority."""
        if int(stat[_NICE]) > self._nice or int(stat[_POLICY]) != self._policy:
            return True
        if proc == "/proc" and self._cpus - os.sched_getaffinity(thread):
            return True
        if not wants:
            return False
        if self._group_nice is None:
            self._group_nice = _group_nice(f"{proc}/self/autogroup")
        return _group_nice(f"{proc}/{thread}/autogroup") > self._group_nice


def _group_nice(path: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(_read(path).rpartition(" ")[2])
    return 0


def _files(groups: Sequence[str], name: str) -> list[str]:
    return [path for group in groups if os.path.exists(path := os.path.join(group, name))]


def _counts(path: str | None) -> dict[str, int]:
    return {} if path is None else _counts_in(_text(path))


def _counts_in(text: str) -> dict[str, int]:
    pairs = [line.partition(" ") for line in text.splitlines()]
    return {name: int(value) for name, _, value in pairs if value.isdigit()}


def _text(path: str) -> str:
    try:
        return _read(path)
    except OSError:
        return ""


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while len(data) < _MAX_BYTES and (piece := os.read(fd, _MAX_BYTES - len(data))):
            data += piece
        return data.decode(errors="replace")
    finally:
        os.close(fd)
