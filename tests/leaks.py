"""What a test may leave behind: nothing. A look before, one after, and the difference in words.

Others come and go on the same machine, a second run of these tests among them. So only what this run started is looked
at: what lies in its homes, its children, whoever bears its mark in the environment or holds a lock of its homes, and
what these are in. A group that is nobody's counts once it has stayed longer than anything that is on its way to an end.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worldfork.lineage.place import drop_spares

BESIDE = "WORLDFORK_TEST_BESIDE" in os.environ
"""Whether scripts/test runs another stage now; it looks itself for what nobody knows of when all are over."""
ALONE = os.environ.get("CI") == "true" and not BESIDE
"""Whether what only the whole machine can tell is looked at, where no other run is seen on it."""

MARK_NAME = "WORLDFORK_TEST_RUN"
MARK = os.environ.setdefault(MARK_NAME, f"{os.getpid()}-{time.monotonic_ns()}")
"""In the environment of whatever this run starts."""

HOMES: set[Path] = set()
"""Of this run, as far as they were looked at."""
IDS: set[str] = set()
"""Of sandboxes that were seen in them."""

DEADLINE_S = 10.0
DOUBT_S = 5.0
"""A cgroup of a sandbox that no home knows of is taken for this run's own if it stays so long. Those of others that are
about to begin or to end are gone by then."""
DYING_SLACK = 8
"""Removed memory cgroups that may linger for a while: pages under write-back keep them until they are clean."""
CACHED_S = 2.0
"""After so long the page cache is let go of: what it holds of files that stay, such as layers, keeps them too."""

_DOUBT = "cgroups: nobody knows whose: "

_PERMANENT_THREAD = re.compile(r"worldfork|asyncio_\d+$")
"""The library's own event loop and its workers live as long as the process."""
_PERMANENT_FD = re.compile(
    r"/db\.sqlite|/locks(/ow-|$)|memfd:wf-init|memfd:worldfork-disk|^anon_inode:\[event(poll|fd)\]$|^/dev/null$|^user:\["
)
"""Open once per process: the database, the owner's lock, the program itself, an empty disk, an event loop, a range of
ids."""
_PERMANENT_FD_LIMIT = 16


@dataclass(frozen=True)
class Look:
    """One look: the key names a thing for comparing, the value names it for a reader."""

    processes: dict[str, str]
    mounts: dict[str, str]
    cgroups: dict[str, str]
    doubtful_cgroups: dict[str, str]
    """Empty, and of a sandbox of which nothing is known."""
    dying_cgroups: dict[str, int]
    net_namespaces: dict[str, str]
    shared_memory: dict[str, str]
    home_entries: dict[str, str]
    descriptors: dict[str, str]
    threads: dict[str, str]


def look(home: Path) -> Look:
    """Look at this process, at `home` and at what this run started."""
    HOMES.add(home)
    IDS.update(_ids(home) | _leased(home))
    processes = _processes(home)
    ours = {pid for pid, _ in processes.values()}
    cgroups, doubtful = _cgroups(home, ours)
    return Look(
        processes={key: words for key, (_, words) in processes.items()},
        mounts=_mounts(),
        cgroups=cgroups,
        doubtful_cgroups={} if BESIDE else doubtful,
        dying_cgroups=_dying_cgroups() if ALONE and not _others(ours) else {},
        net_namespaces=_net_namespaces(ours),
        shared_memory=_shared_memory(ours),
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
    known = before.cgroups.keys() | before.doubtful_cgroups.keys()
    lines += [f"{_DOUBT}{words}" for key, words in after.doubtful_cgroups.items() if key not in known]
    lines += [
        f"threads: {name}"
        for key, name in after.threads.items()
        if key not in before.threads and not _PERMANENT_THREAD.match(name)
    ]
    lines += _new_descriptors(before, after)
    for hierarchy, count in after.dying_cgroups.items():
        # Where another run was seen before, there is nothing to compare with.
        grown = count - before.dying_cgroups.get(hierarchy, 0 if before.dying_cgroups else count)
        if grown > DYING_SLACK:
            lines.append(f"cgroups: the kernel still counts {grown} more removed ones in {hierarchy}")
    return lines


def wait_until_clean(before: Look, home: Path, deadline_s: float = DEADLINE_S) -> list[str]:
    """Look again until nothing is left or the deadline has passed; return what is left, in words.

    Only what every look saw counts.
    """
    drop_spares()
    began_s = time.monotonic()
    end_s = began_s + deadline_s
    gc.collect()
    left = differences(before, look(home))
    pause_s = 0.005
    cached = True
    while left and time.monotonic() < end_s:
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.25)
        if cached and time.monotonic() - began_s > CACHED_S and all(map(_is_kernels, left)):
            _let_go_of_cached_pages()
            cached = False
        now = set(differences(before, look(home)))
        left = [line for line in left if line in now or _is_kernels(line)]
        if not any(map(_is_kernels, now)):
            left = [line for line in left if not _is_kernels(line)]
    if time.monotonic() - began_s < DOUBT_S:
        left = [line for line in left if not line.startswith(_DOUBT)]
    return left


