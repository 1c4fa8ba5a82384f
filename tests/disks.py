"""What a crash of the machine leaves of a directory, told from what had been synchronised until then.

A process under test says through a pipe what it synchronises, and waits while the test notes what the disk then holds
for certain. After its death the directory can be made anew as several disks could have kept it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import secrets
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from tests.stores import exit_code_of, start_child

from worldfork.store import faultpoints, syscalls
from worldfork.store.database import Database

STOPPED = 42
_LOG = ("db.sqlite", "db.sqlite-wal")
_UNKEPT = ("db.sqlite-shm", "ballast")
"""Shared memory is made anew after a crash, and nobody reads the ballast."""


@dataclass(frozen=True)
class Kept:
    """What a disk had written besides what it was asked to."""

    names: bool
    """Directories are as they were at the crash."""
    data: bool
    """Content is, wherever it still has a name."""
    log: bool
    """The metadata is."""

    def __str__(self) -> str:
        kept = [name for name in ("names", "data", "log") if getattr(self, name)]
        return "+".join(kept) or "nothing more"


LOSSES = [
    Kept(names=False, data=False, log=False),
    Kept(names=False, data=False, log=True),
    Kept(names=True, data=False, log=True),
    Kept(names=True, data=True, log=False),
]
"""Nothing more than was asked for; metadata of what is not there, or is empty; what metadata knows nothing of."""
NO_LOSS = Kept(names=True, data=True, log=True)
"""A dead process on a machine that goes on."""


@dataclass
class _Inode:
    pin: int
    """A descriptor that keeps its number from being used again."""
    status: os.stat_result | None = None
    data: bytes = b""
    xattrs: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)


class Disk:
    """A directory, and what of it is certain to be on disk."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self._inodes: dict[int, _Inode] = {}
        self._root = self._known(top)
        self.sync_all()

    def sync_all(self) -> None:
        """Note all of it, as after syncfs(2)."""
        seen = self._sync_tree(self.top)
        for number in self._inodes.keys() - seen:
            os.close(self._inodes.pop(number).pin)

    def _sync_tree(self, path: Path) -> set[int]:
        number = self.sync_one(path)
        seen = {number}
        for name in self._inodes[number].names:
            seen |= self._sync_tree(path / name)
        return seen

    def sync_one(self, path: Path) -> int:
        """Note one file's content, or one directory's names, as after fsync(2); return its number."""
        number = self._known(path)
        inode = self._inodes[number]
        inode.status = os.lstat(path)
        inode.data, inode.xattrs = _content(path, inode.status), _xattrs(path)
        if stat.S_ISDIR(inode.status.st_mode):
            names = sorted(set(os.listdir(path)) - set(_UNKEPT))
            inode.names = {name: self._known(path / name) for name in names}
        return number

    def _known(self, path: Path) -> int:
        pin = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        number = os.fstat(pin).st_ino
        if number in self._inodes:
            os.close(pin)
        else:
            self._inodes[number] = _Inode(pin)
        return number

    def crash(self, target: Path, kept: Kept) -> None:
        """Make the directory anew as the machine would find it after a crash."""
        made: dict[int, Path] = {}
        if kept.names:
            self._make_present(self.top, target, kept, made)
        else:
            self._make_synced(self._root, target, made)
        if kept.log:
            for name in _LOG:
                (target / name).unlink(missing_ok=True)
                if (self.top / name).exists():
                    shutil.copy2(self.top / name, target / name)

    def _make_present(self, path: Path, target: Path, kept: Kept, made: dict[int, Path]) -> None:
        status = os.lstat(path)
        synced = self._inodes.get(status.st_ino)
        if path.name in _LOG:
            synced = synced or _Inode(-1)
        elif kept.data:
            synced = _Inode(-1, status, _content(path, status), _xattrs(path))
        elif synced is None:
            synced = _Inode(-1)
        if not _make(target, status, synced, made):
            return
        for name in sorted(set(os.listdir(path)) - set(_UNKEPT)) if stat.S_ISDIR(status.st_mode) else ():
            self._make_present(path / name, target / name, kept, made)
        _finish(target, synced)

    def _make_synced(self, number: int, target: Path, made: dict[int, Path]) -> None:
        inode = self._inodes[number]
        if not _make(target, inode.status or os.fstat(inode.pin), inode, made):
            return
        for name, below in inode.names.items():
            self._make_synced(below, target / name, made)
        _finish(target, inode)

    def close(self) -> None:
        """Let go of all numbers. Idempotent."""
        while self._inodes:
            os.close(self._inodes.popitem()[1].pin)


def _content(path: Path, status: os.stat_result) -> bytes:
    if stat.S_ISREG(status.st_mode):
        return path.read_bytes()
    return os.fsencode(os.readlink(path)) if stat.S_ISLNK(status.st_mode) else b""


def _xattrs(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)}


def _make(target: Path, status: os.stat_result, inode: _Inode, made: dict[int, Path]) -> bool:
    """Make one file or directory; false if it was one more name of a file."""
    if stat.S_ISDIR(status.st_mode):
        target.mkdir()
        return True
    if status.st_ino in made:
        os.link(made[status.st_ino], target, follow_symlinks=False)
        return False
    made[status.st_ino] = target
    if stat.S_ISREG(status.st_mode):
        target.write_bytes(inode.data)
    elif stat.S_ISLNK(status.st_mode):
        target.symlink_to(os.fsdecode(inode.data or os.fsencode("lost")))
    else:
        os.mknod(target, status.st_mode, status.st_rdev)
    return True


