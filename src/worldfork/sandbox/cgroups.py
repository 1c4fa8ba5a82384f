"""Where this process may make cgroups, on v1, hybrid and v2 hosts, and the plan items for one sandbox."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from worldfork.records.sandbox import Limits

_ACCOUNT = "cpuacct"
_V1_WANTED = ("memory", "pids", "cpu", "freezer", _ACCOUNT)
_V2_WANTED = ("memory", "pids", "cpu")
_CPU_PERIOD_US = 100_000
_MIB = 1 << 20
_REMOVAL_DEADLINE_S = 2.0
_PAUSE_S = 0.002

PREFIX = "worldfork-"
"""Every cgroup directory of ours starts with this, then the sandbox id."""


@dataclass(frozen=True)
class CgroupLayout:
    """The directories below which a sandbox's groups are made."""

    v1: dict[str, Path]
    """Controller -> directory, for hierarchies of version 1 that this process may write."""
    v2: Path | None
    """The directory of version 2 whose children get memory, pids and cpu."""

    @property
    def limited(self) -> bool:
        """Whether memory and processes can be limited."""
        return self.v2 is not None or {"memory", "pids"} <= set(self.v1)

    def directories(self, sandbox_id: str) -> tuple[str, ...]:
        """Return the directories of one sandbox, which launch will make."""
        name = f"{PREFIX}{sandbox_id}"
        if self.v2 is not None:
            return (f"{self.v2}/{name}",)
        return tuple(f"{parent}/{name}" for parent in self.v1.values())

    def items(self, sandbox_id: str, limits: Limits) -> list[tuple[str, str]]:
        """Return the plan items for one sandbox."""
        if self.v2 is not None:
            return self._items_v2(self.v2 / f"{PREFIX}{sandbox_id}", limits)
        items: list[tuple[str, str]] = []
        for controller, directory in zip(self.v1, self.directories(sandbox_id), strict=True):
            items.append(("cgdir", directory))
            items.extend(("cgset", f"{name}\t{value}") for name, value in _v1_knobs(controller, limits))
            items.append(("cgjoin", "tasks"))
            if controller == "freezer":
                items.append(("cgfreeze", "freezer.state"))
            if controller == "memory":
                items.append(("cgoom", "memory.oom_control"))
        return items

    def _items_v2(self, directory: Path, limits: Limits) -> list[tuple[str, str]]:
        knobs = []
        if limits.memory_mb is not None:
            knobs += [("memory.max", str(limits.memory_mb * _MIB)), ("memory.oom.group", "0")]
        if limits.pids is not None:
            knobs.append(("pids.max", str(limits.pids)))
        if limits.cpus is not None:
            knobs.append(("cpu.max", f"{int(limits.cpus * _CPU_PERIOD_US)} {_CPU_PERIOD_US}"))
        items = [("cgdir", str(directory)), *(("cgset", f"{name}\t{value}") for name, value in knobs)]
        items += [("cgjoin", "cgroup.procs"), ("cgfreeze2", "1"), ("cgoom", "memory.events")]
        return items


def _v1_knobs(controller: str, limits: Limits) -> list[tuple[str, str]]:
    if controller == "memory" and limits.memory_mb is not None:
        return [("memory.limit_in_bytes", str(limits.memory_mb * _MIB))]
    if controller == "pids" and limits.pids is not None:
        return [("pids.max", str(limits.pids))]
    if controller == "cpu" and limits.cpus is not None:
        return [
            ("cpu.cfs_period_us", str(_CPU_PERIOD_US)),
            ("cpu.cfs_quota_us", str(max(1000, int(limits.cpus * _CPU_PERIOD_US)))),
        ]
    return []


