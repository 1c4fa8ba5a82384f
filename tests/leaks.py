"""What a test may leave behind: nothing. A look at the machine before, one after, and the difference in words.

Some of what a machine holds belongs to others, who come and go meanwhile. Where this cannot be told apart
by a path, an id or a parent, it counts only if CI=true says that nobody else is here.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worldfork.lineage.place import drop_spares

ALONE = os.environ.get("CI") == "true"
"""Nobody else uses this machine."""

DEADLINE_S = 10.0
DYING_SLACK = 8
"""Removed memory cgroups that may linger for a while: pages under write-back keep them until they are clean."""

_PERMANENT_THREAD = re.compile(r"worldfork|asyncio_\d+$")
"""The library's own event loop and its workers live as long as the process."""
_PERMANENT_FD = re.compile(
    r"/db\.sqlite|/locks(/ow-|$)|memfd:wf-init|^anon_inode:\[event(poll|fd)\]$|^/dev/null$|^user:\["
)
"""Open once per process: the database, the owner's lock, the program itself, an event loop, a range of ids."""
_PERMANENT_FD_LIMIT = 16


@dataclass(frozen=True)
class Look:
    """One look: the key names a thing for comparing, the value names it for a reader."""

    processes: dict[str, str]
    mounts: dict[str, str]
    cgroups: dict[str, str]
    dying_cgroups: dict[str, int]
    net_namespaces: dict[str, str]
    shared_memory: dict[str, str]
    home_entries: dict[str, str]
    descriptors: dict[str, str]
    threads: dict[str, str]


def look(home: Path) -> Look:
    """Look at this process, at `home` and at the machine."""
    processes = _processes(home)
    return Look(
        processes={key: words for key, (_, words) in processes.items()},
        mounts=_mounts(home),
        cgroups=_cgroups(home),
        dying_cgroups=_dying_cgroups(),
        net_namespaces=_net_namespaces({pid for pid, _ in processes.values()}),
        shared_memory=_shared_memory(),
        home_entries=_home_entries(home),
        descriptors=_descriptors(),
        threads={str(thread.ident): thread.name for thread in threading.enumerate()},
    )


def differences(before: Look, after: Look) -> list[str]:
    """Return a line for each thing that `after` has and `before` had not."""
    lines = []
    for kind in ("processes", "mounts", "cgroups", "net_namespaces", "shared_memory", "home_entries"):
        old, new = getattr(before, kind), getattr(after, kind)
        lines += [f"{kind}: {words}" for key, words in new.items() if key not in old]
    lines += [
        f"threads: {name}"
        for key, name in after.threads.items()
        if key not in before.threads and not _PERMANENT_THREAD.match(name)
    ]
    lines += _new_descriptors(before, after)
    for hierarchy, count in after.dying_cgroups.items():
        grown = count - before.dying_cgroups.get(hierarchy, 0)
        if ALONE and grown > DYING_SLACK:
            lines.append(f"cgroups: the kernel still counts {grown} more removed ones in {hierarchy}")
    return lines


def wait_until_clean(before: Look, home: Path, deadline_s: float = DEADLINE_S) -> list[str]:
    """Look again until nothing is left or the deadline has passed; return what is left, in words.

    A thing that others started after the first look is theirs: only what every look saw counts.
    """
    drop_spares()
    end_s = time.monotonic() + deadline_s
    gc.collect()
    left = differences(before, look(home))
    pause_s = 0.005
    while left and time.monotonic() < end_s:
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.25)
        now = set(differences(before, look(home)))
        left = [line for line in left if line in now or line.startswith("cgroups: the kernel")]
        if not any(line.startswith("cgroups: the kernel") for line in now):
            left = [line for line in left if not line.startswith("cgroups: the kernel")]
    return left


def _new_descriptors(before: Look, after: Look) -> list[str]:
    old = set(before.descriptors.items())
    new = [(key, target) for key, target in after.descriptors.items() if (key, target) not in old]
    # A permanent thread that began meanwhile brought an event loop: one epoll and a pair of sockets.
    loops = sum(1 for key, name in after.threads.items() if key not in before.threads and name.startswith("worldfork"))
    excused_sockets, excused_others = 2 * loops, _PERMANENT_FD_LIMIT
    lines = []
    for key, target in new:
        if target.startswith("socket:") and excused_sockets > 0:
            excused_sockets -= 1
        elif _PERMANENT_FD.search(target) and excused_others > 0:
            excused_others -= 1
        else:
            lines.append(f"descriptors: {key} -> {target}")
    return lines


