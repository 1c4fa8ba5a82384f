"""One qcow2 file in the place of several that lie over each other.

The files were written by a QEMU whose guest may have broken into it: each number in them is looked at.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from worldfork.core.errors import Corrupt
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
_CLUSTERS_LIMIT: Final = 1 << 26
_DIRTY: Final = 1
"""The one incompatible feature that a file which was not closed may have: its reference counts are not up to date."""

Source = tuple[int, int]
"""A descriptor, and where in it a cluster is; an offset of 0 where it reads as zeros."""


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
        sources: dict[int, Source] = {}
        sizes = set()
        for path in files:
            opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            reader = _Reader(path, opened[-1])
            sizes.add(reader.size_bytes)
            for cluster, offset in reader.clusters():
                sources.setdefault(cluster, (opened[-1], offset))
            if len(sources) > _CLUSTERS_LIMIT:
                raise reader.damaged("it has too many clusters")
        if len(sizes) != 1:
            raise Corrupt("the files of a disk differ in size", expected="one size", actual=sorted(sizes))
        out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            _write(out, sizes.pop(), sources)
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
        if not known or fields[13] & ~_DIRTY or self.size_bytes > 1 << 44:
            raise self.damaged("it is no file of ours")
        if self._maps > -(-self.size_bytes // (CLUSTER_BYTES * _ENTRIES)) + 1:
            raise self.damaged("its map is too long")

    def clusters(self) -> Iterator[tuple[int, int]]:
        """Yield (number in the disk, offset in the file) of each cluster that this file has; 0 for one of zeros."""
        last = -(-self.size_bytes // CLUSTER_BYTES)
        # A part that is shown over and over would make a small file a large one.
        left = -(-self._file_bytes // CLUSTER_BYTES)
        for number, entry in enumerate(self._table(self._first, self._maps)):
            place = entry & _OFFSET
            if not place:
                continue
            for index, word in enumerate(self._table(place, _ENTRIES)):
                offset = word & _OFFSET
                if word & _COMPRESSED:
                    raise self.damaged("a part of it is compressed")
                if not offset and not word & _ZERO:
                    continue
                cluster = number * _ENTRIES + index
                if cluster >= last or offset % CLUSTER_BYTES or offset >= self._file_bytes:
                    raise self.damaged("a part of it lies outside of it")
                left -= not word & _ZERO
                if left < 0:
                    raise self.damaged("it shows more than it holds")
                yield cluster, 0 if word & _ZERO else offset

    def _table(self, at: int, count: int) -> tuple[int, ...]:
        raw = os.pread(self._fd, count * 8, at)
        if at % CLUSTER_BYTES or len(raw) != count * 8:
            raise self.damaged("a table lies outside of it")
        return struct.unpack(f">{count}Q", raw)

    def damaged(self, why: str) -> Corrupt:
        return Corrupt(f"the disk {self._path} is damaged: {why}", expected="a qcow2 file", actual=why)


def _write(out: int, size_bytes: int, sources: dict[int, Source]) -> None:
    # As in an empty one: the header, the table of reference counts, one block of counts, and the first map.
    (_, fields), *_ = header(size_bytes, "")
    first_map, free = 3, length_bytes(size_bytes) // CLUSTER_BYTES
    tables: dict[int, int] = {}
    for number in sorted({cluster // _ENTRIES for cluster in sources}):
        tables[number] = free
        free += 1
    words: dict[int, int] = {}
    for cluster in sorted(sources):
        fd, offset = sources[cluster]
        if not offset:
            words[cluster] = _ZERO
            continue
        words[cluster] = free * CLUSTER_BYTES | _COPIED
        _copy(fd, offset, out, free * CLUSTER_BYTES)
        free += 1
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
    for number, place in tables.items():
        row = [words.get(cluster, 0) for cluster in range(number * _ENTRIES, (number + 1) * _ENTRIES)]
        _pwrite(out, struct.pack(f">{_ENTRIES}Q", *row), place * CLUSTER_BYTES)
        _pwrite(out, struct.pack(">Q", place * CLUSTER_BYTES | _COPIED), first_map * CLUSTER_BYTES + number * 8)
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
