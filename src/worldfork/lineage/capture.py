"""Copying an upper while its processes stand still, as a layer that holds only what changed since the last copy.

A file counts as unchanged when its inode and change time are those of the last copy. Two cases would slip through
and are compared by content instead: a file that a process could still write through a mapping or an open
descriptor when it was copied, since a page that is dirty already takes writes without a new change time; and a
file changed so shortly before the freeze that a later write may fall into the same tick of the kernel's clock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from worldfork.core.errors import NotCapturable

_FICLONE = 0x40049409
_TICK_NS = 20_000_000
"""Longer than a tick of any kernel's coarse clock (10 ms at 100 Hz)."""
_CHUNK_BYTES = 16 << 20
_OVERLAY = ("trusted.overlay.", "user.overlay.")
_DROPPED = tuple(f"{prefix}{name}" for prefix in _OVERLAY for name in ("origin", "impure", "nlink", "uuid", "upper"))
"""Bookkeeping that ties an upper to inodes of its lowers; a copy has other inodes."""


@dataclass(frozen=True)
class Entry:
    """What is remembered of one path of an upper."""

    inode: int
    ctime_ns: int
    kind: int
    """The file type bits of its mode."""
    redirect: str
    """Where a renamed directory came from, else empty."""
    suspect: bool
    """Whether its change time may not tell the next change."""


@dataclass
class Copied:
    """The state of an upper at its last copy, and the layers that together hold that copy (top first)."""

    layers: tuple[str, ...] = ()
    entries: dict[str, Entry] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it down; a reader sees the old or the new whole."""
        rows = {
            os.fsencode(name).hex(): [e.inode, e.ctime_ns, e.kind, e.redirect, e.suspect]
            for name, e in self.entries.items()
        }
        draft = path.with_name(path.name + ".new")
        draft.write_text(json.dumps({"layers": self.layers, "entries": rows}))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Copied:
        """Read what `save` wrote; nothing copied yet where there is no file."""
        try:
            data = json.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        entries = {os.fsdecode(bytes.fromhex(name)): Entry(*row) for name, row in data["entries"].items()}
        return cls(tuple(data["layers"]), entries)


@dataclass
class Capture:
    """The outcome of one copy."""

    copied: Copied
    changed: bool
    """False when nothing differs from the last copy; then nothing was written."""
    whole: bool
    """True when the new layer holds everything, and stands on the sandbox's own layers alone."""
    size_bytes: int


def copy_upper(upper: Path, target: Path, last: Copied, writable: set[tuple[int, int]], form: str) -> Capture:
    """Copy a frozen sandbox's upper into `target`, as a difference to `last` where that is simple.

    Args:
        upper: the overlay's upper directory; nothing may write it meanwhile.
        target: does not exist yet; made only if something changed.
        last: the last copy of this upper.
        writable: (device, inode) of files that the frozen processes can still write.
        form: "trusted" or "user": whose marks the overlay reads.
    Raises:
        NotCapturable: an entry is of a kind that cannot be copied.
    """
    with _all_open(upper) as modes:
        return _copy_open_upper(upper, target, last, writable, form, modes)


def _copy_open_upper(
    upper: Path, target: Path, last: Copied, writable: set[tuple[int, int]], form: str, modes: dict[str, int]
) -> Capture:
    now = _scan(upper, writable)
    # A directory renamed since the last copy would need its redirect translated to the copy's own layers;
    # a whole copy is always right.
    whole = not last.layers or _renames(now) != _renames(last.entries)
    previous = {} if whole else last.entries
    copier = _Copier(upper, target, now, previous, modes, form == "user")
    if not whole and not copier.differs():
        return Capture(Copied(last.layers, now), changed=False, whole=False, size_bytes=0)
    copier.run()
    return Capture(Copied((), now), changed=True, whole=whole, size_bytes=copier.size_bytes)


def is_untouched(upper: str, top: str) -> bool:
    """Whether a sandbox changed nothing: its upper is empty and its root looks like the layer's below."""
    with os.scandir(upper) as entries:
        if next(entries, None) is not None:
            return False
    mine, below = os.lstat(upper), os.lstat(top)
    return (mine.st_mode, mine.st_uid, mine.st_gid, mine.st_mtime_ns, _xattrs(upper)) == (
        below.st_mode, below.st_uid, below.st_gid, below.st_mtime_ns, _xattrs(top),
    )  # fmt: skip


