"""Where everything lies on disk, and whether the disk can carry it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import sqlite3
import stat
import struct
import warnings
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from worldfork.core.clock import boot_id
from worldfork.core.errors import StoreError
from worldfork.core.remove import remove_tree
from worldfork.core.settings import Settings
from worldfork.store import connections
from worldfork.store.failures import from_system, typed
from worldfork.store.syscalls import file_system_magic

_REMEDY = "set WORLDFORK_SCRATCH to a directory on a local disk (ext4, xfs, btrfs) or on tmpfs"
_LONGEST_BYTES = 200
"""Of a path of ours: fsconfig(2) takes values of 255 bytes, and the layers and uppers lie below it."""
_SHARED_MEMORY = Path("/dev/shm")
_FLOCK = struct.Struct("@hhqqi4x")
_F_OFD_GETLK = 36

_UNFIT = {
    0x794C7630: "overlayfs, which cannot lie under an overlay of ours",
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x517B: "SMB",
    0x65735546: "FUSE",
    0x01021997: "9p",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x4D44: "FAT",
    0x2011BAB0: "exFAT",
    0x9660: "a CD image",
    0x73717368: "squashfs",
}
"""File systems, by f_type, that overlayfs refuses as an upper or that several machines may share."""


@dataclass(frozen=True)
class Home:
    """The directories of one store; all of them exist. Paths are absolute and free of links."""

    root: Path
    """What is large and may be anywhere."""
    scratch: Path
    """What needs a local disk; the same directory as `root` wherever that is one."""

    @property
    def images(self) -> Path:
        """Base images."""
        return self.root / "images"

    @property
    def memory(self) -> Path:
        """Memory of snapshots that have any."""
        return self.root / "memory"

    @property
    def layers(self) -> Path:
        """One directory for each layer."""
        return self.scratch / "layers"

    @property
    def run(self) -> Path:
        """One directory for each live sandbox."""
        return self.scratch / "run"

    @property
    def trash(self) -> Path:
        """What waits for its removal."""
        return self.scratch / "trash"

    @property
    def locks(self) -> Path:
        """Lock files of owners and sandboxes."""
        return self.scratch / "locks"

    @property
    def tmp(self) -> Path:
        """For files in the making; swept after a restart of the machine."""
        return self.scratch / "tmp" / boot_id()

    @property
    def database(self) -> Path:
        """The metadata."""
        return self.scratch / "db.sqlite"


def open_home(settings: Settings) -> Home:
    """Make the directories where they are missing, and choose the scratch directory.

    Scratch is `settings.scratch` if given, else the home itself if overlay uppers, record locks and SQLite work there,
    else memory (/dev/shm) with a warning. A place that has a database has passed these tests already.

    Raises:
        StoreError: a directory cannot be made or used, or no place can carry scratch; the remedy says what to set.
        OutOfSpace: the disk is full.
    """
    root = _make(settings.home, "WORLDFORK_HOME")
    scratch = _choose_scratch(root, settings.scratch)
    home = Home(root=root, scratch=scratch)
    for directory in (home.images, home.memory, home.layers, home.run, home.trash, home.locks, home.tmp.parent):
        setting = "WORLDFORK_HOME" if directory.is_relative_to(root) else "WORLDFORK_SCRATCH"
        _make(directory, setting)
        _close_to_others(directory, setting)
    _make(home.tmp, "WORLDFORK_SCRATCH")
    return home


def _choose_scratch(root: Path, chosen: Path | None) -> Path:
    if chosen is not None:
        scratch = _make(chosen, "WORLDFORK_SCRATCH")
        reason = why_unfit(scratch)
        if reason:
            raise StoreError(f"{scratch} (WORLDFORK_SCRATCH) is no place for sandboxes: {reason}", remedy=_REMEDY)
        return scratch
    reason = why_unfit(root)
    if not reason:
        return root
    memory = _memory_scratch(root, reason)
    warnings.warn(
        f"{root} cannot hold the files of sandboxes ({reason}); they go to {memory}, which is memory and does not "
        f"survive a restart. To choose a disk, {_REMEDY}.",
        stacklevel=3,
    )
    return memory


def _memory_scratch(root: Path, reason: str) -> Path:
    """Return this home's own directory in memory; a stranger's directory of that name is refused."""
    mine = _SHARED_MEMORY / f"worldfork-{os.geteuid()}"
    # Two homes must not share one database.
    scratch = mine / hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    try:
        mine.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(mine)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise StoreError(f"{mine} belongs to somebody else, and {root} is unfit: {reason}", remedy=_REMEDY)
        mine.chmod(0o700)
        scratch.mkdir(mode=0o700, exist_ok=True)
        again = why_unfit(scratch)
    except OSError as error:
        again = str(error)
    if again:
        with suppress(OSError):  # somebody uses it, or there is none
            scratch.rmdir()
            mine.rmdir()
        raise StoreError(
            f"{root} cannot hold the files of sandboxes ({reason}), nor can {mine} ({again})", remedy=_REMEDY
        )
    return scratch


def _make(directory: Path, setting: str) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        resolved = directory.resolve(strict=True)
        if not os.access(resolved, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return resolved
    except OSError as error:
        mapped = from_system(error, f"{directory} cannot be used")
        if not mapped.remedy:
            mapped.remedy = f"set {setting} to a directory that you may write"
        raise mapped from error


def _close_to_others(directory: Path, setting: str) -> None:
    """Refuse a directory of another user, who could exchange what lies in it, and close our own to everybody else.

    What a sandbox of root made is root's here too, set-uid programs included: nobody else may reach it. What is made in
    it has this user's group, also where the directory around it gives its own on (set-gid).
    """
    with typed(f"{directory} cannot be used"):
        status = os.stat(directory)
        if status.st_uid != os.geteuid():
            raise StoreError(f"{directory} belongs to another user", remedy=f"set {setting} to one of your own")
        if status.st_mode & stat.S_ISGID:
            os.chown(directory, -1, os.getegid())
        if stat.S_IMODE(status.st_mode) & (0o077 | stat.S_ISGID):
            directory.chmod(0o700)


def why_unfit(directory: Path) -> str:
    """Say why a directory cannot carry uppers, locks and the database; empty if it can.

    Tries each for real, in about 2 ms, unless a database is there, which means that it has been tried.

    Raises:
        OutOfSpace: the disk is too full to try.
        StoreError: the directory cannot be used at all.
    """
    length = len(os.fsencode(directory))
    if length > _LONGEST_BYTES:
        return f"its path has {length} bytes, and overlays take no more than {_LONGEST_BYTES}"
    with typed(f"{directory} cannot be tried"):
        magic = file_system_magic(directory)
        if magic in _UNFIT:
            return f"it lies on {_UNFIT[magic]}"
        if (directory / "db.sqlite").exists():
            return ""
        probe = directory / f".probe-{secrets.token_hex(8)}"
        probe.mkdir(mode=0o700)
        try:
            return _no_attributes(probe) or _no_record_locks(probe) or _no_wal(probe)
        finally:
            remove_tree(probe)


def _no_attributes(probe: Path) -> str:
    """Overlayfs keeps its marks in extended attributes: of `trusted` for root, of `user` in user namespaces."""
    refused = ""
    for space in ("trusted", "user"):
        try:
            os.setxattr(probe, f"{space}.worldfork.probe", b"y")
            return ""
        except OSError as error:
            refused = f"it takes no extended attributes: {error.strerror}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
    return refused


def _no_record_locks(probe: Path) -> str:
    """Take a lock and look at it with other eyes: an open file description is another owner than the process."""
    path = probe / "lock"
    first = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    second = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind = _FLOCK.unpack(fcntl.fcntl(second, _F_OFD_GETLK, asked))[0]
        return "record locks on it are not seen by others" if kind == fcntl.F_UNLCK else ""
    except OSError as error:
        return f"record locks do not work on it: {error.strerror}"
    finally:
        os.close(second)
        os.close(first)


def _no_wal(probe: Path) -> str:
    """SQLite's write-ahead log needs shared memory maps of files."""
    path = probe / "shared"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            mmap.mmap(fd, mmap.PAGESIZE).close()
        finally:
            os.close(fd)
        connections.expect_room_for_index(probe / "db")
        with closing(sqlite3.connect(probe / "db", isolation_level=None)) as writer:
            writer.execute("PRAGMA synchronous=OFF")
            if writer.execute("PRAGMA journal_mode=WAL").fetchone() != ("wal",):
                return "SQLite cannot keep a write-ahead log on it"
            writer.execute("CREATE TABLE probe (value)")
            with closing(sqlite3.connect(probe / "db", isolation_level=None)) as reader:
                reader.execute("SELECT count(*) FROM probe").fetchone()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return f"files on it cannot be mapped into memory: {error.strerror}"
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        return f"SQLite does not work on it: {error}"
    return ""
