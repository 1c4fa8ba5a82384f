"""A small Debian root file system, made of the distribution's packages, with what a coding task needs at least.

The packages' own scripts configure it, as root of that tree: in namespaces of their own with no network, where nothing
is mounted but what they need. For an ordinary user that takes a range of ids.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from worldfork.content.ids import write_ids
from worldfork.core import mapped
from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import Corrupt, DriverUnavailable, NotFound, OutOfSpace, StoreError
from worldfork.core.ids import content_id
from worldfork.core.remove import remove_tree
from worldfork.sandbox.microvm import packages
from worldfork.sandbox.microvm.debian_script import BUILD
from worldfork.sandbox.microvm.guest_image import REMEDY
from worldfork.sandbox.microvm.packages import Apt, check_name, with_apt
from worldfork.sandbox.microvm.programs import run_program

PACKAGES = (
    "ca-certificates", "git", "make", "patch", "procps", "python-is-python3", "python3", "python3-pip", "python3-venv",
    "unzip", "xz-utils",
)  # fmt: skip
"""What a root has beside what every Debian has."""
DISK_BYTES = 1 << 30
"""About, at the most, while one is made."""
SECONDS = 120
"""About; a machine with other work needs more."""

_ROOTS, _TREE, _MANIFEST = "roots", "fs", "manifest.json"
_PART, _LOCK, _MADE = ".part-", "lock", "made"
_ID_DIGITS = 16
"""Of the content id: it is part of a path that people type."""
_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)
_FORMAT = b"debian-1"
_ESSENTIAL = "?essential"
_BUILD_S = 1800.0
_PROGRAMS = ("setpriv", "unshare", "mount", "chroot", "tar")
_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class RootTree:
    """A root file system of packages, ready to be a base."""

    id: str
    path: Path
    packages: int
    """How many."""
    wanted: tuple[str, ...]
    """Names that were asked for beside `PACKAGES`."""
    made_s: float


def plan_debian(images: Path) -> tuple[str, ...]:
    """Say what making a root takes; made without doing any of it.

    Raises:
        DriverUnavailable: this machine lacks a program, or this user a range of ids.
        OutOfSpace: the disk has too little.
    """
    lacks = packages.missing_program() or next((name for name in _PROGRAMS if _which(name) is None), "")
    if lacks:
        raise DriverUnavailable(
            f"this machine has no {lacks}, by which a Debian root is made",
            remedy="make it on Debian or Ubuntu, or give another root file system: --from dir:PATH",
            lacks=lacks,
        )
    if os.geteuid() != 0:
        mapped.namespace()
        mapped.rest()
    place = next(path for path in (images, *images.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < DISK_BYTES:
        raise OutOfSpace(
            f"a Debian root takes {DISK_BYTES >> 20} MiB of disk while it is made, and {place} has {free >> 20}",
            remedy="free some on that disk, or worldfork prune",
            scope="host",
        )
    return (
        "download some 140 Debian packages (70 MB) with apt-get, checked by its keys; nothing is installed here",
        f"unpack and configure them in {images / _ROOTS}, in namespaces of their own without a network",
    )


def debian_root(images: Path, wanted: Sequence[str] = (), clock: Clock | None = None) -> RootTree:
    """Return a root of the packages that apt offers at this moment, made if it is not there yet. Blocking, minutes.

    Args:
        images: such as `home/images`.
        wanted: names of more packages.
        clock: for the time that is noted.

    Raises:
        ConfigError: a name is none of a package.
        DriverUnavailable: the packages are not to be had, or cannot be configured here; the remedy says what to do.
        OutOfSpace: the disk is full.
    """
    more = tuple(sorted(map(check_name, wanted)))
    roots = images / _ROOTS
    roots.mkdir(parents=True, exist_ok=True)
    with _part(roots) as part:
        found = with_apt(part / "apt", lambda apt: _fetch(apt, roots, [_ESSENTIAL, "apt", *PACKAGES, *more]))
        if (roots / found.id).exists():
            return read_root(images, found.id)
        build = _build if os.geteuid() == 0 else _build_mapped
        build(part, found)
        made_s = (clock or SystemClock()).now_s()
        root = RootTree(found.id, roots / found.id / _TREE, found.packages, more, made_s)
        manifest = {"format": 1, "packages": root.packages, "wanted": list(more), "made_s": made_s}
        (part / _MADE / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        try:
            os.rename(part / _MADE, roots / found.id)
        except OSError:
            if not (roots / found.id).exists():  # else somebody else was first
                raise
    return root


@dataclass(frozen=True)
class _Fetched:
    """Packages in a directory."""

    id: str
    """Of the root that they make."""
    packages: int
    archives: str
    first: tuple[str, ...]
    """File names of those that every Debian has."""
    sources: str


def _fetch(apt: Apt, roots: Path, names: list[str]) -> _Fetched:
    # Both before anything is downloaded: apt does not name what it has.
    first, offered = apt.offered([_ESSENTIAL]), apt.offered(names)
    name = content_id(_FORMAT, BUILD.encode(), *(package.file.encode() for package in offered))[:_ID_DIGITS]
    if not (roots / name).exists():
        apt.fetch(offered, names)
    files = tuple(package.file for package in first)
    return _Fetched(name, len(offered), str(apt.archives), files, apt.sources(offered))


def _build_mapped(part: Path, fetched: _Fetched) -> None:
    mapped.run(_build, part, fetched)


def _build(part: Path, fetched: _Fetched) -> None:
    """Fill `part/made`; as root of the host or of a namespace with a range of ids."""
    made = part / _MADE
    tree = made / _TREE
    tree.mkdir(parents=True)
    tree.chmod(0o755)
    write_ids(made, "")
    first = part / "first"
    first.write_text("".join(f"{file}\n" for file in fetched.first), encoding="utf-8")
    own = ("--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts", "--propagation", "private")
    script = ("sh", "-c", BUILD, "build", str(tree), fetched.archives, str(first))
    # It ends with this process, and all inside with it. The thread that starts it waits for its end.
    run_program(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *own, *script],
        part,
        _BUILD_S,
        "see that this user may mount in namespaces of its own (`worldfork doctor`), or give --from dir:PATH",
        variables={"PATH": _path()},
    )
    (tree / "etc/apt/sources.list").write_text(fetched.sources, encoding="utf-8")


def _path() -> str:
    # An ordinary user's own often lacks the directory of chroot(8).
    return f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}".lstrip(":")


def _which(program: str) -> str | None:
    return shutil.which(program, path=_path())


@contextmanager
def _part(roots: Path) -> Iterator[Path]:
    """Give a directory for a root in the making, and remove what builds that were killed left of theirs."""
    mutex = os.open(roots / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        for old in roots.glob(f"{_PART}*"):
            # What is just ending may still write; the next build removes that.
            with suppress(BlockingIOError, StoreError), _held(old):
                remove_tree(old)
        part = Path(tempfile.mkdtemp(prefix=_PART, dir=roots))
        held = os.open(part / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
    finally:
        os.close(mutex)
    try:
        yield part
    finally:
        os.close(held)
        remove_tree(part)


@contextmanager
def _held(part: Path) -> Iterator[None]:
    """Hold the lock of a directory that nobody works in.

    Raises:
        BlockingIOError: somebody does.
    """
    lock = os.open(part / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def read_root(images: Path, id: str) -> RootTree:
    """Return a root that was made before.

    Raises:
        NotFound: there is none with this id.
        Corrupt: what is known of it cannot be read.
    """
    place = images / _ROOTS / id
    if not _ID.fullmatch(id) or not place.is_dir():
        raise NotFound(f"there is no root file system {id}", remedy=REMEDY, id=id)
    try:
        manifest = json.loads((place / _MANIFEST).read_text(encoding="utf-8"))
        return RootTree(
            id, place / _TREE, int(manifest["packages"]), tuple(manifest["wanted"]), float(manifest["made_s"])
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Corrupt(
            f"the root file system {id} is damaged: {error}",
            remedy=f"worldfork image remove {id}, then {REMEDY}",
            expected=_MANIFEST,
            actual=str(error),
        ) from error


def list_roots(images: Path) -> list[RootTree]:
    """Return all roots, the newest last; those that are damaged are left out."""
    found = []
    for place in (images / _ROOTS).glob("[0-9a-f]*"):
        with suppress(NotFound, Corrupt):
            found.append(read_root(images, place.name))
    return sorted(found, key=lambda root: root.made_s)


def find_debian_root(images: Path) -> Path | None:
    """Return the newest root that was made without naming packages, or else the newest; does nothing itself."""
    found = list_roots(images)
    plain = [root for root in found if not root.wanted]
    return next((root.path for root in reversed(plain or found)), None)


def remove_root(images: Path, id: str) -> None:
    """Remove a root. Nobody may use it as a base any more. Blocking.

    Raises:
        NotFound: there is none with this id.
        StoreError: something of it is left.
    """
    place = images / _ROOTS / id
    if not _ID.fullmatch(id) or not place.is_dir():
        raise NotFound(f"there is no image {id}", remedy="worldfork image list", id=id)
    with _part(images / _ROOTS) as part:
        os.rename(place, part / _MADE)