def _walk(top: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path below `top`, lstat) parents first, `top` itself as an empty path."""
    yield "", os.lstat(top)
    waiting = [""]
    while waiting:
        directory = waiting.pop()
        with os.scandir(top / directory) as entries:
            for entry in entries:
                path = os.path.join(directory, entry.name)
                yield path, entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)


@contextlib.contextmanager
def _all_open(top: Path) -> Iterator[dict[str, int]]:
    """Open what the sandbox's user closed to itself, for an owner without privileges; yields the true modes."""
    modes: dict[str, int] = {}
    try:
        if os.geteuid() != 0:
            _open_below(top, "", modes)
        yield modes
    finally:
        for path, mode in modes.items():
            os.chmod(top / path, mode)


def _open_below(top: Path, directory: str, modes: dict[str, int]) -> None:
    _open_one(top, directory, os.lstat(top / directory), 0o700, modes)
    with os.scandir(top / directory) as entries:
        for entry in entries:
            path = os.path.join(directory, entry.name)
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                _open_below(top, path, modes)
            elif stat.S_ISREG(info.st_mode):
                _open_one(top, path, info, 0o400, modes)


def _open_one(top: Path, path: str, info: os.stat_result, needed: int, modes: dict[str, int]) -> None:
    mode = stat.S_IMODE(info.st_mode)
    if mode & needed != needed:
        os.chmod(top / path, mode | needed)
        modes[path] = mode


def _scan(upper: Path, writable: set[tuple[int, int]]) -> dict[str, Entry]:
    entries = {}
    fresh_ns = time.time_ns() - _TICK_NS
    inodes = {inode for _, inode in writable}
    for path, info in _walk(upper):
        redirect = _redirect(upper / path) if stat.S_ISDIR(info.st_mode) else ""
        # The device of an overlay's file is the overlay's, so that the inode alone tells.
        suspect = stat.S_ISREG(info.st_mode) and (info.st_ino in inodes or info.st_ctime_ns >= fresh_ns)
        entries[path] = Entry(info.st_ino, info.st_ctime_ns, stat.S_IFMT(info.st_mode), redirect, suspect)
    return entries


def _renames(entries: dict[str, Entry]) -> dict[str, tuple[int, str]]:
    return {path: (entry.inode, entry.redirect) for path, entry in entries.items() if entry.redirect}


def _redirect(path: Path) -> str:
    try:
        return os.fsdecode(os.getxattr(path, "trusted.overlay.redirect", follow_symlinks=False))
    except OSError:
        return ""


def _xattrs(path: str | Path, *, data: bool = True) -> dict[str, bytes]:
    """Return extended attributes; without the overlay's own when `data`, else all that a copy may carry."""
    left_out = _OVERLAY if data else _DROPPED
    return {
        name: os.getxattr(path, name, follow_symlinks=False)
        for name in os.listxattr(path, follow_symlinks=False)
        if not name.startswith(left_out)
    }


