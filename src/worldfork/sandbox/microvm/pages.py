"""Files that hold some pages of a guest's memory: all that are not zero, or those that changed since.

One page of header, then a table of runs, then the pages themselves, on a boundary of a page::

    magic, memory size in bytes, runs stored, runs of zeros, digest of all that follows
    table: (first page, number of pages), the stored runs and then those of zeros, each list ascending
    the stored pages, in the order of the table

A page that turned zero takes place in the table alone.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import blake3

from worldfork.core.errors import Corrupt, FormatUnsupported, NotFound
from worldfork.core.whole_file import whole_file

PAGE_BYTES = 4096
Run = tuple[int, int]
"""First page, number of pages."""

_MAGIC = b"WFPAGES"
_FORMAT = 1
_HEADER = struct.Struct("<7sBQQQ32s")
_RUN = struct.Struct("<II")
_ZERO = bytes(PAGE_BYTES)
_RUNS_LIMIT = 1 << 24
_REMEDY = "remove this snapshot; it cannot be restored"


@dataclass(frozen=True)
class Pages:
    """Some pages of a guest's memory."""

    ram_bytes: int
    """Of the whole memory."""
    runs: tuple[Run, ...]
    data: memoryview
    """The pages of all runs, one after another."""


@dataclass(frozen=True)
class _Head:
    digest: bytes
    stored: list[Run]
    zeros: list[Run]
    table: bytes
    data_at: int


def write_pages(path: Path, pages: Pages) -> None:
    """Write a page file; it is there whole or not at all. Its owner alone may read it.

    Raises:
        OSError: it cannot be written.
    """
    stored, zeros, pieces = _without_zeros(pages)
    table = b"".join(_RUN.pack(*run) for run in (*stored, *zeros))
    hasher = blake3.blake3(table)
    for piece in pieces:
        hasher.update(piece)
    head = _HEADER.pack(_MAGIC, _FORMAT, pages.ram_bytes, len(stored), len(zeros), hasher.digest())
    with whole_file(path) as part:
        with part.open("wb", buffering=0) as out:
            _write_all(out.fileno(), head.ljust(PAGE_BYTES, b"\0") + table.ljust(_padded(len(table)), b"\0"))
            for piece in pieces:
                _write_all(out.fileno(), piece)
            os.fsync(out.fileno())
    # What a guest held in its memory is no business of other users.
    path.chmod(0o400)


def lay_pages(path: Path, memory: mmap.mmap) -> None:
    """Write the pages of a file into a guest's memory, and check them against the file's digest.

    Raises:
        NotFound: there is no such file.
        Corrupt: it is damaged, or is that of a guest with another size of memory.
        FormatUnsupported: it was written by another version.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(f"the saved memory {path} is gone", remedy=_REMEDY, path=str(path)) from None
    view = memoryview(memory)
    try:
        head = _read_head(path, handle, len(memory))
        hasher = blake3.blake3(head.table)
        at = head.data_at
        for first, count in head.stored:
            with view[first * PAGE_BYTES : (first + count) * PAGE_BYTES] as place:
                _read_into(path, handle, place, at)
                hasher.update(place)
                at += len(place)
        for first, count in head.zeros:
            memory[first * PAGE_BYTES : (first + count) * PAGE_BYTES] = bytes(count * PAGE_BYTES)
        if hasher.digest() != head.digest:
            raise _damaged(path, "its digest", head.digest.hex(), hasher.digest().hex())
    finally:
        view.release()
        os.close(handle)


def allocated_bytes(path: Path) -> int:
    """Return what a file takes on its disk."""
    return path.stat().st_blocks * 512


def split_zeros(view: memoryview) -> Iterator[tuple[int, int, bool]]:
    """Yield (first page, number of pages, whether they are zero) of a stretch of whole pages."""
    start = 0
    was_zero = False
    total = len(view) // PAGE_BYTES
    for number in range(total):
        # The first bytes decide nearly always, without a look at the rest.
        at = number * PAGE_BYTES
        is_zero = view[at] == 0 and view[at : at + PAGE_BYTES] == _ZERO
        if number == 0:
            was_zero = is_zero
        elif is_zero != was_zero:
            yield start, number - start, was_zero
            start, was_zero = number, is_zero
    if total:
        yield start, total - start, was_zero


def _without_zeros(pages: Pages) -> tuple[list[Run], list[Run], list[memoryview]]:
    stored: list[Run] = []
    zeros: list[Run] = []
    pieces: list[memoryview] = []
    at = 0
    for first, count in pages.runs:
        view = pages.data[at : at + count * PAGE_BYTES]
        at += len(view)
        for start, length, is_zero in split_zeros(view):
            if is_zero:
                zeros.append((first + start, length))
            else:
                stored.append((first + start, length))
                pieces.append(view[start * PAGE_BYTES : (start + length) * PAGE_BYTES])
    return stored, zeros, pieces


def _read_head(path: Path, handle: int, ram_bytes: int) -> _Head:
    raw = os.pread(handle, _HEADER.size, 0)
    if len(raw) != _HEADER.size or not raw.startswith(_MAGIC):
        raise _damaged(path, "its first bytes", _MAGIC.hex(), raw[: len(_MAGIC)].hex())
    _, version, claimed, stored, zeros, digest = _HEADER.unpack(raw)
    if version != _FORMAT:
        raise FormatUnsupported(f"{path} has format {version}", remedy="use the version of Worldfork that wrote it")
    if claimed != ram_bytes:
        raise _damaged(path, "the size of its memory", ram_bytes, claimed)
    if stored + zeros > _RUNS_LIMIT:
        raise _damaged(path, "its number of runs", f"at most {_RUNS_LIMIT}", stored + zeros)
    size = (stored + zeros) * _RUN.size
    table = os.pread(handle, size, PAGE_BYTES)
    if len(table) != size:
        raise _damaged(path, "the length of its table", size, len(table))
    runs = list(_RUN.iter_unpack(table))
    for part in (runs[:stored], runs[stored:]):
        end = 0
        for first, count in part:
            if count == 0 or first < end or (first + count) * PAGE_BYTES > ram_bytes:
                raise _damaged(path, "a run of its table", "one within the memory", (first, count))
            end = first + count
    return _Head(digest, runs[:stored], runs[stored:], table, PAGE_BYTES + _padded(size))


def _padded(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def _read_into(path: Path, handle: int, place: memoryview, at: int) -> None:
    done = 0
    while done < len(place):
        got = os.preadv(handle, [place[done:]], at + done)
        if got == 0:
            raise _damaged(path, "its length", f"more than {at + done}", at + done)
        done += got


def _write_all(handle: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _damaged(path: Path, what: str, expected: object, actual: object) -> Corrupt:
    return Corrupt(
        f"the saved memory {path} is damaged: {what}",
        remedy=_REMEDY,
        expected=expected,
        actual=actual,
        path=str(path),
    )