def _finish(target: Path, inode: _Inode) -> None:
    status = inode.status
    if status is None:
        return
    for name, value in inode.xattrs.items():
        os.setxattr(target, name, value, follow_symlinks=False)
    if os.geteuid() == 0:
        os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(target, stat.S_IMODE(status.st_mode))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)


def stop_on(disk: Disk, work: Callable[[], object], step: int) -> tuple[int, str]:
    """Run `work` in a child that ends at its `step`-th named step, while the disk notes what it synchronises.

    Returns its exit code, which is `STOPPED` where it was stopped, and the name of that step.
    """
    asked, ask = os.pipe()
    answered, answer = os.pipe()

    def live() -> None:
        os.close(asked)
        os.close(answer)
        # The same ids in each run: what two of them leave can be compared.
        chance = random.Random(7)
        secrets.token_bytes = lambda size=32: chance.randbytes(size)  # type: ignore[assignment,misc]
        secrets.token_hex = lambda size=32: chance.randbytes(size).hex()  # type: ignore[assignment,misc]
        _tell_of_every_sync(ask, answered)
        _stop_at(step, ask)
        work()
        os._exit(0)

    child = start_child(live)
    os.close(ask)
    os.close(answered)
    name = ""
    with os.fdopen(asked, encoding="utf-8") as lines:
        for line in lines:
            kind, text = json.loads(line)
            if kind == "step":
                name = text
                continue
            with contextlib.suppress(FileNotFoundError):
                if kind == "all":
                    disk.sync_all()
                elif Path(text).is_relative_to(disk.top):
                    disk.sync_one(Path(text))
            os.write(answer, b".")
    os.close(answer)
    return exit_code_of(child), name


def _stop_at(step: int, ask: int) -> None:
    passed = 0

    def hook(name: str) -> None:
        nonlocal passed
        passed += 1
        if passed == step:
            os.write(ask, json.dumps(["step", name]).encode() + b"\n")
            os._exit(STOPPED)

    faultpoints.install(hook)


def _tell_of_every_sync(ask: int, answered: int) -> None:
    """Replace what synchronises in this process, which is a child that never comes back, by words to the test."""

    def tell(kind: str, text: str) -> None:
        os.write(ask, json.dumps([kind, text]).encode() + b"\n")
        os.read(answered, 1)

    def sync_file(fd: int) -> None:
        tell("one", os.readlink(f"/proc/self/fd/{fd}"))

    known = syscalls._libc()

    class Libc:
        def __getattr__(self, name: str) -> object:
            return getattr(known, name)

        def syncfs(self, _: object) -> int:
            tell("all", "")
            return 0

    syscalls._libc = Libc  # type: ignore[assignment]
    os.fsync = os.fdatasync = sync_file  # type: ignore[assignment]
    _tell_of_sqlite(lambda path: tell("one", str(path)))


def _tell_of_sqlite(sync: Callable[[Path], None]) -> None:
    """SQLite synchronises by itself: its log at a lasting commit, both files when one is moved into the other."""
    transaction, move, drop, opened = (
        Database._transaction,
        Database._checkpoint,
        Database._drop_connections,
        Database._open,
    )

    def _transaction(self: Database, name: str, *, writes: bool = True) -> Iterator[object]:
        yield from transaction(self, name, writes=writes)
        if name == "lasting" and writes:
            sync(Path(f"{self.path}-wal"))

    def both(work: Callable[[Database], None]) -> Callable[[Database], None]:
        def wrapped(self: Database) -> None:
            sync(Path(f"{self.path}-wal"))
            work(self)
            sync(self.path)

        return wrapped

    def _open(self: Database) -> None:
        opened(self)
        # The tables were made in a lasting transaction, and the log's directory is synchronised with the log.
        for path in (self.path.parent, self.path, Path(f"{self.path}-wal")):
            sync(path)

    Database._transaction = _transaction  # type: ignore[method-assign,assignment]
    Database._checkpoint = both(move)  # type: ignore[method-assign]
    Database._drop_connections = both(drop)  # type: ignore[method-assign]
    Database._open = _open  # type: ignore[method-assign]


def what_is_in(home: Path) -> str:
    """Return a text that is the same for two homes that differ in times alone."""
    found = hashlib.sha256()
    for path in sorted(path for path in home.rglob("*") if path.name not in _LOG):
        status = os.lstat(path)
        number = status.st_nlink if stat.S_ISREG(status.st_mode) else 0
        facts = [str(path.relative_to(home)), status.st_mode, number, _xattrs(path), _content(path, status)]
        found.update(repr(facts).encode())
    with tempfile.TemporaryDirectory(dir=home.parent) as aside:
        for name in _LOG:
            if (home / name).exists():
                shutil.copyfile(home / name, Path(aside) / name)
        # Closing the last connection to a database moves its log, so a copy is looked at.
        with contextlib.closing(sqlite3.connect(Path(aside) / _LOG[0])) as db:
            found.update("".join(db.iterdump()).encode())
    return found.hexdigest()


def after_a_restart(patch: Callable[[ModuleType, str, object], None], name: str = "another-boot") -> None:
    """Let this process take the machine to have been started again; `patch` as of pytest's `monkeypatch.setattr`."""
    from worldfork.store import home, owner

    for module in (owner, home):
        patch(module, "boot_id", lambda: name)
