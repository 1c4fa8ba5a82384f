"""Several directory trees as one read-only image, each under a short name.

A guest gets the layers of a snapshot as one disk, since a machine has places for few. All that a layer holds is kept:
owners, modes, times in nanoseconds, extended attributes with overlayfs's own marks, whiteouts, devices, links, holes.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from worldfork.content.ids import with_ids
from worldfork.core.errors import ConfigError, NotFound, OutOfSpace
from worldfork.core.ids import content_id
from worldfork.sandbox.microvm.blank import PART
from worldfork.sandbox.microvm.erofs import (
    BLOCK_BYTES,
    INLINE_LIMIT_BYTES,
    NO_BLOCK,
    Node,
    directory_content,
    directory_size,
    inode_pieces,
    pack_attributes,
    place,
    superblock,
)

_NAME = re.compile(r"[a-z0-9]{1,8}", re.ASCII)
_MAP_LIMIT = 1 << 16
_COPY_BYTES = 8 << 20
_FORMAT = b"trees-1"
_NOBODY = 65534


def image_id(names: Mapping[str, str]) -> str:
    """Return the name of an image in the cache: by the short names and the ids of the trees, in their order."""
    form = b"%b %b" % (_FORMAT, b"own" if _is_alone() else b"all")
    return content_id(form, *(part.encode() for pair in names.items() for part in pair))


def cached_image(directory: Path, trees: Mapping[str, tuple[str, Path]]) -> Path:
    """Return an image of trees, written if it is not there yet. Blocking; the result is there whole or not at all.

    Two that write the same image at once both succeed, and one file remains.

    Args:
        directory: such as `home/images/trees`.
        trees: short name -> (id, directory). A tree must not change under an id.

    Raises:
        ConfigError: a short name is none.
        NotFound: a tree is gone.
        NotCapturable: something in a tree cannot be in an image.
        DriverUnavailable: the layers belong to a range of ids that this user does not have.
        OutOfSpace: the disk is full.
    """
    target = directory / f"{image_id({name: tree for name, (tree, _) in trees.items()})}.erofs"
    try:
        # When it was last asked for, for whoever looks for what is of no more use.
        os.utime(target)
    except FileNotFoundError:
        directory.mkdir(parents=True, exist_ok=True)
        paths = {name: path for name, (_, path) in trees.items()}
        # Layers of an ordinary user's sandboxes belong to ids that this process is not.
        with_ids(paths.values(), write_image, target, paths)
    return target


def write_image(target: Path, trees: Mapping[str, Path]) -> None:
    """Write an image; see `cached_image`. Its owner alone may read it, since it shows what is closed in the trees."""
    for name in trees:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no short name of a tree", remedy="use up to 8 of a-z and 0-9")
    handle, part = tempfile.mkstemp(prefix=PART, dir=target.parent)
    try:
        try:
            _Writer(handle).write(trees, bytes.fromhex(content_id(_FORMAT, os.fsencode(target.name)))[:16])
            os.fchmod(handle, 0o400)
        finally:
            os.close(handle)
        os.replace(part, target)
    except OSError as error:
        _remove(part)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(
                f"no space for the image {target}",
                remedy="free some on that disk, or worldfork image prune",
                scope="host",
            ) from error
        raise
    except BaseException:
        _remove(part)
        raise


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


@dataclass
class _Open:
    """A directory whose entries are being read."""

    fd: int
    node: Node
    path: str
    """For messages."""
    entries: list[str]


def _is_alone() -> bool:
    """Whether the sandboxes of this process know one id: its own, which is root inside."""
    return os.geteuid() != 0


class _Writer:
    def __init__(self, out: int) -> None:
        self._out = out
        self._own = (os.geteuid(), os.getegid()) if _is_alone() else None
        self._block = 1
        """The next one that is free."""
        self._nodes: list[Node] = []
        self._parents: list[tuple[Node, Node]] = []
        """Each directory and the one above."""
        self._linked: dict[tuple[int, int], Node] = {}

    def write(self, trees: Mapping[str, Path], uuid: bytes) -> None:
        root = Node(stat.S_IFDIR | 0o755, 0, 0, 0)
        self._nodes.append(root)
        self._parents.append((root, root))
        for name, path in trees.items():
            self._linked.clear()  # pairs across trees are none that anybody made
            root.children[name.encode()] = self._tree(path, root)
        self._place_directories()
        size = place(self._nodes)
        for node, above in self._parents:
            content = directory_content(node, above)
            if node.inline is None:
                self._pwrite(content, node.block * BLOCK_BYTES)
            else:
                node.inline = content
        start = self._block * BLOCK_BYTES
        for at, piece in inode_pieces(self._nodes):
            self._pwrite(piece, start + at)
        blocks = self._block + -(-size // BLOCK_BYTES)
        self._pwrite(superblock(root, len(self._nodes), blocks, self._block, uuid), 0)
        os.ftruncate(self._out, blocks * BLOCK_BYTES)

    def _place_directories(self) -> None:
        for node, _ in self._parents:
            subdirectories = sum(1 for child in node.children.values() if stat.S_ISDIR(child.mode))
            node.links = 2 + subdirectories
            node.size = directory_size(sorted([*node.children, b".", b".."]))
            if node.size <= INLINE_LIMIT_BYTES:
                node.inline = b""
            else:
                node.block = self._take(-(-node.size // BLOCK_BYTES))

    def _tree(self, path: Path, above: Node) -> Node:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"{path} is no directory", path=str(path)) from None
        root = self._directory(fd, above, str(path))
        stack = [self._listed(fd, root, str(path))]
        try:
            while stack:
                here = stack[-1]
                if not here.entries:
                    os.close(stack.pop().fd)
                    continue
                name = here.entries.pop()
                info = os.lstat(name, dir_fd=here.fd)
                if stat.S_ISDIR(info.st_mode):
                    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here.fd)
                    shown = f"{here.path}/{name}"
                    child = self._directory(below, here.node, shown)
                    stack.append(self._listed(below, child, shown))
                else:
                    child = self._file(here, name, info)
                here.node.children[os.fsencode(name)] = child
        finally:
            for left in stack:
                os.close(left.fd)
        return root

    def _directory(self, fd: int, above: Node, path: str) -> Node:
        node = self._node(os.fstat(fd), f"/proc/self/fd/{fd}", path, follow=True)
        self._nodes.append(node)
        self._parents.append((node, above))
        return node

    @staticmethod
    def _listed(fd: int, node: Node, path: str) -> _Open:
        with os.scandir(fd) as entries:
            # The same tree gives the same image.
            return _Open(fd, node, path, sorted((entry.name for entry in entries), reverse=True))

    def _file(self, here: _Open, name: str, info: os.stat_result) -> Node:
        key = (info.st_dev, info.st_ino)
        if info.st_nlink > 1 and (known := self._linked.get(key)) is not None:
            known.links += 1
            return known
        shown = f"{here.path}/{name}"
        node = self._node(info, f"/proc/self/fd/{here.fd}/{name}", shown, follow=False)
        if info.st_nlink > 1:
            self._linked[key] = node
        self._nodes.append(node)
        if stat.S_ISLNK(info.st_mode):
            self._content(node, os.fsencode(os.readlink(name, dir_fd=here.fd)))
        elif stat.S_ISREG(info.st_mode):
            source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here.fd)
            try:
                self._regular(node, source, os.fstat(source), shown)
            finally:
                os.close(source)
        return node

    def _node(self, info: os.stat_result, place: str, shown: str, *, follow: bool) -> Node:
        names = os.listxattr(place, follow_symlinks=follow)
        attributes = {name: os.getxattr(place, name, follow_symlinks=follow) for name in names}
        return Node(
            info.st_mode,
            *self._owner(info),
            info.st_mtime_ns,
            rdev=info.st_rdev,
            attributes=pack_attributes(attributes, shown),
        )

    def _owner(self, info: os.stat_result) -> tuple[int, int]:
        """Return whose something is inside: a namespace of one id shows what is others' as nobody's."""
        if self._own is None:
            return info.st_uid, info.st_gid
        uid, gid = self._own
        return 0 if info.st_uid == uid else _NOBODY, 0 if info.st_gid == gid else _NOBODY

    def _regular(self, node: Node, source: int, info: os.stat_result, shown: str) -> None:
        if info.st_size <= INLINE_LIMIT_BYTES:
            self._content(node, os.pread(source, INLINE_LIMIT_BYTES + 1, 0))
            return
        node.size = info.st_size
        if info.st_blocks * 512 + BLOCK_BYTES < info.st_size:
            self._with_holes(node, source, shown)
        else:
            node.block = self._take(-(-node.size // BLOCK_BYTES))
            self._copy(source, 0, node.size, node.block * BLOCK_BYTES, shown)

    def _content(self, node: Node, content: bytes) -> None:
        node.size = len(content)
        if len(content) <= INLINE_LIMIT_BYTES:
            node.inline = content
        else:
            node.block = self._take(-(-len(content) // BLOCK_BYTES))
            self._pwrite(content, node.block * BLOCK_BYTES)

    def _with_holes(self, node: Node, source: int, shown: str) -> None:
        while -(-node.size // (BLOCK_BYTES << node.chunk_bits)) > _MAP_LIMIT:
            node.chunk_bits += 1
        chunk = BLOCK_BYTES << node.chunk_bits
        blocks = [NO_BLOCK] * -(-node.size // chunk)
        at = 0
        while at < node.size:
            try:
                first = os.lseek(source, at, os.SEEK_DATA) // chunk
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break
            last = -(-min(node.size, os.lseek(source, max(at, first * chunk), os.SEEK_HOLE)) // chunk)
            last = max(last, first + 1)
            end = min(last * chunk, node.size)
            start = self._take(-(-(end - first * chunk) // BLOCK_BYTES))
            self._copy(source, first * chunk, end, start * BLOCK_BYTES, shown)
            for number in range(first, last):
                blocks[number] = start + ((number - first) << node.chunk_bits)
            at = end
        node.blocks_map = tuple(blocks)

    def _copy(self, source: int, start: int, end: int, to: int, shown: str) -> None:
        os.lseek(self._out, to, os.SEEK_SET)
        while start < end:
            sent = os.sendfile(self._out, source, start, min(_COPY_BYTES, end - start))
            if sent == 0:
                raise NotFound(f"{shown} became shorter while it was read", path=shown)
            start += sent

    def _take(self, blocks: int) -> int:
        first = self._block
        self._block += blocks
        return first

    def _pwrite(self, data: bytes, at: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._out, view, at)
            view, at = view[done:], at + done