def _is_kernels(line: str) -> bool:
    return line.startswith("cgroups: the kernel")


def _let_go_of_cached_pages() -> None:
    os.sync()
    with contextlib.suppress(OSError), open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as knob:
        knob.write("1")


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
    """Children of this process, and whoever bears the mark of this run, or locks something in `home`, or names it."""
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
        elif state != "Z" and _is_marked(pid) and not _is_ancestor(pid):
            why = "bears the mark of this run"
        else:
            continue
        name = line or _read(f"/proc/{pid}/comm").strip()
        found[f"{pid}@{started}"] = (pid, f"{pid} {name[:120]!r} (state {state}, {why})")
    return found


def _is_marked(pid: int) -> bool:
    return f"{MARK_NAME}={MARK}" in _read(f"/proc/{pid}/environ").split("\0")


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


def _ids(home: Path) -> set[str]:
    """Ids of the sandboxes that have a directory or a lock in a home."""
    found: set[str] = set()
    for room in ("run", "locks"):
        with contextlib.suppress(OSError):
            found |= {name for name in os.listdir(home / room) if name.startswith("sb-")}
    return found


def _leased(home: Path) -> set[str]:
    """Ids of the sandboxes that a home of this run still has on its books; their groups may have been in the way."""
    rows: list[tuple[str]] = []
    with contextlib.suppress(sqlite3.Error):
        uri = f"file:{home}/db.sqlite?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=0)) as database:
            rows = database.execute("SELECT holder_id FROM holders").fetchall()
    return {name for (name,) in rows}


def _mounts() -> dict[str, str]:
    found = {}
    for line in _read("/proc/self/mountinfo").splitlines():
        if any(str(home) in line for home in HOMES):
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


def _cgroups(home: Path, ours: set[int]) -> tuple[dict[str, str], dict[str, str]]:
    """Groups of sandboxes: those of this run, and those of which nobody knows whose they are."""
    theirs = _sandboxes_elsewhere()
    found: dict[str, str] = {}
    doubtful: dict[str, str] = {}
    for _, root in _cgroup_roots():
        for directory, _, _ in os.walk(root):
            of = re.search(r"/worldfork-([^/]+)", directory)
            if of is None:
                continue
            inside = _members(directory)
            words = f"{directory} ({len(inside)} processes)"
            if of[1] in IDS or inside & ours:
                found[directory] = words
            elif not inside and of[1] not in theirs and not _is_foreign(directory):
                doubtful[directory] = words
    return found, doubtful


def _is_foreign(directory: str) -> bool:
    """Whether a group belongs to another user, or is gone by now."""
    try:
        return os.stat(directory).st_uid != os.geteuid()
    except OSError:
        return True


def _sandboxes_elsewhere() -> set[str]:
    """Ids of sandboxes in other homes of this machine, such as those of another test run."""
    places = {home.parent for home in HOMES} | {Path("/tmp"), Path("/var/tmp"), Path("/dev/shm")}
    homes = {home for place in places for home in place.glob("worldfork-*")} | {Path("/var/lib/worldfork")}
    return {sandbox_id for other in homes - HOMES for sandbox_id in _ids(other)}


def _others(ours: set[int]) -> bool:
    """Whether a sandbox of somebody else runs on this machine."""
    return any(pid not in ours and _read(f"/proc/{pid}/comm").startswith("wf-init") for pid in _pids())


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
    for pid in ours:
        try:
            inode = os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            continue
        found[inode] = f"{inode} (process {pid})"
    return found


def _shared_memory(ours: set[int]) -> dict[str, str]:
    """What bears our name in memory that all share, and was made by this process, is of our homes or mapped by ours."""
    shared = Path("/dev/shm")
    mine = {str(os.getpid()), MARK, *(hashlib.sha256(os.fsencode(home)).hexdigest()[:16] for home in HOMES)}
    names = {str(path.relative_to(shared)) for path in (*shared.glob("worldfork*"), *shared.glob("worldfork*/*"))}
    maps = [_read(f"/proc/{pid}/maps") for pid in ours] if names else []
    return {
        name: f"/dev/shm/{name}"
        for name in names
        if any(each in name for each in mine) or any(f"/dev/shm/{name}" in each for each in maps)
    }


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