def detect_layout(proc: Path = Path("/proc/self")) -> CgroupLayout:
    """Find out where groups can be made, by the kernel's own tables and the right to write."""
    mounts = _cgroup_mounts((proc / "mountinfo").read_text())
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for line in (proc / "cgroup").read_text().splitlines():
        _, names, own = line.split(":", 2)
        for controller in names.split(","):
            mount = mounts.get(controller)
            if mount is None:
                continue
            directory = _inside(mount, own)
            if controller == "" and directory is not None:
                v2 = _delegated(directory, mount[0])
            elif controller in _V1_WANTED and directory is not None and os.access(directory, os.W_OK):
                v1[controller] = directory
    if not {"memory", "pids"} <= set(v1):
        v1 = {}
    if v1.get(_ACCOUNT) in [directory for name, directory in v1.items() if name != _ACCOUNT]:
        # One hierarchy has both: the group that limits counts too.
        del v1[_ACCOUNT]
    return CgroupLayout(v1={name: v1[name] for name in _V1_WANTED if name in v1}, v2=None if v1 else v2)


def _cgroup_mounts(mountinfo: str) -> dict[str, tuple[Path, str]]:
    """Return controller -> (mount point, its root in the hierarchy); version 2 is the controller ""."""
    found: dict[str, tuple[Path, str]] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if tail[0] == "cgroup2":
            found[""] = (Path(fields[4]), fields[3])
        elif tail[0] == "cgroup":
            for controller in tail[2].split(","):
                if controller in _V1_WANTED:
                    found[controller] = (Path(fields[4]), fields[3])
    return found


def _inside(mount: tuple[Path, str], own: str) -> Path | None:
    point, root = mount
    if root != "/" and (own == root or own.startswith(root + "/")):
        own = own[len(root) :]
    directory = point / own.lstrip("/")
    return directory if directory.is_dir() else (point if root != "/" else None)


def _delegated(directory: Path, top: Path) -> Path | None:
    """Climb to the nearest group that hands memory and pids to its children and that we may write."""
    while True:
        with contextlib.suppress(OSError):
            handed = set((directory / "cgroup.subtree_control").read_text().split())
            if set(_V2_WANTED[:2]) <= handed and os.access(directory, os.W_OK):
                return directory
        if directory == top or directory == directory.parent:
            return None
        directory = directory.parent


def thaw_groups(directories: Iterable[str]) -> None:
    """Let the processes of a sandbox run that is to end: on version 1 a frozen one does not even die."""
    for directory in directories:
        if os.path.basename(directory).startswith(PREFIX):
            _write(os.path.join(directory, "freezer.state"), b"THAWED")


def remove_groups(directories: Iterable[str]) -> list[str]:
    """Remove the groups of a sandbox that has ended; return those that would not go.

    What is still in one is killed: the first process of a pid namespace takes all others with it, but a machine's QEMU
    is only told to go with its keep, and may be in the hands of its guest.

    On version 1 the memory that a group's dead processes leave charged keeps the kernel's side of a removed
    group alive, so it is let go first.
    """
    left = []
    directories = tuple(directories)
    thaw_groups(directories)
    deadline = time.monotonic() + _REMOVAL_DEADLINE_S
    for directory in directories:
        if not os.path.basename(directory).startswith(PREFIX):
            continue
        _write(os.path.join(directory, "memory.force_empty"), b"0")
        if not _remove_group(directory, deadline):
            left.append(directory)
    return left


def _write(knob: str, text: bytes) -> None:
    """Write to a file of a group, if there is one."""
    with contextlib.suppress(OSError):
        fd = os.open(knob, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text)
        finally:
            os.close(fd)


def _pause() -> None:
    # The kernel tells nobody when the last process of a version 1 group is gone.
    select.select([], [], [], _PAUSE_S)


def _kill_rest(directory: str) -> None:
    with contextlib.suppress(OSError):
        for pid in Path(directory, "cgroup.procs").read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)


def _remove_group(directory: str, deadline: float) -> bool:
    while True:
        try:
            os.rmdir(directory)
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            _kill_rest(directory)
            _pause()
        else:
            return True
