"""What an upper holds: its entries as they are told apart, and the marks by which its overlay reads it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from worldfork.content.marks import mark
from worldfork.core import mapped

_TICK_NS = 20_000_000
"""Longer than a tick of any kernel's coarse clock (10 ms at 100 Hz)."""
_SECOND_NS = 1_000_000_000


class Entry(NamedTuple):
    """What is remembered of one path of an upper."""

    inode: int
    ctime_ns: int
    kind: int
    """The file type bits of its mode."""
    redirect: str
    """Where a renamed directory came from, else empty."""
    opaque: bool
    """Whether a directory hides what lies below it."""
    suspect: bool
    """Whether its change time may not tell the next change."""


@dataclass
class Copied:
    """The state of an upper at its last copy, and the layers that together hold that copy (top first)."""

    layers: tuple[str, ...] = ()
    entries: dict[str, Entry] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it down; a reader sees the old or the new whole."""
        # JSON writes the lone surrogates of a name that is not UTF-8 as escapes, and reads them back.
        draft = path.with_name(path.name + ".new")
        draft.write_text(json.dumps({"layers": self.layers, "entries": self.entries}))
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Copied:
        """Read what `save` wrote; nothing copied yet where there is no file, or none that can be read."""
        try:
            data = json.loads(path.read_text())
            return cls(tuple(data["layers"]), {name: Entry(*row) for name, row in data["entries"].items()})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls()


def scan(upper: str, form: str, writable: Collection[int] | None, modes: dict[str, int] | None) -> dict[str, Entry]:
    """Look at every path of an upper, parents first, the root as an empty path.

    Args:
        upper: the directory.
        form: whose marks to read.
        writable: numbers of the inodes, as seen inside, that processes can still write; None if nobody knows, so that
            every file counts as one.
        modes: None if this process may read everything. Else what is closed to it gets opened, and its true mode is
            kept here, also when this fails half-way: see `closed_again`.
    """
    found: dict[str, Entry] = {}
    now_ns = time.time_ns()
    waiting = [""]
    _note(found, "", upper, os.lstat(upper), form, writable, modes, now_ns)
    while waiting:
        directory = waiting.pop()
        with os.scandir(f"{upper}/{directory}") as entries:
            for entry in entries:
                path = f"{directory}/{entry.name}" if directory else entry.name
                info = entry.stat(follow_symlinks=False)
                _note(found, path, entry.path, info, form, writable, modes, now_ns)
                if stat.S_ISDIR(info.st_mode):
                    waiting.append(path)
    return found


def _note(
    found: dict[str, Entry],
    path: str,
    full: str,
    info: os.stat_result,
    form: str,
    writable: Collection[int] | None,
    modes: dict[str, int] | None,
    now_ns: int,
) -> None:
    kind = stat.S_IFMT(info.st_mode)
    if modes is not None:
        _open(path, full, info, modes)
    # A clock that counts whole seconds (ext4 with small inodes) shows none of a later change in the same second.
    tick_ns = _TICK_NS if info.st_ctime_ns % _SECOND_NS else _SECOND_NS + _TICK_NS
    suspect = info.st_ctime_ns >= now_ns - tick_ns
    redirect, opaque = "", False
    if kind == stat.S_IFDIR:
        names = os.listxattr(full, follow_symlinks=False)
        opaque = mark("opaque", form) in names
        if mark("redirect", form) in names:
            redirect = os.fsdecode(os.getxattr(full, mark("redirect", form)))
    elif kind == stat.S_IFREG and not suspect:
        suspect = writable is None or (
            bool(writable) and (info.st_ino in writable or _may_come_from(full, form, writable))
        )
    found[path] = Entry(info.st_ino, info.st_ctime_ns, kind, redirect, opaque, suspect)


def _may_come_from(full: str, form: str, writable: Collection[int]) -> bool:
    """Whether a file may have been copied up from one of these inodes, whose number it still shows inside.

    The overlay keeps a file handle of the origin, and a file handle holds the inode's number among its words. Mounted
    by an ordinary user it knows no handles, and keeps an empty one.
    """
    try:
        handle = os.getxattr(full, mark("origin", form), follow_symlinks=False)
    except OSError:
        return False
    return not handle or any(struct.pack("=I", inode & 0xFFFFFFFF) in handle for inode in writable)


def _open(path: str, full: str, info: os.stat_result, modes: dict[str, int]) -> None:
    mode = stat.S_IMODE(info.st_mode)
    needed = {stat.S_IFDIR: 0o500, stat.S_IFREG: 0o400}.get(stat.S_IFMT(info.st_mode), 0)
    if mode & needed != needed:
        os.chmod(full, mode | needed)
        modes[path] = mode


@contextlib.contextmanager
def closed_again(upper: str) -> Iterator[dict[str, int] | None]:
    """Yield the `modes` for `scan`, and give back afterwards what a sandbox's user had closed to itself."""
    if os.geteuid() == 0:
        yield None
        return
    modes: dict[str, int] = {}
    try:
        yield modes
    finally:
        for path, mode in reversed(modes.items()):
            os.chmod(f"{upper}/{path}", mode)


def make_directory(path: str | Path, mode: int) -> None:
    """Make a directory that takes over no access control list of the one around it."""
    os.mkdir(path, mode)
    for name in os.listxattr(path):
        if name.startswith("system.posix_acl_"):
            os.removexattr(path, name)


def move_upper(source: str | Path, target: str | Path) -> None:
    """Rename an upper, which takes the right to write to it too, and it may be closed or belong to another id."""
    mapped.if_refused(_move_upper, source, target)


def _move_upper(source: str | Path, target: str | Path) -> None:
    mode = stat.S_IMODE(os.lstat(source).st_mode)
    closed = os.geteuid() != 0 and mode & 0o200 == 0
    if closed:
        os.chmod(source, mode | 0o200)
    try:
        os.rename(source, target)
    except BaseException:
        if closed:
            os.chmod(source, mode)
        raise
    if closed:
        os.chmod(target, mode)
