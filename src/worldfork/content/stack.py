"""How an overlay finds a name in a stack of directories, done by ourselves: without a mount, for any part of it.

A whiteout hides what lies below it; so does anything that is no directory. An opaque directory is the last one of
its stack. A redirect says under which other name, or at which other path, a directory goes on in the layers below.

Source: fs/overlayfs/namei.c of Linux, ovl_lookup and what it calls.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from worldfork.content.ids import expect_seen_whole
from worldfork.content.mapped import value_inside
from worldfork.content.marks import is_mark, mark, name_inside
from worldfork.core.beneath import open_beneath
from worldfork.core.errors import Corrupt

KINDS = {
    stat.S_IFREG: "f",
    stat.S_IFDIR: "d",
    stat.S_IFLNK: "l",
    stat.S_IFCHR: "c",
    stat.S_IFBLK: "b",
    stat.S_IFIFO: "p",
    stat.S_IFSOCK: "s",
}
_LONGEST_BYTES = 3000
"""Of a path that the kernel takes at once; it takes 4095."""
_PLACE = os.O_PATH
_SCAN = os.O_RDONLY | os.O_DIRECTORY


class Seen(NamedTuple):
    """What one layer has in one place."""

    kind: str
    """As of `Entry`; "?" for something that is no directory, and that a higher layer hides."""
    info: os.stat_result | None = None
    opaque: bool = False
    redirect: str = ""
    xattrs: tuple[tuple[str, bytes], ...] = ()
    """Sorted, as they are called inside, less the overlay's own."""
    target: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One path of the merged tree."""

    path: str
    """In the merged tree, without a leading slash."""
    seen: Seen
    """The topmost of what is merged here; a whiteout where that is all there is."""
    layer: int
    """Which layer that lies in, 0 the topmost."""
    inside: str
    """Its path there."""
    stack: tuple[tuple[int, str], ...] = ()
    """Of a directory: the layers that it is merged from, top first, and its path in each."""
    below: str | None = None
    """Of a directory or whiteout: the absolute path at which lookups would go on below this stack; None if they end."""


@dataclass(slots=True)
class _Search:
    """One lookup on its way down."""

    name: str
    """What to look for further below: a name, or an absolute path."""
    is_directory: bool = False
    stopped: bool = False
    hidden: bool = False
    """It met a whiteout."""


class LayerStack:
    """A run of layers, top first.

    Args:
        layers: directories. Nobody may write to them meanwhile; what is in them may be hostile.
        form: "trusted" or "user": whose marks to read.
        ends: whether nothing at all lies below the last of them.
    Raises:
        FormatUnsupported: one holds files of a range of ids that this process has not got.
        Corrupt: by any method, where a layer is gone, or a redirect is none that an overlay would follow.
        OSError: by any method, where a layer cannot be read.
    """

    def __init__(self, layers: Sequence[Path], form: str, *, ends: bool = True) -> None:
        self.layers = tuple(layers)
        for layer in self.layers:
            expect_seen_whole(layer)
        self.form = form
        self._ends = ends
        # An ordinary user is root inside, and sees himself named from outside.
        self._ids = (os.geteuid(), os.getegid()) if form == "user" and os.geteuid() != 0 else None
        self._whole = tuple((layer, "") for layer in range(len(self.layers)))
        self._moved: dict[tuple[int, str], str] = {}
        """Directories of layers that are shown elsewhere than where they lie, and where."""

    def root(self) -> Node:
        """Return the root."""
        return Node("", self._look(0, ""), 0, "", self._whole, None if self._ends else "/")

    def child(self, parent: Node, name: str, listed: Mapping[int, Mapping[str, Seen]] | None = None) -> Node | None:
        """Return what a directory has under a name, which may be a whiteout; None for nothing.

        Args:
            parent: a directory.
            name: one name.
            listed: for every layer of its stack, what its directory there holds; looked up if not given.
        """
        search = _Search(name)
        stack: list[tuple[int, str]] = []
        top: Seen | None = None
        places, number = parent.stack, 0
        while number < len(places) and not search.stopped:
            layer, directory = places[number]
            number += 1
            seen, inside = self._in_layer(search, layer, directory, listed)
            if seen is None:
                continue
            top = top or seen
            stack.append((layer, inside))
            if places is not self._whole and search.name.startswith("/"):
                places, number = self._whole, layer + 1
        path = join(parent.path, name)
        if top is None:
            if not search.hidden:
                return None
            return Node(path, Seen("w"), layer, inside, (), self._going_on(parent, name))
        directory_of = tuple(stack) if top.kind == "d" else ()
        for place in directory_of:
            if place[1] != path:
                self._expect_once(place, path)
        below = None if search.stopped else self._going_on(parent, search.name)
        return Node(path, top, *stack[0], directory_of, below)

    def children(self, parent: Node) -> Iterator[Node]:
        """Yield all that a directory holds, whiteouts too, names sorted by their bytes."""
        listed: dict[int, dict[str, Seen]] = {}
        names: set[str] = set()
        for layer, inside in parent.stack:
            listed[layer] = self._scan(layer, inside, names)
        for name in sorted(names, key=os.fsencode):
            found = self.child(parent, name, listed)
            if found is not None:
                yield found

    def open(self, layer: int, inside: str, flags: int) -> int:
        """Open a path of one layer: through no link, onto no other mount, however long it is."""
        try:
            fd = os.open(self.layers[layer], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:  # which must not look like a layer that lacks the path
            raise Corrupt(f"{self.layers[layer]} is gone", expected="a layer", actual="nothing") from error
        rest = inside or "."
        while True:
            piece, rest = _cut(rest)
            try:
                deeper = open_beneath(fd, piece, _PLACE | os.O_DIRECTORY if rest else flags)
            finally:
                os.close(fd)
            if not rest:
                return deeper
            fd = deeper

    def _expect_once(self, place: tuple[int, str], path: str) -> None:
        """Refuse a directory that was moved to two places.

        With what is in it shown twice, and twice again in each layer, few layers would show paths without number.
        """
        first = self._moved.setdefault(place, path)
        if first != path:
            raise Corrupt(
                f"{self.layers[place[0]]}/{place[1]} is shown both as {first!r} and as {path!r}",
                remedy="no overlay leaves a directory in two places: whoever made this layer did not use one",
                expected=first,
                actual=path,
            )

    def _going_on(self, parent: Node, name: str) -> str | None:
        if self._ends or name.startswith("/"):
            return None if self._ends else name
        return None if parent.below is None else f"{parent.below.rstrip('/')}/{name}"

    def _in_layer(
        self, search: _Search, layer: int, directory: str, listed: Mapping[int, Mapping[str, Seen]] | None
    ) -> tuple[Seen | None, str]:
        if not search.name.startswith("/"):
            inside = join(directory, search.name)
            seen = self._find(layer, inside) if listed is None else listed[layer].get(search.name)
            return self._judge(search, seen, layer, inside, "", ""), inside
        rest, inside = search.name[1:], ""
        while True:
            name, slash, after = rest.partition("/")
            # Counted from the end, for a redirect on the way changes what is before it.
            before = search.name[: len(search.name) - len(rest)]
            inside = join(inside, name)
            seen = self._judge(search, self._find(layer, inside), layer, inside, before, slash + after)
            if seen is None or not slash:
                return seen, inside
            rest = after

    def _judge(
        self, search: _Search, seen: Seen | None, layer: int, inside: str, before: str, after: str
    ) -> Seen | None:
        """Take one step of a lookup: what was found at a component, between `before` and `after`; None hides it."""
        if seen is None:
            return None
        if seen.kind == "w":
            search.stopped = search.hidden = True
            return None
        if seen.kind != "d":
            search.stopped = True
            return None if search.is_directory or after else seen
        if not after:
            search.is_directory = True
        if seen.opaque:
            search.stopped = True
        elif seen.redirect:
            self._check(seen.redirect, layer, inside)
            if seen.redirect.startswith("/"):
                search.stopped = False
                before = ""
            search.name = before + seen.redirect + after
        return seen

    def _check(self, redirect: str, layer: int, inside: str) -> None:
        if self.form == "user" or not is_redirect(redirect):
            raise Corrupt(
                f"{self.layers[layer]}/{inside} is redirected to {redirect!r}, which no overlay of its form follows",
                expected="a name or an absolute path" if self.form != "user" else "no redirect",
                actual=redirect,
            )

    def _find(self, layer: int, inside: str) -> Seen | None:
        try:
            return self._look(layer, inside)
        except FileNotFoundError:
            return None
        except OSError as error:
            # A name that is longer than the file system takes exists nowhere.
            if error.errno == errno.ENAMETOOLONG:
                return None
            raise

    def _look(self, layer: int, inside: str) -> Seen:
        fd = self.open(layer, inside, _PLACE)
        try:
            return self._see(f"/proc/self/fd/{fd}", os.fstat(fd), fd)
        finally:
            os.close(fd)

    def _scan(self, layer: int, inside: str, names: set[str]) -> dict[str, Seen]:
        """List one layer's part of a directory.

        Args:
            names: what the layers above hold there; grows.
        """
        fd = self.open(layer, inside, _SCAN)
        try:
            found = {}
            with os.scandir(fd) as entries:
                for entry in entries:
                    name, is_directory = entry.name, entry.is_dir(follow_symlinks=False)
                    if name in names and not is_directory:
                        found[name] = Seen("?")
                    else:
                        found[name] = self._see(f"/proc/self/fd/{fd}/{name}", entry.stat(follow_symlinks=False), None)
            names.update(found)
            return found
        finally:
            os.close(fd)

    def _see(self, place: str, info: os.stat_result, fd: int | None) -> Seen:
        """Read what belongs to a path, which `place` names as it is: itself if `fd` is None, else what `fd` is."""
        kind = KINDS[stat.S_IFMT(info.st_mode)]
        if kind == "c" and info.st_rdev == 0:
            return Seen("w", info)
        follow = fd is not None
        opaque, redirect, xattrs = False, "", []
        for name in os.listxattr(place, follow_symlinks=follow):
            value = os.getxattr(place, name, follow_symlinks=follow)
            if not is_mark(name, self.form):
                if self._ids is not None:
                    value = value_inside(name, value, *self._ids)
                xattrs.append((name_inside(name, self.form), value))
            elif name == mark("opaque", self.form):
                opaque = kind == "d" and value == b"y"
            elif name == mark("redirect", self.form) and kind == "d":
                redirect = os.fsdecode(value)
        target = ""
        if kind == "l":
            target = os.readlink(place) if fd is None else os.readlink("", dir_fd=fd)
        return Seen(kind, info, opaque, redirect, tuple(sorted(xattrs)), target)


def is_redirect(text: str) -> bool:
    """Whether a text is a redirect that an overlay writes: a name, or an absolute path without any `.` or `..`."""
    parts = text[1:].split("/") if text.startswith("/") else [text]
    return not {"", ".", ".."}.intersection(parts) and "/" not in parts[0]


def join(directory: str, name: str) -> str:
    """Return the path of a name in a directory, both without a leading slash."""
    return f"{directory}/{name}" if directory else name


def _cut(path: str) -> tuple[str, str]:
    """Split a path into what can be opened at once, and the rest."""
    if len(path) * 4 <= _LONGEST_BYTES or len(os.fsencode(path)) <= _LONGEST_BYTES:
        return path, ""
    at = path.rfind("/", 0, _LONGEST_BYTES // 4)
    if at < 0:
        at = path.find("/")
    return (path, "") if at < 0 else (path[:at], path[at + 1 :])
