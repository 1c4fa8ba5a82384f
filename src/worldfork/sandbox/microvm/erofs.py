"""The format of a read-only image: inodes, directories and attributes, as the kernel's erofs reads them.

Everything is written plainly, without compression. An image is: a block with the superblock, the content of files in
blocks of 4 KiB, the blocks of large directories, and at the end the inodes. An inode is 64 bytes, followed by its
attributes, followed by the content of a small file or by the map of one with holes.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from worldfork.core.errors import NotCapturable

BLOCK_BYTES = 4096
INLINE_LIMIT_BYTES = 1024
"""Files, links and directories up to this size sit behind their inode."""
NO_BLOCK = 0xFFFFFFFF
"""Where a map says that there is a hole."""

_MAGIC = 0xE0F5E1E2
_SUPER_AT = 1024
_WITH_MTIME = 0x2
_WITH_MAPS = 0x4
_SLOT_BYTES = 32
_INODE = struct.Struct("<HHHHQIIIIqII16x")
_PLAIN, _INLINE, _MAPPED = 0, 2, 4
_ENTRY = struct.Struct("<QHBB")
_TYPES = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
_PREFIXES = (
    ("user.", 1),
    ("trusted.", 4),
    ("security.", 6),
)
_WHOLE_NAMES = {"system.posix_acl_access": 2, "system.posix_acl_default": 3}


@dataclass(slots=True)
class Node:
    """One file of any kind."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int = 0
    rdev: int = 0
    attributes: bytes = b""
    links: int = 1
    inline: bytes | None = None
    """The content, where it sits behind the inode."""
    block: int = 0
    """The first block of the content, where it does not."""
    blocks_map: tuple[int, ...] = ()
    """The block of each chunk of a file with holes."""
    chunk_bits: int = 0
    """Blocks in a chunk, as a power of two."""
    children: dict[bytes, Node] = field(default_factory=dict)
    number: int = 0
    """Where the inode is, in slots; known once all are placed."""


def pack_attributes(attributes: Mapping[str, bytes], path: str) -> bytes:
    """Return extended attributes as they follow an inode; attributes of the file system's own are left out.

    Raises:
        NotCapturable: one is too large for the format.
    """
    out = bytearray()
    for name, value in sorted(attributes.items()):
        found = _attribute_name(name)
        if found is None:
            continue
        index, rest = found
        if len(value) > 0xFFFF:
            raise NotCapturable(
                f"the attribute {name} of {path} has {len(value)} bytes, and an image of layers takes 65535",
                what=path,
                why="attribute size",
            )
        out += struct.pack("<BBH", len(rest), index, len(value)) + rest + value
        out += bytes(-len(out) % 4)
    if len(out) // 4 >= 0xFFFF:
        raise NotCapturable(f"the attributes of {path} are too large", what=path, why="attribute size")
    return bytes(12) + bytes(out) if out else b""


def _attribute_name(name: str) -> tuple[int, bytes] | None:
    if name in _WHOLE_NAMES:
        return _WHOLE_NAMES[name], b""
    for prefix, index in _PREFIXES:
        if name.startswith(prefix):
            return index, os.fsencode(name[len(prefix) :])
    return None


def directory_blocks(names: list[bytes]) -> list[list[bytes]]:
    """Return which of the sorted names stand in which block."""
    blocks: list[list[bytes]] = [[]]
    used = 0
    for name in names:
        need = _ENTRY.size + len(name)
        if used + need > BLOCK_BYTES:
            blocks.append([])
            used = 0
        blocks[-1].append(name)
        used += need
    return blocks


def directory_size(names: list[bytes]) -> int:
    """Return the size of a directory with these names, `.` and `..` among them."""
    blocks = directory_blocks(names)
    return (len(blocks) - 1) * BLOCK_BYTES + sum(_ENTRY.size + len(name) for name in blocks[-1])


def directory_content(node: Node, parent: Node) -> bytes:
    """Return the content of a directory whose children are placed."""
    entries = {**node.children, b".": node, b"..": parent}
    out = bytearray()
    for names in directory_blocks(sorted(entries)):
        out += bytes(-len(out) % BLOCK_BYTES)
        at = len(names) * _ENTRY.size
        for name in names:
            child = entries[name]
            out += _ENTRY.pack(child.number, at, _TYPES[stat.S_IFMT(child.mode)], 0)
            at += len(name)
        out += b"".join(names)
    return bytes(out)


def place(nodes: list[Node]) -> int:
    """Give each inode its place, the first node the first; return the bytes that they take together."""
    at = 2 * _SLOT_BYTES  # a number of 0 would read as no file
    for node in nodes:
        behind = _INODE.size + len(node.attributes)
        tail = -1 if node.inline is None else node.size
        while tail >= 0 and (at + behind) % BLOCK_BYTES + tail > BLOCK_BYTES:
            at += _SLOT_BYTES
        node.number = at // _SLOT_BYTES
        at += behind + max(tail, 0) + len(node.blocks_map) * 4
        at += -at % _SLOT_BYTES
    return at


def inode_pieces(nodes: list[Node]) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of all inodes with what follows them; inline content must be known."""
    for count, node in enumerate(nodes, start=1):
        yield node.number * _SLOT_BYTES, _inode(count, node)


def _inode(count: int, node: Node) -> bytes:
    layout, value, behind = _PLAIN, node.block, b""
    if stat.S_ISCHR(node.mode) or stat.S_ISBLK(node.mode):
        value = _device(node.rdev)
    elif node.inline is not None:
        layout, value, behind = _INLINE, 0, node.inline
    elif node.blocks_map:
        layout, value = _MAPPED, node.chunk_bits
        behind = struct.pack(f"<{len(node.blocks_map)}I", *node.blocks_map)
    icount = (len(node.attributes) - 12) // 4 + 1 if node.attributes else 0
    seconds, nanoseconds = divmod(node.mtime_ns, 1_000_000_000)
    head = _INODE.pack(
        1 | layout << 1,
        icount,
        node.mode,
        0,
        node.size,
        value,
        count,
        node.uid,
        node.gid,
        seconds,
        nanoseconds,
        node.links,
    )
    return head + node.attributes + behind


def _device(rdev: int) -> int:
    major, minor = os.major(rdev), os.minor(rdev)
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def superblock(root: Node, inodes: int, blocks: int, inodes_block: int, uuid: bytes) -> bytes:
    """Return the first block of an image."""
    fields = struct.pack(
        "<IIIBBHQQIIII16s16sIHHH",
        _MAGIC,
        0,
        _WITH_MTIME,
        BLOCK_BYTES.bit_length() - 1,
        0,
        root.number,
        inodes,
        0,
        0,
        blocks,
        inodes_block,
        0,
        uuid,
        b"worldfork",
        _WITH_MAPS,
        0,
        0,
        0,
    )
    return (bytes(_SUPER_AT) + fields).ljust(BLOCK_BYTES, b"\0")