class _Copier:
    """Writes one layer: what is new or changed, whiteouts for what went, opaque marks where it must not merge."""

    def __init__(
        self,
        upper: Path,
        target: Path,
        now: dict[str, Entry],
        previous: dict[str, Entry],
        modes: dict[str, int],
        user_form: bool,
    ) -> None:
        self.upper = upper
        self.target = target
        self.now = now
        self.previous = previous
        self.modes = modes
        self.size_bytes = 0
        self._links: dict[int, str] = {}
        self._dirs: list[str] = []
        self._user = user_form

    def differs(self) -> bool:
        """Whether anything must be written."""
        return any(True for _ in self._gone()) or any(self._changed(path) for path in self.now)

    def run(self) -> None:
        """Write the layer."""
        wanted = {path for path in self.now if self._changed(path)} | set(self._gone())
        wanted |= self._linked_to(wanted)
        for path in list(wanted):
            while path:
                path = os.path.dirname(path)
                wanted.add(path)
        wanted.add("")
        for path in sorted(wanted, key=lambda text: text.split("/") if text else []):
            if path in self.now:
                self._write(path)
            else:
                self._whiteout(path)
        for path in reversed(self._dirs):
            os.chmod(self.target / path, self._mode(path))
            _copy_times(self.upper / path, self.target / path)

    def _linked_to(self, wanted: set[str]) -> set[str]:
        """Return the other names of files that will be written, so that they stay one file."""
        inodes = {self.now[path].inode for path in wanted if path in self.now and self.now[path].kind != stat.S_IFDIR}
        return {path for path, entry in self.now.items() if entry.inode in inodes and entry.kind != stat.S_IFDIR}

    def _mode(self, path: str) -> int:
        known = self.modes.get(path)
        return stat.S_IMODE(os.lstat(self.upper / path).st_mode) if known is None else known

    def _gone(self) -> Iterator[str]:
        """Yield paths of the last copy that are no more; not below a directory that is gone or replaced itself."""
        for path in self.previous:
            if path in self.now:
                continue
            parent = os.path.dirname(path)
            if parent in self.now and self._same_directory(parent):
                yield path

    def _same_directory(self, path: str) -> bool:
        old, new = self.previous.get(path), self.now[path]
        return old is not None and old.kind == new.kind == stat.S_IFDIR and old.inode == new.inode

    def _changed(self, path: str) -> bool:
        old, new = self.previous.get(path), self.now[path]
        if old is None or old.inode != new.inode or old.kind != new.kind:
            return True
        parent = os.path.dirname(path)
        if path and not self._same_directory(parent):
            return True  # the directory around it is another one, so it is all new in the copy
        if old.ctime_ns != new.ctime_ns:
            return True
        return old.suspect

    def _write(self, path: str) -> None:
        source, target = self.upper / path, self.target / path
        info = os.lstat(source)
        if stat.S_ISDIR(info.st_mode):
            self._write_directory(path, source, target, info)
            return
        if info.st_nlink > 1:
            first = self._links.setdefault(info.st_ino, path)
            if first != path:
                os.link(self.target / first, target, follow_symlinks=False)
                return
        self._write_file(source, target, info)
        self._copy_facts(source, target, info)
        if not stat.S_ISLNK(info.st_mode):
            os.chmod(target, self._mode(path))
        _copy_times(source, target)

    def _write_directory(self, path: str, source: Path, target: Path, info: os.stat_result) -> None:
        os.mkdir(target, 0o700)
        self._dirs.append(path)
        self._copy_facts(source, target, info)
        if path not in self.previous:
            return
        if self._same_directory(path):
            # Over its own copy it merges: marks that cut it off from the layers below would hide that copy too.
            for name in os.listxattr(target):
                if name.endswith((".overlay.opaque", ".overlay.redirect")):
                    os.removexattr(target, name)
        else:
            prefix = "user" if self._user else "trusted"
            os.setxattr(target, f"{prefix}.overlay.opaque", b"y")

    def _write_file(self, source: Path, target: Path, info: os.stat_result) -> None:
        if stat.S_ISREG(info.st_mode):
            copy_content(source, target)
            self.size_bytes += info.st_blocks * 512
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(source), target)
        elif stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode):
            os.mknod(target, stat.S_IFMT(info.st_mode) | 0o600)
        elif stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            os.mknod(target, info.st_mode, 0)
        else:
            raise NotCapturable(f"a device file cannot be captured: {source.name}", what=str(source), why="a device")

    def _whiteout(self, path: str) -> None:
        os.mknod(self.target / path, stat.S_IFCHR, 0)

    def _copy_facts(self, source: Path, target: Path, info: os.stat_result) -> None:
        if os.geteuid() == 0:
            os.chown(target, info.st_uid, info.st_gid, follow_symlinks=False)
        for name, value in _xattrs(source, data=False).items():
            os.setxattr(target, name, value, follow_symlinks=False)


def copy_content(source: Path, target: Path) -> None:
    """Copy a regular file: by sharing its blocks where the file system can, else its data, holes kept."""
    with open(source, "rb", buffering=0) as reader, open(target, "xb", buffering=0) as writer:
        try:
            fcntl.ioctl(writer, _FICLONE, reader.fileno())
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS):
                raise
        size = os.fstat(reader.fileno()).st_size
        offset = 0
        while offset < size:
            try:
                begin = os.lseek(reader.fileno(), offset, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                raise
            end = os.lseek(reader.fileno(), begin, os.SEEK_HOLE)
            _copy_range(reader.fileno(), writer.fileno(), begin, end)
            offset = end
        os.ftruncate(writer.fileno(), size)


def _copy_range(reader: int, writer: int, begin: int, end: int) -> None:
    while begin < end:
        done = os.copy_file_range(reader, writer, min(end - begin, _CHUNK_BYTES), begin, begin)
        if done == 0:
            raise OSError(errno.EIO, "a file became shorter while it was copied")
        begin += done


def _copy_times(source: Path, target: Path) -> None:
    info = os.lstat(source)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
