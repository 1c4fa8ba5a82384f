"""The files of a memory directory: what a saved machine has of its own, and what it shares with those before it.

Nothing is written twice: files that never change any more are linked from where they are. So each directory is whole,
and any may be removed before the others.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from worldfork.content.share import Cloning
from worldfork.core.errors import NotFound
from worldfork.sandbox.microvm.flatten import flatten
from worldfork.sandbox.microvm.manifest import DiskChain, DiskFile
from worldfork.sandbox.microvm.pages import PAGE_BYTES, Pages, Run, allocated_bytes, write_pages
from worldfork.sandbox.microvm.ram import stored_pages

CHAIN_LIMIT: Final = 8
"""Page files of one memory: each is read once more at every assembly. Also files over the bottom of one disk: each has
a descriptor in every machine."""
_NOT_LINKED: Final = (errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP)


def write_ram(target: Path, parent: Path, earlier: Sequence[str], ram_fd: int, changed: Pages) -> tuple[str, ...]:
    """Write a memory: links to its parent's page files, and one of its own. Blocking.

    It becomes a single file where the chain would get long, or where little of the parent's is left in use.

    Args:
        target: the memory directory.
        parent: the one that the machine was restored from; it may be gone.
        earlier: the page files there.
        ram_fd: the sealed memory that the machine was restored with.
        changed: what it has changed of that.

    Returns:
        The names of the files, the oldest first.

    Raises:
        OSError: it cannot be written.
    """
    names = tuple(f"ram.{number}" for number in range(len(earlier) + 1))
    if len(names) <= CHAIN_LIMIT:
        try:
            below_bytes = 0
            for source, name in zip(earlier, names, strict=False):
                link(parent / source, target / name)
                below_bytes += allocated_bytes(target / name)
            if len(changed.data) <= below_bytes:
                write_pages(target / names[-1], changed)
                return names
        except FileNotFoundError:
            pass  # the memory that QEMU maps has it all
    for name in names:
        (target / name).unlink(missing_ok=True)
    write_pages(target / names[0], whole_pages(ram_fd, changed))
    return names[:1]


def whole_pages(ram_fd: int, changed: Pages) -> Pages:
    """Return a memory with its changes as one generation. Blocking."""
    base = stored_pages(ram_fd)
    runs = _united((*base.runs, *changed.runs))
    size = os.fstat(ram_fd).st_size
    # Only of what the file has: a look at its holes would fill them.
    held = mmap.mmap(-1, max(PAGE_BYTES, sum(count for _, count in runs) * PAGE_BYTES))
    places = _places(runs)
    for pages in (base, changed):
        at = 0
        for first, count in pages.runs:
            length = count * PAGE_BYTES
            to = _place_of(places, first)
            held[to : to + length] = pages.data[at : at + length]
            at += length
    return Pages(size, tuple(runs), memoryview(held)[: sum(count for _, count in runs) * PAGE_BYTES])


def _united(runs: Iterable[Run]) -> list[Run]:
    found: list[Run] = []
    for first, count in sorted(runs):
        if found and first <= found[-1][0] + found[-1][1]:
            start, length = found[-1]
            found[-1] = (start, max(length, first + count - start))
        else:
            found.append((first, count))
    return found


def _places(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Return (first page, offset of its bytes) of each run."""
    places = []
    at = 0
    for first, count in runs:
        places.append((first, at))
        at += count * PAGE_BYTES
    return places


def _place_of(places: Sequence[tuple[int, int]], page: int) -> int:
    first, at = places[bisect.bisect_right(places, page, key=lambda place: place[0]) - 1]
    return at + (page - first) * PAGE_BYTES


def settle(chain: DiskChain, writable: int, target: Path) -> DiskChain:
    """Return a disk with one other file in the place of those that QEMU has written, or of all where they are many.

    QEMU has left them, but could still write them, whoever rules it by now; nobody can write the other. Blocking.

    Args:
        chain: with absolute paths.
        writable: how many of the topmost files QEMU has written.
        target: must not be there.

    Raises:
        Corrupt: one is damaged.
        OSError: one cannot be read, or the other not be written.
    """
    many = sum(file.format == "qcow2" for file in chain)
    replaced = many if many > CHAIN_LIMIT else writable
    if replaced == 1:
        copy(Path(chain[0].path), target)
    else:
        flatten(target, [Path(file.path) for file in chain[:replaced]])
    return (DiskFile(str(target), "qcow2"), *chain[replaced:])


def link_disks(target: Path, chains: Sequence[DiskChain]) -> tuple[DiskChain, ...]:
    """Link the files of a machine's disks into its memory directory, and return them under their names there. Blocking.

    Args:
        target: the memory directory.
        chains: with absolute paths; no file may change any more.

    Raises:
        NotFound: one is gone.
        OSError: one can be neither linked nor copied.
    """
    found = []
    for number, chain in enumerate(chains):
        files = []
        for place, file in enumerate(chain):
            # Counted from the bottom, so that a file keeps its name from one generation to the next.
            name = f"disk{number}.{len(chain) - 1 - place}.{file.format}"
            try:
                link(Path(file.path), target / name)
            except FileNotFoundError:
                raise NotFound(f"the disk {file.path} of the machine is gone", path=file.path) from None
            files.append(DiskFile(name, file.format))
        found.append(tuple(files))
    return tuple(found)


def link(source: Path, target: Path) -> None:
    """Give a file that never changes another name, or copy it where it cannot have one there.

    Raises:
        OSError: neither can be done.
    """
    try:
        os.link(source, target, follow_symlinks=False)
        return
    except OSError as error:
        if error.errno not in _NOT_LINKED:
            raise
    copy(source, target)


def copy(source: Path, target: Path) -> None:
    """Copy a file, with its holes, by sharing its blocks where the file system does that.

    Raises:
        OSError: it cannot be read, or the other not be written.
    """
    reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writer = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            Cloning().copy(reader, writer, os.fstat(reader).st_size, sparse=True)
        finally:
            os.close(writer)
    finally:
        os.close(reader)
