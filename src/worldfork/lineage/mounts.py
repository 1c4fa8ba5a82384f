"""Read-only mounts of a sandbox: a directory of this machine, or a directory of a snapshot."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence

from worldfork.core.errors import ConfigError
from worldfork.core.ids import content_id
from worldfork.lineage.fitting import check_form, check_ids
from worldfork.lineage.place import Place
from worldfork.records.origin import Mount
from worldfork.records.sandbox import Base, SandboxFacts
from worldfork.records.shown import Shown
from worldfork.records.snapshot import expect_filesystem
from worldfork.sandbox.driver import ShownTree

MAX_MOUNTS = 16
"""In one sandbox."""
MAX_LAYERS = 480
"""Of one snapshot that is mounted."""
MAX_ENTRIES = 20_000
"""Of a directory that its fingerprint looks at; it says where there are more."""
POINTS = "points"
"""In a sandbox's directory: the places to mount on."""
_NOTHING = "nothing"
"""In a sandbox's directory: an empty one. The kernel wants two below an overlay that nobody can write."""
_RESERVED = ("/dev", "/proc", "/sys")
_LEARNT_S = 60.0
"""How long a fingerprint of a directory is taken for its present one, while the directory itself has not changed."""

_learnt: dict[str, tuple[tuple[int, ...], float, str]] = {}
"""Path -> what it looked like, when, its fingerprint."""


