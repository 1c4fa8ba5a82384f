"""One qcow2 file in the place of several that lie over each other.

The files were written by a QEMU whose guest may have broken into it: each number in them is looked at.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from worldfork.core.errors import Corrupt
from worldfork.sandbox.microvm.blank import DISK_BYTES
from worldfork.sandbox.microvm.qcow2 import CLUSTER_BYTES, header, length_bytes

_MAGIC: Final = b"QFI\xfb"
_FIXED: Final = struct.Struct(">4sIQIIQIIQQIIQQQQII")
_ENTRIES: Final = CLUSTER_BYTES // 8
_OFFSET: Final = 0x00FF_FFFF_FFFF_FE00
_COMPRESSED: Final = 1 << 62
_COPIED: Final = 1 << 63
"""Set where a cluster has one owner, so that QEMU may write into it."""
_ZERO: Final = 1
_COUNTS: Final = CLUSTER_BYTES // 2
"""That one block of reference counts has."""
_DIRTY: Final = 1
"""The one incompatible feature that a file which was not closed may have: its reference counts are not up to date."""

_NOTHING: Final = -1


class _Row:
    """Where the clusters of one table are, in a fixed room however many there are."""

    def __init__(self) -> None:
        self.offsets = array("q", [_NOTHING]) * _ENTRIES
        """In its file; 0 where a cluster reads as zeros."""
        self.files = array("H", [0]) * _ENTRIES


def flatten(target: Path, files: Sequence[Path]) -> None:
    """Write a file that shows what others show over each other, without what lies below all of them. Blocking.

    Args:
        target: must not be there.
        files: the topmost first; of one size, and nobody writes them.

    Raises:
        Corrupt: one is no such file.
        OSError: it cannot be read or written.
    """
    opened: list[int] = []
    try:
        rows: dict[int, _Row] = {}
        sizes = set()
        for number, path in enumerate(files):
            opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            reader = _Reader(path, opened[-1])
            sizes.add(reader.size_bytes)
            for at, index, offset in reader.clusters():
                if at not in rows:
                    rows[at] = _Row()
                row = rows[at]
                if row.offsets[index] == _NOTHING:
                    row.offsets[index], row.files[index] = offset, number
        if len(sizes) != 1:
            raise Corrupt("the files of a disk differ in size", expected="one size", actual=sorted(sizes))
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            _write(out, sizes.pop(), rows, opened)
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(out)
    finally:
        for fd in opened:
            os.close(fd)


class _Reader:
    """One file."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._file_bytes = os.fstat(fd).st_size
        raw = os.pread(fd, _FIXED.size, 0)
        if len(raw) != _FIXED.size:
            raise self.damaged("it is too short")
        fields = _FIXED.unpack(raw)
        magic, version, _, _, bits, self.size_bytes, encryption, self._maps, self._first = fields[:9]
        known = (magic, version, 1 << bits if bits < 32 else 0, encryption) == (_MAGIC, 3, CLUSTER_BYTES, 0)
        if not known or fields[13] & ~_DIRTY or self.size_bytes > DISK_BYTES:
            raise self.damaged("it is no file of ours")
        if self._maps > -(-self.size_bytes // (CLUSTER_BYTES * _ENTRIES)) + 1:
            raise self.damaged("its map is too long")

    def clusters(self) -> Iterator[tuple[int, int, int]]:
        """Yield (number of a table, place in it, offset in the file) of each cluster; an offset of 0 for zeros."""
        last = -(-self.size_bytes // CLUSTER_BYTES)
        # A part, or a table, that is shown over and over would make a small file a large one.
        left = -(-self._file_bytes // CLUSTER_BYTES)
        for number, entry in enumerate(self._table(self._first, self._maps)):
            place = entry & _OFFSET
            if not place:
                continue
            left -= 1
            for index, word in enumerate(self._table(place, _ENTRIES)):
                offset = word & _OFFSET
                if word & _COMPRESSED:
                    raise self.damaged("a part of it is compressed")
                if not offset and not word & _ZERO:
                    continue
                if number * _ENTRIES + index >= last or offset % CLUSTER_BYTES or offset >= self._file_bytes:
                    raise self.damaged("a part of it lies outside of it")
                left -= not word & _ZERO
                if left < 0:
                    raise self.damaged("it shows more than it holds")
                yield number, index, 0 if word & _ZERO else offset

    def _table(self, at: int, count: int) -> tuple[int, ...]:
        raw = os.pread(self._fd, count * 8, at)
        if at % CLUSTER_BYTES or len(raw) != count * 8:
            raise self.damaged("a table lies outside of it")
        return struct.unpack(f">{count}Q", raw)

    def damaged(self, why: str) -> Corrupt:
        return Corrupt(f"the disk {self._path} is damaged: {why}", expected="a qcow2 file", actual=why)


def _write(out: int, size_bytes: int, rows: dict[int, _Row], opened: Sequence[int]) -> None:
    # As in an empty one: the header, the table of reference counts, one block of counts, and the first map.
    (_, fields), *_ = header(size_bytes, "")
    first_map, first_table = 3, length_bytes(size_bytes) // CLUSTER_BYTES
    free = first_table + len(rows)
    for place, number in enumerate(sorted(rows), first_table):
        words = []
        for offset, file in zip(rows[number].offsets, rows[number].files, strict=True):
            if offset > 0:
                words.append(free * CLUSTER_BYTES | _COPIED)
                _copy(opened[file], offset, out, free * CLUSTER_BYTES)
                free += 1
            else:
                words.append(0 if offset == _NOTHING else _ZERO)
        _pwrite(out, struct.pack(f">{_ENTRIES}Q", *words), place * CLUSTER_BYTES)
        _pwrite(out, struct.pack(">Q", place * CLUSTER_BYTES | _COPIED), first_map * CLUSTER_BYTES + number * 8)
    blocks = 1
    while blocks * _COUNTS < free + blocks - 1:
        blocks += 1
    places = [2, *range(free, free + blocks - 1)]
    free += blocks - 1
    _pwrite(out, fields, 0)
    _pwrite(out, struct.pack(f">{blocks}Q", *(place * CLUSTER_BYTES for place in places)), CLUSTER_BYTES)
    for number, place in enumerate(places):
        count = min(_COUNTS, free - number * _COUNTS)
        _pwrite(out, struct.pack(">H", 1) * count, place * CLUSTER_BYTES)
    os.ftruncate(out, free * CLUSTER_BYTES)


def _copy(reader: int, at: int, out: int, to: int) -> None:
    # The last cluster of a file may be cut off: what lacks are zeros.
    done = 0
    while done < CLUSTER_BYTES:
        count = os.copy_file_range(reader, out, CLUSTER_BYTES - done, at + done, to + done)
        if not count:
            return
        done += count


def _pwrite(out: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(out, view, at)
        view, at = view[done:], at + done
