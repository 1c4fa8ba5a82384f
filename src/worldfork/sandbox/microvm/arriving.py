"""The stream of records in which a guest sends a tree, read as entries.

Whoever broke out of the sandbox inside the guest may send anything: each record is looked at before something is made
of it, and the whole is bounded. `native/mux.h` describes the records.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from typing import BinaryIO, NamedTuple

from worldfork.content.entry import Entry
from worldfork.content.expected import CanonicalOrder, expect_entry
from worldfork.content.marks import is_mark, mark, name_inside
from worldfork.core.errors import Corrupt, NotCapturable, OutOfSpace, SandboxDied, SandboxError
from worldfork.sandbox.microvm import wire

REMEDY = "end this sandbox: what runs its machine is not what was started there"

_LENGTHS_MAX = ((64 << 10) + 256, 1 << 20, 64 << 10)
"""Of a name, of all attributes, of a link's target, in bytes."""
_LINKED = "flps"
"""Kinds of files that can have several names; only those of plain files are marked, since their content comes once."""
_LINKS_BYTES_MAX = 256 << 20
"""What may be remembered of files with several names."""
_INODE_BYTES = 1024
"""What a file counts for at least; no file system has as many as one for each of these."""
_FILE_BYTES_MAX = 16 << 40
_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 4096
_XATTR = struct.Struct("<HI")
_NO_CONTENT = "0" * 64
"""In the place of a hash, which is made when the layer is sealed."""


class _Head(NamedTuple):
    """The fixed part of a record, as `wire.EXPORT_HEAD` has it."""

    kind: int
    again: int
    mode: int
    uid: int
    gid: int
    name_len: int
    xattrs_len: int
    target_len: int
    major: int
    minor: int
    links: int
    mtime_ns: int
    mtime_s: int
    size: int
    inode: int