def check_mounts(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """Return mounts in the order of their targets.

    Raises:
        ConfigError: too many; a target that is the root, lies in what every sandbox has of its own, or lies in
            another one; a path with a control character.
    """
    ordered = tuple(sorted(mounts, key=lambda mount: mount.target.split("/")))
    if len(ordered) > MAX_MOUNTS:
        raise ConfigError(f"{len(ordered)} mounts are more than {MAX_MOUNTS}", remedy="mount a directory above them")
    last = ""
    for mount in ordered:
        for text in (mount.target, mount.path, mount.origin.directory):
            if any(ord(c) < 32 for c in text):
                raise ConfigError(f"a mount cannot have a path with a control character: {text!r}", field="mounts")
        for own in _RESERVED:
            if f"{mount.target}/".startswith(f"{own}/"):
                raise ConfigError(f"nothing can be mounted in {own}", field="mounts.target")
        if last and f"{mount.target}/".startswith(f"{last}/"):
            raise ConfigError(f"the mount at {mount.target} lies in the one at {last}", field="mounts.target")
        last = mount.target
    return ordered


async def learn_mounts(place: Place, mounts: Sequence[Mount]) -> None:
    """Look at what will be mounted, off the event loop: a large directory takes a while.

    Raises:
        ConfigError: as `find_mounts`.
    """
    if mounts:
        await place.work(lambda: find_mounts(place, mounts))


def find_mounts(place: Place, mounts: Sequence[Mount]) -> tuple[Shown, ...]:
    """Return what mounts will show, as it is now. Blocking, unless `learn_mounts` has just looked.

    Raises:
        ConfigError: there is no such directory, or it would show the store; a snapshot is too deep.
        NotFound: there is no such snapshot.
        DriverUnavailable, FormatUnsupported: this process cannot mount it rightly.
    """
    return tuple(
        _of_snapshot(place, mount) if mount.origin.snapshot else _of_directory(place, mount) for mount in mounts
    )


def _of_snapshot(place: Place, mount: Mount) -> Shown:
    record = place.store.snapshot(place.store.id_of(mount.origin.snapshot))
    expect_filesystem(record, "mounted")
    check_form(record, place.driver.form)
    check_ids(record, place.driver.ids)
    if len(record.layers) > MAX_LAYERS:
        raise ConfigError(
            f"{record.snapshot_id} has {len(record.layers)} layers, more than can be mounted",
            remedy="restore it and take a checkpoint, which merges them",
            field="mounts.origin",
        )
    source = f"snapshot:{record.snapshot_id}{mount.path}"
    below = Base.from_json(record.base).path
    return Shown(mount.target, source, record.snapshot_id, mount.path, record.layers, below)


def _of_directory(place: Place, mount: Mount) -> Shown:
    path = os.path.realpath(mount.origin.directory)
    if not os.path.isdir(path):
        raise ConfigError(f"there is no directory {mount.origin.directory} to mount", field="mounts.origin")
    if any(ord(c) < 32 for c in path):
        raise ConfigError(f"a mount cannot have a path with a control character: {path!r}", field="mounts.origin")
    for own in map(os.path.realpath, (place.home.root, place.home.scratch)):
        if f"{own}/".startswith(f"{path.rstrip('/')}/") or f"{path}/".startswith(f"{own}/"):
            raise ConfigError(
                f"mounting {path} would show what lies in {own}, where Worldfork keeps its own files",
                remedy="mount another directory, or set WORLDFORK_HOME and WORLDFORK_SCRATCH to elsewhere",
                field="mounts.origin",
            )
    return Shown(mount.target, f"directory:{path}", _fingerprint(path), path)


def make_points(facts: SandboxFacts) -> None:
    """Make the places to mount on, where none of a sandbox's mounts will find one of its own. Blocking."""
    _make_open(f"{facts.run}/{_NOTHING}")
    points = f"{facts.run}/{POINTS}"
    _make_open(points)
    for shown in facts.mounts:
        path = points
        for name in shown.target.split("/")[1:]:
            path = f"{path}/{name}"
            if not os.path.isdir(path):
                _make_open(path)


def _make_open(path: str) -> None:
    os.mkdir(path)
    os.chmod(path, 0o755)  # whatever this process's umask is


def trees_of(place: Place, facts: SandboxFacts) -> tuple[ShownTree, ...]:
    """Return what the driver is to mount."""
    return tuple(ShownTree(shown.target, shown.path, _layers_of(place, facts, shown)) for shown in facts.mounts)


def _layers_of(place: Place, facts: SandboxFacts, shown: Shown) -> tuple[str, ...]:
    if not shown.layers:
        return ()
    layers = [str(place.store.layer_path(layer)) for layer in shown.layers]
    if shown.below:
        layers.append(shown.below)
    return (*layers, f"{facts.run}/{_NOTHING}")


def _fingerprint(path: str) -> str:
    info = os.stat(path)
    looks = (info.st_dev, info.st_ino, info.st_mtime_ns, info.st_ctime_ns)
    known = _learnt.get(path)
    if known is not None and known[0] == looks and time.monotonic() - known[1] < _LEARNT_S:
        return known[2]
    rows = list(_rows(path))
    found = content_id(*rows[:MAX_ENTRIES])[:32] + ("+" if len(rows) > MAX_ENTRIES else "")
    if len(_learnt) > MAX_MOUNTS * 16:
        _learnt.clear()
    _learnt[path] = (looks, time.monotonic(), found)
    return found


def _rows(top: str) -> Iterator[bytes]:
    """Yield a line for each entry below a directory, one more than `MAX_ENTRIES` at most; links are not followed."""
    left = MAX_ENTRIES + 1
    waiting = [(top, b"")]
    while waiting and left:
        directory, name = waiting.pop()
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            yield name + b"\0closed"  # to this user, or gone meanwhile
            left -= 1
            continue
        for each in names[:left]:
            path, inside = f"{directory}/{each}", name + b"/" + os.fsencode(each)
            try:
                info = os.lstat(path)
                target = os.fsencode(os.readlink(path)) if stat.S_ISLNK(info.st_mode) else b""
            except OSError:
                continue
            size = 0 if stat.S_ISDIR(info.st_mode) else info.st_size
            yield b"%s\0%o %d %d %s" % (inside, info.st_mode, size, info.st_mtime_ns, target)
            left -= 1
            if stat.S_ISDIR(info.st_mode):
                waiting.append((path, inside))
