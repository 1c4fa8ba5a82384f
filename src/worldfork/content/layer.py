"""A walk over one layer, or over any tree of files: every path as its entry, in canonical order."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from worldfork.content.entry import Entry, decode, encode
from worldfork.content.failures import naming
from worldfork.content.held import DIRECTORY, Held, spare
from worldfork.content.ids import expect_seen_whole, ids_of, is_seen_whole
from worldfork.content.mapped import NOBODY, lines_of, value_inside
from worldfork.content.marks import is_mark, mark, name_inside
from worldfork.core import mapped
from worldfork.core.beneath import open_beneath
from worldfork.core.errors import StoreError
from worldfork.core.idmap import covers

__all__ = ["NOBODY", "Found", "look", "walk"]

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_KINDS = {
    stat.S_IFREG: "f",
    stat.S_IFDIR: "d",
    stat.S_IFLNK: "l",
    stat.S_IFCHR: "c",
    stat.S_IFBLK: "b",
    stat.S_IFIFO: "p",
    stat.S_IFSOCK: "s",
}


class Found(NamedTuple):
    """One path of a tree on disk."""

    entry: Entry
    stored_bytes: int
    """What it takes on disk: a file with several names at the first one alone."""


def walk(root: Path, form: str, *, hashed: bool = True) -> Iterator[Found]:
    """Look at every path of a tree, in canonical order.

    Opens directories and files only, by descriptors beneath `root`: never through a link, never onto another mount,
    at any depth. Files with several names inside the tree are one group; other names of them do not count. What an
    ordinary user's sandboxes have closed to themselves is read all the same, and stays as it is.

    Args:
        root: a directory, whose parents are trusted.
        form: "trusted" or "user": whose marks its overlay reads, and how owners are seen inside.
        hashed: whether to read files; `content` is empty otherwise.
    Raises:
        OutOfSpace, StoreError: something cannot be read; `path` and `errno` are fields.
        DriverUnavailable, FormatUnsupported: it holds files of a range of ids that this user has not got.
    """
    found = 0
    if not is_seen_whole(root):
        yield from _found(_with_ids(root, form, hashed))
        return
    try:
        for each in _Walk(form, hashed).run(root):
            yield each
            found += 1
        return
    except StoreError as error:
        if form != "user" or os.geteuid() == 0 or error.fields.get("errno") != errno.EACCES:
            raise
    rest = lines_of(__name__, "_lines", str(root), form, "hashed" * hashed)
    yield from _found(itertools.islice(rest, found, None))


def _with_ids(root: Path, form: str, hashed: bool) -> Iterator[bytes]:
    """Look at a tree with files of a range of ids, if this user has it."""
    namespace = mapped.namespace()
    if not covers(mapped.present_map().text, ids_of(root)):
        expect_seen_whole(root)
    return lines_of(__name__, "_lines", str(root), form, "hashed" * hashed, namespace=namespace)


def _found(lines: Iterable[bytes]) -> Iterator[Found]:
    for line in lines:
        stored, _, entry = line.partition(b" ")
        yield Found(decode(entry), int(stored))


def _lines(root: str, form: str, hashed: str) -> Iterator[bytes]:
    for entry, stored_bytes in _Walk(form, bool(hashed)).run(Path(root)):
        yield b"%d %b" % (stored_bytes, encode(entry))


def look(directory: int, name: str, path: str, form: str, *, hashed: bool = True) -> Found:
    """Look at one path as `walk` would, but for its hard links, which are its neighbours' affair.

    Args:
        directory: descriptor of the directory that holds it.
        name: its name in there.
        path: what the entry is to say.
        form, hashed: as for `walk`.
    Raises:
        OutOfSpace, StoreError: it cannot be read; `path` and `errno` are fields.
    """
    return _Walk(form, hashed).look(directory, name, path)


class _Frame(Held):
    """A directory whose names are being walked."""

    def __init__(self, fd: int, path: str, prefix: str) -> None:
        super().__init__(fd)
        self.path = path
        self.prefix = prefix
        with os.scandir(fd) as entries:
            named = [(os.fsencode(entry.name), entry.name, _is_openable(entry)) for entry in entries]
        named.sort(reverse=True)
        self.names = named


def _is_openable(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)


class _Walk:
    def __init__(self, form: str, hashed: bool) -> None:
        self._form = form
        self._hash: Callable[[int, int, bool], str] | None = None
        if hashed:
            from worldfork.content.hashing import hash_file

            self._hash = hash_file
        self._links: dict[tuple[int, int], Entry] = {}
        self._mapped = form == "user" and os.geteuid() != 0
        self._uid = os.geteuid()
        self._gid = os.getegid()
        self._opaque = mark("opaque", form)
        self._redirect = mark("redirect", form)

    def run(self, root: Path) -> Iterator[Found]:
        stack: list[_Frame] = []
        try:
            with naming("", "read"):
                fd = os.open(root, DIRECTORY)
                yield self._enter(stack, fd, "", "")
            while stack:
                frame = stack[-1]
                if not frame.names:
                    self._leave(stack)
                    continue
                _, name, openable = frame.names.pop()
                path = frame.prefix + name
                with naming(path, "read"):
                    if not openable:
                        found = self._unopened(frame.fd, name, path)
                    else:
                        found = self._opened(stack, frame.fd, name, path)
                yield found
        finally:
            for frame in stack:
                frame.let_go()

    def look(self, directory: int, name: str, path: str) -> Found:
        with naming(path, "read"):
            kind = stat.S_IFMT(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):
                return self._unopened(directory, name, path)
            return self._opened(None, directory, name, path)

    def _enter(self, stack: list[_Frame], fd: int, path: str, prefix: str) -> Found:
        try:
            found = self._describe(os.fstat(fd), fd, path)
            stack.append(_Frame(fd, path, prefix))
        except BaseException:
            os.close(fd)
            raise
        spare(stack)
        return found

    def _leave(self, stack: list[_Frame]) -> None:
        frame = stack.pop()
        try:
            if stack:
                with naming(stack[-1].path, "read"):
                    stack[-1].find_again(frame.fd)
        finally:
            frame.let_go()

    def _opened(self, stack: list[_Frame] | None, directory: int, name: str, path: str) -> Found:
        fd = _open_to_read(directory, name)
        info = os.fstat(fd)
        if stat.S_ISDIR(info.st_mode) and stack is not None:
            return self._enter(stack, fd, path, path + "/")
        try:
            return self._describe(info, fd, path)
        finally:
            os.close(fd)

    def _unopened(self, directory: int, name: str, path: str) -> Found:
        """Say what a path is that must not be opened: a device may do anything then, and a FIFO waits."""
        fd = open_beneath(directory, name, os.O_PATH)
        try:
            info = os.fstat(fd)
            if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                return Found(Entry(path, "w"), 0)
            target = os.readlink("", dir_fd=fd) if stat.S_ISLNK(info.st_mode) else ""
            return self._describe(info, f"/proc/self/fd/{fd}", path, target)
        finally:
            os.close(fd)

    def _describe(self, info: os.stat_result, where: int | str, path: str, target: str = "") -> Found:
        """Say what a path is, from its facts and its descriptor or, of what is not opened, the name of that."""
        kind = _KINDS[stat.S_IFMT(info.st_mode)]
        identity = (info.st_dev, info.st_ino)
        shared = info.st_nlink > 1 and kind != "d"
        if shared:
            first = self._links.get(identity)
            if first is not None:
                return Found(first._replace(path=path, link=first.path), 0)
        xattrs, opaque, redirect = self._attributes(where)
        uid, gid = info.st_uid, info.st_gid
        if self._mapped:
            uid = 0 if uid == self._uid else NOBODY
            gid = 0 if gid == self._gid else NOBODY
        stored = info.st_blocks * 512
        size, content = 0, ""
        if kind == "f":
            size = info.st_size
            if self._hash is not None and isinstance(where, int):
                content = self._hash(where, size, stored < size)
        device = (os.major(info.st_rdev), os.minor(info.st_rdev)) if kind in "cb" else (0, 0)
        mode, mtime = stat.S_IMODE(info.st_mode), info.st_mtime_ns
        entry = Entry(path, kind, mode, uid, gid, mtime, size, content, target, device, "", xattrs, opaque, redirect)
        if shared:
            self._links[identity] = entry
        return Found(entry, stored)

    def _attributes(self, where: int | str) -> tuple[tuple[tuple[str, bytes], ...], bool, str]:
        names = os.listxattr(where)
        if not names:
            return (), False, ""
        data, opaque, redirect = [], False, ""
        for name in names:
            if not is_mark(name, self._form):
                value = os.getxattr(where, name)
                if self._mapped:
                    value = value_inside(name, value, self._uid, self._gid)
                data.append((name_inside(name, self._form), value))
            elif name == self._opaque:
                opaque = os.getxattr(where, name) == b"y"
            elif name == self._redirect:
                redirect = os.fsdecode(os.getxattr(where, name))
        return tuple(sorted(data)), opaque, redirect


def _open_to_read(directory: int, name: str) -> int:
    try:
        return open_beneath(directory, name, _READ | os.O_NOATIME)
    except PermissionError:
        return open_beneath(directory, name, _READ)  # somebody else's, whose access time is not ours to spare
