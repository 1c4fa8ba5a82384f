"""What a stack of layers shows: the tree that a sandbox on it would see, without a mount and without a sandbox."""

from __future__ import annotations

import base64
import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from worldfork.content.entry import Entry, decode, encode
from worldfork.content.failures import naming
from worldfork.content.mapped import NOBODY, lines_of
from worldfork.content.pieces import read_pieces
from worldfork.content.stack import LayerStack, Node
from worldfork.core.errors import StoreError

_MOST_LINKS = 40
"""What the kernel follows in one path."""
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
_BATCH = 512

Known = Mapping[str, str]
"""Of a layer that was sealed: the content hash of each of its files, by path."""


class Describing:
    """Makes entries of nodes: owners as seen inside, and hard links as groups, in the order in which it is asked.

    Args:
        form: "trusted" or "user".
    """

    def __init__(self, form: str) -> None:
        self._mapped = form == "user" and os.geteuid() != 0
        self._ids = os.geteuid(), os.getegid()
        self._first: dict[tuple[int, int, int], str] = {}

    def entry(self, node: Node, content: str = "") -> Entry:
        """Return the entry of a path, without marks; it is of the group of an earlier one if it is the same file."""
        seen, info = node.seen, node.seen.info
        if info is None or seen.kind == "w":
            return Entry(node.path, "w")
        uid, gid = info.st_uid, info.st_gid
        if self._mapped:
            uid, gid = (0 if mine == owner else NOBODY for mine, owner in zip(self._ids, (uid, gid), strict=True))
        link = ""
        if info.st_nlink > 1 and seen.kind != "d":
            first = self._first.setdefault((node.layer, info.st_dev, info.st_ino), node.path)
            link = first if first != node.path else ""
        return Entry(
            node.path,
            seen.kind,
            stat.S_IMODE(info.st_mode),
            uid,
            gid,
            info.st_mtime_ns,
            size_bytes=info.st_size if seen.kind == "f" else 0,
            content=content,
            target=seen.target,
            device=(os.major(info.st_rdev), os.minor(info.st_rdev)) if seen.kind in "cb" else (0, 0),
            link=link,
            xattrs=seen.xattrs,
        )