def _pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _processes(home: Path) -> dict[str, tuple[int, str]]:
    """Children of this process, whoever holds a lock in `home`, and whoever names `home` in its command line."""
    mine = os.getpid()
    lockers = _lockers(home)
    found = {}
    for pid in _pids():
        if pid == mine:
            continue
        # The second field is the name in parentheses and may hold anything.
        tail = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if not tail:
            continue
        state, parent, started = tail[0], int(tail[1]), tail[19]
        line = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
        if parent == mine:
            why = "child"
        elif pid in lockers:
            why = f"holds a lock in {home}"
        elif str(home) in line and not _is_ancestor(pid):
            why = f"names {home}"
        else:
            continue
        name = line or _read(f"/proc/{pid}/comm").strip()
        found[f"{pid}@{started}"] = (pid, f"{pid} {name[:120]!r} (state {state}, {why})")
    return found


def _is_ancestor(pid: int) -> bool:
    current = os.getppid()
    while current > 1:
        if current == pid:
            return True
        tail = _read(f"/proc/{current}/stat").rpartition(")")[2].split()
        if not tail:
            return False
        current = int(tail[1])
    return False


def _lockers(home: Path) -> set[int]:
    inodes = set()
    try:
        for entry in os.scandir(home / "locks"):
            inodes.add(entry.inode())
    except OSError:
        return set()
    pids = set()
    for line in _read("/proc/locks").splitlines():
        fields = line.replace("->", "").split()
        # "1: POSIX ADVISORY WRITE 1234 08:01:5678 0 EOF"
        if len(fields) >= 6 and fields[1] == "POSIX" and int(fields[5].rpartition(":")[2]) in inodes:
            pids.add(int(fields[4]))
    return pids - {os.getpid()}


def _mounts(home: Path) -> dict[str, str]:
    found = {}
    for line in _read("/proc/self/mountinfo").splitlines():
        if ALONE or str(home) in line or "worldfork" in line:
            found[line.split(" ", 1)[0]] = line
    return found


def _cgroup_roots() -> list[tuple[str, Path]]:
    roots = []
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind = right.split(" ", 1)[0]
        if kind in ("cgroup", "cgroup2"):
            roots.append((kind, Path(left.split(" ")[4])))
    return roots


def _cgroups(home: Path) -> dict[str, str]:
    """Directories named worldfork, less those that belong to somebody else's live sandbox."""
    ours = {pid for pid, _ in _processes(home).values()}
    theirs = _sandboxes_elsewhere(home)
    found = {}
    for _, root in _cgroup_roots():
        for directory, _, _ in os.walk(root):
            if "worldfork" not in directory:
                continue
            inside = _members(directory)
            if Path(directory).name == "worldfork" or any(name in directory for name in theirs):
                continue
            if not ALONE and (_is_foreign(directory) or (inside and not inside & ours)):
                continue
            found[directory] = f"{directory} ({len(inside)} processes)"
    return found


def _is_foreign(directory: str) -> bool:
    """Whether a group belongs to another user, or is gone by now."""
    try:
        return os.stat(directory).st_uid != os.geteuid()
    except OSError:
        return True


def _sandboxes_elsewhere(home: Path) -> set[str]:
    """Ids of sandboxes in other homes of this machine, such as those of another test run."""
    homes = [*home.parent.glob("worldfork-home-*"), *Path("/tmp").glob("worldfork-*"), Path("/var/lib/worldfork")]
    names: set[str] = set()
    for other in homes:
        if other != home:
            try:
                names |= set(os.listdir(other / "run"))
            except OSError:
                continue
    return names


def _members(directory: str) -> set[int]:
    inside = set()
    for below, _, _ in os.walk(directory):
        inside |= {int(pid) for pid in _read(f"{below}/cgroup.procs").split()}
    return inside


def _dying_cgroups() -> dict[str, int]:
    """Cgroups that are removed and that the kernel still keeps, for each hierarchy."""
    counts = {}
    kernel = {fields[0]: int(fields[2]) for fields in map(str.split, _read("/proc/cgroups").splitlines()[1:])}
    for kind, root in _cgroup_roots():
        if kind == "cgroup2":
            for line in _read(f"{root}/cgroup.stat").splitlines():
                if line.startswith("nr_dying_descendants "):
                    counts[str(root)] = int(line.split()[1])
        elif root.name in kernel:
            counts[str(root)] = kernel[root.name] - sum(1 for _ in os.walk(root))
    return counts


def _net_namespaces(ours: set[int]) -> dict[str, str]:
    found = {}
    for pid in _pids() if ALONE else ours:
        try:
            inode = os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            continue
        found[inode] = f"{inode} (process {pid})"
    return found


def _shared_memory() -> dict[str, str]:
    try:
        names = os.listdir("/dev/shm")
    except OSError:
        return {}
    return {name: f"/dev/shm/{name}" for name in names if ALONE or "worldfork" in name}


def _home_entries(home: Path) -> dict[str, str]:
    found = {}
    for room in ("run", "trash"):
        try:
            names = os.listdir(home / room)
        except OSError:
            continue
        found |= {f"{room}/{name}": str(home / room / name) for name in names}
    return found


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found