class Arriving:
    """Reads one stream, and believes nothing of it.

    Args:
        stream: of records.
        form: "trusted" or "user": whose marks the overlay in the guest writes.
        limit_bytes: more than this is not taken.
    """

    def __init__(self, stream: BinaryIO, form: str, limit_bytes: int) -> None:
        self._stream = stream
        self._form = form
        self._limit_bytes = limit_bytes
        self._left_bytes = limit_bytes
        self._order = CanonicalOrder()
        self._first: dict[int, str] = {}
        """By inode: the first name of a file that has several."""
        self._first_bytes = 0
        self.files_bytes = 0
        """What the contents so far take."""
        self._path = ""

    def next(self) -> tuple[Entry, Iterator[bytes | int] | None] | None:
        """Return the next path and, of a file, its content, to be read before the next; None at the end.

        Raises:
            NotCapturable: the guest could not read its tree, or there is what no layer carries.
            OutOfSpace: it is more than the limit.
            SandboxDied: the stream ended before its end.
            SandboxError: it is no such stream.
        """
        head = _Head(*wire.EXPORT_HEAD.unpack(self._exactly(wire.EXPORT_HEAD.size)))
        lengths = (head.name_len, head.xattrs_len, head.target_len)
        if any(length > most for length, most in zip(lengths, _LENGTHS_MAX, strict=True)):
            raise broken("a record is too long", self._path)
        name = os.fsdecode(self._exactly(head.name_len))
        if head.kind == ord("e"):
            if head.size:
                _raise_failure(head.size, name)
            return None
        self._path = name
        attributes = self._exactly(head.xattrs_len)
        link_target = os.fsdecode(self._exactly(head.target_len))
        entry = self._entry(head, name, attributes, link_target)
        plain = entry.kind == "w" or bool(entry.link)
        self._take(head.name_len + (0 if plain else _INODE_BYTES + len(attributes)))
        try:
            hashed = entry._replace(content=_NO_CONTENT) if entry.kind == "f" else entry
            expect_entry(hashed)
            self._order.expect_next(entry)
        except (ValueError, Corrupt) as error:
            raise broken(str(error), name) from error
        if entry.kind in _LINKED and not entry.link and head.links > 1:
            self._remember(head.inode, name)
        return entry, self._content(entry) if entry.kind == "f" and not entry.link else None

    def _entry(self, head: _Head, name: str, attributes: bytes, link_target: str) -> Entry:
        kind = chr(head.kind)
        if head.again:
            first = self._first.get(head.inode)
            if kind != "f" or first is None:
                raise broken("it is another name of nothing", name)
            return Entry(name, kind, link=first)
        if kind == "c" and (head.major, head.minor) == (0, 0):
            return Entry(name, "w")
        if kind in ("c", "b"):
            raise NotCapturable(f"a device file cannot be captured: {name}", what=name, why="a device")
        if kind not in "dflps" or head.mtime_ns >= 1_000_000_000 or head.size > _FILE_BYTES_MAX:
            raise broken("it is no kind of file", name)
        if kind in _LINKED and kind != "f" and head.links > 1 and head.inode in self._first:
            return Entry(name, kind, target=link_target, link=self._first[head.inode])
        found = _attributes(attributes, name)
        marks = {key: value for key, value in found.items() if is_mark(key, self._form)}
        data = {name_inside(key, self._form): value for key, value in found.items() if key not in marks}
        return Entry(
            name,
            kind,
            head.mode,
            head.uid,
            head.gid,
            head.mtime_s * 1_000_000_000 + head.mtime_ns,
            head.size,
            target=link_target,
            xattrs=tuple(sorted(data.items())),
            opaque=kind == "d" and marks.get(mark("opaque", self._form)) == b"y",
            redirect=os.fsdecode(marks.get(mark("redirect", self._form), b"")) if kind == "d" else "",
        )

    def _content(self, entry: Entry) -> Iterator[bytes | int]:
        at = 0
        while True:
            offset, length = wire.STRETCH.unpack(self._exactly(wire.STRETCH.size))
            if offset < at or offset + length > entry.size_bytes or (not length and offset != entry.size_bytes):
                raise broken("a part of a file lies outside of it", entry.path)
            if offset > at:
                yield offset - at
            if not length:
                return
            self._take(length)
            self.files_bytes += -(-length // _BLOCK_BYTES) * _BLOCK_BYTES
            at = offset + length
            while length:
                data = self._exactly(min(length, _CHUNK_BYTES))
                length -= len(data)
                yield data

    def _remember(self, inode: int, name: str) -> None:
        self._first[inode] = name
        self._first_bytes += len(name) + _INODE_BYTES // 4
        if self._first_bytes > _LINKS_BYTES_MAX:
            raise NotCapturable("there are too many files with several names", what=name, why="too many")

    def _exactly(self, size: int) -> bytes:
        data = self._read(size)
        if len(data) != size:
            raise SandboxDied("the machine ended before it had sent all changes", step="export")
        return data

    def expect_end(self) -> None:
        """Take the end of the stream.

        Raises:
            SandboxError: there is more.
        """
        if self._read(1):
            raise broken("it goes on after its end", self._path)

    def _read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except TimeoutError:
            raise SandboxError("the guest stopped in the middle of its changes", remedy=REMEDY, step="export") from None
        except OSError as error:
            raise SandboxDied(f"the machine has ended: {error}", step="export") from error

    def _take(self, count_bytes: int) -> None:
        self._left_bytes -= count_bytes + wire.EXPORT_HEAD.size
        if self._left_bytes < 0:
            raise OutOfSpace(
                f"the guest sent more than the {self._limit_bytes} bytes that its disk can hold",
                remedy=REMEDY,
                scope="sandbox",
            )


def _attributes(packed: bytes, path: str) -> Mapping[str, bytes]:
    found: dict[str, bytes] = {}
    at = 0
    while at < len(packed):
        if len(packed) - at < _XATTR.size:
            raise broken("an attribute is cut off", path)
        name_len, value_len = _XATTR.unpack_from(packed, at)
        at += _XATTR.size
        name, value = packed[at : at + name_len], packed[at + name_len : at + name_len + value_len]
        at += name_len + value_len
        if at > len(packed) or os.fsdecode(name) in found:
            raise broken("an attribute is cut off, or there twice", path)
        found[os.fsdecode(name)] = value
    return found


def _raise_failure(number: int, path: str) -> None:
    # What the guest says of itself, such as ESTALE where something was written meanwhile.
    why = os.strerror(number) if number < 4096 else "it does not say why"
    raise NotCapturable(
        f"the guest cannot read {path or 'what the sandbox wrote'!r}: {why}", what=path, why=why, errno=number
    )


def broken(why: str, path: str) -> SandboxError:
    """Say what is wrong with a stream."""
    return SandboxError(
        f"what the guest sends as its changes is none at {path!r}: {why}", remedy=REMEDY, path=path, step="export"
    )