class MergedView:
    """The merged tree of a stack of layers.

    Paths are of the tree, with or without a leading slash. Its methods raise OSError as the system would inside, and
    `Corrupt` where a layer holds what no overlay makes.

    Args:
        layers: directories, top first; the directory of a `dir:` base may be the last.
        form: "trusted" or "user": whose marks to read.
        known: for each layer what is known of its files' content, or None; such files are not read for a hash.
    """

    def __init__(self, layers: Sequence[Path], form: str, known: Sequence[Known | None] = ()) -> None:
        self.stack = LayerStack(layers, form)
        self.form = form
        self._known = [*known, *[None] * (len(layers) - len(known))]

    def lookup(self, path: str) -> Entry | None:
        """Return what is at a path, no link followed; None for nothing. It tells no hard links."""
        node = self.node(path)
        return None if node is None else Describing(self.form).entry(node)

    def node(self, path: str) -> Node | None:
        """Return where a path lies, no link followed; None if it is not there."""
        node: Node | None = self.stack.root()
        for name in path.split("/"):
            if node is not None and name:
                node = self._below(node, name)
        return node

    def resolve(self, path: str, *, follow: bool = True, passing: Callable[[Node], None] = lambda node: None) -> Node:
        """Return what a path leads to as seen from inside: links are followed, from the root of the tree at most.

        Args:
            path: `..` at the root stays there.
            follow: whether a link at its end is followed too.
            passing: called with every directory and file on the way; what it raises ends it.
        Raises:
            OSError: ENOENT, ENOTDIR, or ELOOP after 40 links.
        """
        way = [self.stack.root()]
        waiting = path.split("/")[::-1]
        links = 0
        while waiting:
            name = waiting.pop()
            if way[-1].seen.kind != "d":
                raise _error(errno.ENOTDIR, path)
            if name in ("", "."):
                continue
            if name == "..":
                del way[max(1, len(way) - 1) :]
                continue
            found = self._below(way[-1], name)
            if found is None:
                raise _error(errno.ENOENT, path)
            if found.seen.kind != "l" or not (follow or waiting):
                passing(found)
                way.append(found)
                continue
            links += 1
            if links > _MOST_LINKS:
                raise _error(errno.ELOOP, path)
            if found.seen.target.startswith("/"):
                del way[1:]
            waiting += found.seen.target.split("/")[::-1]
        return way[-1]

    def list(self, path: str) -> list[Entry]:
        """Return what a directory holds, names sorted by their bytes. Hard links are told within it.

        Raises:
            OSError: ENOENT or ENOTDIR.
        """
        node = self.node(path)
        if node is None or node.seen.kind != "d":
            raise _error(errno.ENOENT if node is None else errno.ENOTDIR, path)
        describing = Describing(self.form)
        return [describing.entry(child) for child in self.children(node)]

    def children(self, node: Node) -> Iterator[Node]:
        """Yield what a directory holds, names sorted by their bytes."""
        return (child for child in self.stack.children(node) if child.seen.kind != "w")

    def nodes(self) -> Iterator[Node]:
        """Yield every path in canonical order."""
        waiting = [iter([self.stack.root()])]
        while waiting:
            node = next(waiting[-1], None)
            if node is None:
                waiting.pop()
                continue
            yield node
            if node.seen.kind == "d":
                with naming(node.path, "read"):
                    waiting.append(iter(list(self.children(node))))

    def walk(self, *, hashed: bool = False) -> Iterator[Entry]:
        """Yield the entry of every path in canonical order.

        Args:
            hashed: whether to tell the content of files, which are read where it is not known.
        Raises:
            OutOfSpace, StoreError: something cannot be read; `path` and `errno` are fields.
        """
        found = 0
        try:
            for entry in self._walk(hashed):
                yield entry
                found += 1
            return
        except StoreError as error:
            if not self._is_closed(error.fields.get("errno")):
                raise
        for line in itertools.islice(self._mapped("_entries", "hashed" * hashed), found, None):
            yield decode(line)

    def _walk(self, hashed: bool) -> Iterator[Entry]:
        describing = Describing(self.form)
        contents: dict[str, str] = {}
        for node in self.nodes():
            entry = describing.entry(node)
            if hashed and entry.kind == "f":
                content = contents[entry.link] if entry.link else self.content(node)
                if node.seen.info is not None and node.seen.info.st_nlink > 1 and not entry.link:
                    contents[entry.path] = content
                entry = entry._replace(content=content)
            yield entry

    def content(self, node: Node) -> str:
        """Return the content hash of a file: the known one, or of what it holds.

        Raises:
            OutOfSpace, StoreError: it cannot be read; `path` and `errno` are fields.
        """
        known = self._known[node.layer]
        found = known.get(node.inside, "") if known is not None else ""
        if found:
            return found
        from worldfork.content.hashing import hash_file

        with naming(node.path, "read"):
            fd = self.open_node(node)
            try:
                info = os.fstat(fd)
                return hash_file(fd, info.st_size, info.st_blocks * 512 < info.st_size)
            finally:
                os.close(fd)

    def pieces(self, node: Node) -> Iterator[bytes]:
        """Yield the content of a file, piece by piece.

        Raises:
            OSError: as `open`; EACCES for one that its owner has closed, to himself too.
        """
        fd = self.open_node(node)
        try:
            yield from read_pieces(fd)
        finally:
            os.close(fd)

    def read(self, node: Node) -> Iterator[bytes]:
        """Yield what `pieces` does, also of a file that its owner has closed to himself: by a process for that file.

        Raises:
            OSError: as `open`.
        """
        try:
            yield from self.pieces(node)
            return
        except PermissionError as error:
            if not self._is_closed(error.errno):
                raise
        for line in self._mapped("_content", node.path):
            yield base64.b64decode(line)

    def open(self, path: str) -> int:
        """Open the file at a path for reading, no link followed; the descriptor is the caller's.

        Raises:
            OSError: ENOENT; EISDIR for a directory, EINVAL for anything else that is no file.
        """
        node = self.node(path)
        if node is None:
            raise _error(errno.ENOENT, path)
        return self.open_node(node)

    def open_node(self, node: Node) -> int:
        """Open a file where it lies; see `open`."""
        if node.seen.kind != "f":
            raise _error(errno.EISDIR if node.seen.kind == "d" else errno.EINVAL, node.path)
        try:
            return self.stack.open(node.layer, node.inside, _READ | os.O_NOATIME)
        except PermissionError:  # somebody else's, whose access time is not ours to spare
            return self.stack.open(node.layer, node.inside, _READ)

    def _is_closed(self, number: object) -> bool:
        """Whether a refusal is one that an ordinary user has put up against himself."""
        return number == errno.EACCES and self.form == "user" and os.geteuid() != 0

    def _mapped(self, function: str, *arguments: str) -> Iterator[bytes]:
        """Have a function of this module do its work where this user is root."""
        return lines_of(__name__, function, self.form, *arguments, *map(str, self.stack.layers))

    def _below(self, node: Node, name: str) -> Node | None:
        if node.seen.kind != "d":
            return None
        found = self.stack.child(node, name)
        return None if found is None or found.seen.kind == "w" else found


def _entries(form: str, hashed: str, *layers: str) -> Iterator[bytes]:
    for entry in MergedView([Path(layer) for layer in layers], form).walk(hashed=bool(hashed)):
        yield encode(entry)


def _content(form: str, path: str, *layers: str) -> Iterator[bytes]:
    view = MergedView([Path(layer) for layer in layers], form)
    with naming(path, "read"):
        fd = view.open(path)
    try:
        for data in read_pieces(fd):
            yield base64.b64encode(data) + b"\n"
    finally:
        os.close(fd)


def state_digest(view: MergedView, base_fingerprint: str = "") -> str:
    """Return the digest of a state: "b3:" and 64 hex digits, the same however the state came about.

    It covers every path as seen from inside, but not when a directory was last written to. Of a `host` base it covers
    the fingerprint alone.

    Raises:
        OutOfSpace, StoreError: something cannot be read; `path` and `errno` are fields.
    """
    from blake3 import blake3

    digest = blake3()
    header = f"worldfork state 1\n{len(base_fingerprint)}\n{base_fingerprint}\n"
    lines = [header.encode("utf-8", "surrogateescape")]
    for entry in view.walk(hashed=True):
        lines.append(encode(entry._replace(mtime_ns=0) if entry.kind == "d" else entry))
        if len(lines) >= _BATCH:
            digest.update(b"".join(lines))
            lines.clear()
    digest.update(b"".join(lines))
    return f"b3:{digest.hexdigest()}"


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
