"""Archives: a head and layers as one stream of records, the same bytes for the same content.

::

    H  JSON                  the head, first: whatever the writer says of the whole
    L  JSON                  a layer begins: its digest, its number of entries, the bytes of its files
    E  canonical line        a path of it, in canonical order
    D  offset (u64), bytes   what the file just named holds there; what no D tells of is zeros
    F                        the layer ends
    Z                        the archive ends

Each record is a letter, the length of what follows (u32, little-endian) and that; `content/blocks.py` has what lies
around them. Where the parts of a file begin and end depends on its bytes alone: blocks of 4 KiB of zeros are left out,
and no part crosses a multiple of 1 MiB, however a file system keeps it. A reader makes nothing that was not announced,
and no path of a name that could lead elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from worldfork.content.blocks import BLOCK_BYTES, LARGEST_BYTES, BlockWriter, Sink, Source, corrupt, read_blocks
from worldfork.content.entry import Entry, decode, encode
from worldfork.content.expected import CanonicalOrder, WholeContents, expect_entry
from worldfork.content.failures import naming
from worldfork.content.reached import Reached
from worldfork.core.errors import Corrupt, StoreError

_RECORD = struct.Struct("<cI")
_DATA = struct.Struct("<cIQ")
_OFFSET = struct.Struct("<Q")
_HOLE_BYTES = 4096
_HOLE = bytes(_HOLE_BYTES)
_DIGEST = re.compile("b3:[0-9a-f]{64}")
_PIECE_BYTES = 1 << 20  # no record of a file's bytes crosses a multiple of it

_LONGEST = {b"H": 16 << 20, b"L": 1 << 16, b"D": _OFFSET.size + _PIECE_BYTES, b"F": 0, b"Z": 0}
"""Bytes of what a record holds; those of an entry follow from its path and attributes."""

Content = Iterator[bytes | memoryview | int]
"""A file from its beginning to its end: bytes, or how many zeros there are."""


class LayerHead(NamedTuple):
    """What is known of a layer before its first entry."""

    digest: str
    """Of its manifest."""
    entries: int
    logical_bytes: int
    """The sizes of its files together, one with several names once."""


class ArchiveWriter:
    """Writes an archive. Use it as a context; what `end` was not called for is no archive."""

    def __init__(self, sink: Sink, head: Mapping[str, Any]) -> None:
        self._blocks = BlockWriter(sink)
        self._buffer = bytearray(_PIECE_BYTES)
        self._record(b"H", _json(head))

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.__exit__()

    def layer(self, head: LayerHead, root: Path, entries: Iterable[Entry]) -> None:
        """Write a layer. What is read is compared with what is known of it.

        Args:
            head: what was found when it was sealed.
            root: its tree, which stays as it is meanwhile.
            entries: its manifest.
        Raises:
            Corrupt: a file does not hold what the manifest says, or the manifest is not that of the head; `path`.
            OutOfSpace, StoreError: a file cannot be read; `path` and `errno` are fields.
        """
        from blake3 import blake3

        self._record(b"L", _json(head._asdict()))
        digest = blake3()
        with Reached(root) as reached:
            for entry in entries:
                line = encode(entry)
                digest.update(line)
                self._record(b"E", line)
                if entry.kind == "f" and entry.size_bytes and not entry.link:
                    self._file(reached, entry)
        found = f"b3:{digest.hexdigest()}"
        if found != head.digest:
            raise Corrupt("a manifest is damaged", expected=head.digest, actual=found)
        self._record(b"F", b"")

    def end(self) -> str:
        """Write the end; return the digest over every byte before it, as hex digits."""
        self._record(b"Z", b"")
        return self._blocks.end()

    def _record(self, kind: bytes, payload: bytes) -> None:
        self._blocks.write(_RECORD.pack(kind, len(payload)), payload)

    def _file(self, reached: Reached, entry: Entry) -> None:
        from worldfork.content.hashing import ContentHash, data_at

        size = entry.size_bytes
        with naming(entry.path, "read"):
            fd = reached.open(entry.path)
            try:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode) or info.st_size != size:
                    raise _damaged(entry, f"{size} bytes", f"{info.st_size} bytes")
                content = ContentHash(size)
                may_have_holes = info.st_blocks * 512 < size
                offset = 0
                while offset < size:
                    begin = data_at(fd, offset, size)[0] if may_have_holes else offset
                    begin = begin if begin == size else max(offset, begin - begin % _PIECE_BYTES)
                    content.zeros(begin - offset)
                    offset = begin
                    if offset < size:
                        offset += self._piece(fd, offset, min(size - offset, _PIECE_BYTES), content)
            finally:
                os.close(fd)
        found = content.hexdigest()
        if found != entry.content:
            raise _damaged(entry, entry.content, found)

    def _piece(self, fd: int, offset: int, count: int, content: Any) -> int:
        """Read a piece of a file, and write its runs of blocks that are not all zeros; return its size."""
        # Into the block itself where the whole piece has room in it, as one record: the usual case.
        space = self._blocks.space(_DATA.size + count)
        view = memoryview(self._buffer)[:count] if space is None else space[_DATA.size :]
        done = 0
        while done < count:
            step = os.preadv(fd, [view[done:]], offset + done)
            if step == 0:
                raise StoreError("a file became shorter while it was read", remedy="leave the tree alone meanwhile")
            done += step
        content.update(view)
        holes = [at for at in range(0, count, _HOLE_BYTES) if not view[at] and _is_hole(view[at : at + _HOLE_BYTES])]
        if space is not None:
            if not holes:
                _DATA.pack_into(space, 0, b"D", _OFFSET.size + count, offset)
                self._blocks.take(len(space))
                return count
            view = memoryview(bytes(view))
        begin = 0
        for hole in [*holes, count]:
            if hole > begin:
                self._blocks.write(_DATA.pack(b"D", _OFFSET.size + hole - begin, offset + begin), view[begin:hole])
            begin = hole + _HOLE_BYTES
        return count


class ArrivingLayer:
    """A layer of an archive that is being read: its entries and their content, once, and in order."""

    def __init__(self, records: _Records, head: LayerHead) -> None:
        self._records = records
        self.head = head

    def files(self) -> Iterator[tuple[Entry, Content]]:
        """Yield each entry, and what its file holds: to be read before the next one, if at all.

        None of them has come rightly before the iterator has ended.

        Raises:
            Corrupt: what comes is not what was announced.
        """
        wholes = WholeContents()
        try:
            yield from self._files(wholes)
            wholes.finish()
        finally:
            wholes.close()

    def _files(self, wholes: WholeContents) -> Iterator[tuple[Entry, Content]]:
        from blake3 import blake3

        digest = blake3()
        order = CanonicalOrder()
        count = logical = 0
        while (line := self._records.next_if(b"E")) is not None:
            entry = _entry(line)
            order.expect_next(entry)
            digest.update(line)
            count += 1
            has_content = entry.kind == "f" and not entry.link
            logical += entry.size_bytes if has_content else 0
            if count > self.head.entries or logical > self.head.logical_bytes:
                raise corrupt("more than was announced", list(self.head), [count, logical], path=entry.path)
            content = self._content(entry, wholes) if has_content else iter(())
            yield entry, content
            for _ in content:
                pass
        self._records.expect(b"F")
        found = LayerHead(f"b3:{digest.hexdigest()}", count, logical)
        if found != self.head:
            raise corrupt("a layer is not what was announced", list(self.head), list(found))

    def _content(self, entry: Entry, wholes: WholeContents) -> Content:
        from worldfork.content.hashing import ContentHash

        content: ContentHash | None = None
        at = 0
        while (payload := self._records.next_if(b"D")) is not None:
            if len(payload) <= _OFFSET.size:
                raise corrupt("a part of a file without bytes", "bytes", "none", path=entry.path)
            (offset,) = _OFFSET.unpack_from(payload)
            data = payload[_OFFSET.size :]
            if offset < at or offset + len(data) > entry.size_bytes:
                where = [offset, len(data)]
                raise corrupt("a part of a file lies outside of it", [at, entry.size_bytes], where, path=entry.path)
            if len(data) == entry.size_bytes:  # of a piece at most, so that this is BLAKE3 of it
                wholes.add(entry, data)
                yield data
                return
            content = content or ContentHash(entry.size_bytes)
            if offset > at:
                content.zeros(offset - at)
                yield offset - at
            content.update(data)
            yield data
            at = offset + len(data)
        content = content or ContentHash(entry.size_bytes)
        if entry.size_bytes > at:
            content.zeros(entry.size_bytes - at)
            yield entry.size_bytes - at
        found = content.hexdigest()
        if found != entry.content:
            raise corrupt(f"the content of {entry.path!r}", entry.content, found, path=entry.path)


class ArchiveReader:
    """Reads an archive: the head at once, then its layers; nothing of it is to be trusted before the last has come.

    Raises:
        Corrupt: it is no archive, or damaged.
        FormatUnsupported: a newer version wrote it.
    """

    def __init__(self, source: Source) -> None:
        self._records = _Records(source)
        self.head = _object(self._records.expect(b"H"))
        """What the writer said of the whole; as untrusted as everything else."""

    def layers(self) -> Iterator[ArrivingLayer]:
        """Yield each layer, to be read before the next one, or left out; the iterator ends with the archive.

        Raises:
            Corrupt: it is damaged, or ends too early, or too late.
        """
        while (payload := self._records.next_if(b"L")) is not None:
            layer = ArrivingLayer(self._records, _layer_head(_object(payload)))
            yield layer
            self._records.drop_until_end_of_layer()
        self._records.expect(b"Z")
        self._records.expect_end()

    def close(self) -> None:
        """Read no further."""
        self._records.close()


class _Records:
    """The records of an archive, with the kind of the next one in sight."""

    def __init__(self, source: Source) -> None:
        self._blocks = read_blocks(source)
        self._block = b""
        self._view = memoryview(b"")
        self._at = 0
        self._inside = False

    def _kind(self) -> int:
        """Return the kind of the next record; there is one."""
        if self._at == len(self._block):
            block = next(self._blocks, None)
            if block is None:
                raise corrupt("it ends too early", "a record", "none")
            self._block, self._view, self._at = block, memoryview(block), 0
        return self._block[self._at]

    def next_if(self, kind: bytes) -> memoryview | None:
        if self._kind() != kind[0]:
            return None
        begin = self._at + _RECORD.size
        if begin > len(self._block):
            raise corrupt("a record is cut off", _RECORD.size, len(self._block) - self._at)
        end = begin + _RECORD.unpack_from(self._block, self._at)[1]
        if end > len(self._block):
            raise corrupt("a record is longer than its block", len(self._block) - begin, end - begin)
        if len(self._block) > BLOCK_BYTES and end - self._at != len(self._block):
            raise corrupt("a block that is larger than one has more than one record", len(self._block), end - self._at)
        if end - begin > _LONGEST.get(kind, LARGEST_BYTES):
            raise corrupt("a record is longer than one of its kind", _LONGEST[kind], end - begin)
        self._at = end
        self._inside = kind not in b"FHZ"
        return self._view[begin:end]

    def expect(self, kind: bytes) -> memoryview:
        payload = self.next_if(kind)
        if payload is None:
            raise corrupt("a record is out of place", kind.decode(), repr(bytes([self._kind()])))
        return payload

    def drop_until_end_of_layer(self) -> None:
        while self._inside:
            if self.next_if(b"D") is None and self.next_if(b"E") is None:
                self.expect(b"F")

    def expect_end(self) -> None:
        if self._at != len(self._block) or next(self._blocks, None) is not None:
            raise corrupt("it goes on after its end", "nothing", "a record")

    def close(self) -> None:
        self._blocks.close()


def _is_hole(block: memoryview) -> bool:
    return bytes(block) == _HOLE[: len(block)]


def _entry(line: memoryview) -> Entry:
    try:
        entry = decode(bytes(line))
        expect_entry(entry)
    except (ValueError, TypeError, RecursionError) as error:
        raise corrupt("an entry cannot be read", "an entry", str(error)) from error
    return entry


def _object(payload: memoryview) -> dict[str, Any]:
    try:
        value = json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise corrupt("a head cannot be read", "JSON", str(error)) from error
    if not isinstance(value, dict):
        raise corrupt("a head cannot be read", "an object", type(value).__name__)
    return value


def _layer_head(facts: Mapping[str, Any]) -> LayerHead:
    head = LayerHead(facts.get("digest", ""), facts.get("entries", -1), facts.get("logical_bytes", -1))
    if not is_digest(head.digest) or not all(type(n) is int and 0 <= n < 1 << 63 for n in head[1:]):
        raise corrupt("the head of a layer", "a digest and two numbers", dict(facts))
    return head


def is_digest(text: object) -> bool:
    """Tell whether this is the digest of a layer, in its one spelling."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _damaged(entry: Entry, expected: str, actual: str) -> Corrupt:
    return Corrupt(
        f"{entry.path!r} does not hold what it held when its layer was sealed",
        remedy="worldfork store check tells what else is damaged, and mends it from a copy",
        path=entry.path,
        expected=expected,
        actual=actual,
    )
