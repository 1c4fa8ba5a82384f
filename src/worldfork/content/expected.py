"""What an entry that comes from elsewhere must look like before anything is made of it."""

from __future__ import annotations

import os
import re
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from worldfork.content.blocks import corrupt
from worldfork.content.entry import Entry, sort_key
from worldfork.content.stack import is_redirect

_TYPES = tuple(map(type, Entry("", "f")))
_HASH = re.compile("[0-9a-f]{64}")
_PLAIN = ("", (0, 0), "", (), False, "")  # what most entries have from `target` on
_OWNERS = (1 << 32) - 1  # the last one stands for none
_MAJORS, _MINORS = 1 << 12, 1 << 20  # what the kernel has
_BATCH_BYTES = 1 << 20
_BATCH_FILES = 200
_BATCHES = 4  # of one block each, that wait at a time: memory is bounded by them
_LARGEST = 1 << 63


def expect_entry(entry: Entry) -> None:
    """Check each field of an entry, whoever wrote it.

    Raises:
        ValueError: it can be no path of a tree.
    """
    if tuple(map(type, entry)) != _TYPES:
        raise ValueError("a field has the wrong type")
    path, kind, mode, uid, gid, mtime_ns, size_bytes, content = entry[:8]
    _expect_path(path)
    in_range = (
        0 <= mode <= 0o7777
        and 0 <= uid < _OWNERS
        and 0 <= gid < _OWNERS
        and 0 <= size_bytes < _LARGEST
        and -_LARGEST <= mtime_ns < _LARGEST
    )
    if not in_range:
        raise ValueError(f"{path!r} has a number that is out of range")
    if kind == "f":
        if not path or not _HASH.fullmatch(content):
            raise ValueError(f"{path!r} is no file")
    elif content or size_bytes or (kind != "d" and not path):
        raise ValueError(f"{path!r} is no {kind!r}, or holds what only a file has")
    if entry[8:] != _PLAIN or kind not in ("f", "d"):
        _expect_rest(entry)


def _expect_path(path: str) -> None:
    if "\0" in path:
        raise ValueError(f"{path!r} is no path")
    framed = f"/{path}/"
    if path and ("//" in framed or "/./" in framed or "/../" in framed):
        raise ValueError(f"{path!r} is no path below a root")
    if not path.isascii():
        os.fsencode(path)  # refuses what no file system could have given


def _expect_rest(entry: Entry) -> None:
    """Check what most entries lack; there is one way to say each thing, and no kind has what it has no use for."""
    kind = entry.kind
    _expect_path(entry.link)
    for text in (entry.target, entry.redirect):
        if "\0" in text:
            raise ValueError(f"{text!r} holds a NUL")
        os.fsencode(text)
    if not all(type(name) is str for name, _ in entry.xattrs):
        raise ValueError(f"{entry.path!r} has an attribute of the wrong type")
    if not (0 <= entry.device[0] < _MAJORS and 0 <= entry.device[1] < _MINORS):
        raise ValueError(f"{entry.path!r} is a device that there is not: {entry.device}")
    for name, _ in entry.xattrs:
        os.fsencode(name)
    wrong = (
        kind not in ("f", "d", "l", "c", "b", "p", "s", "w")
        or bool(entry.target) != (kind == "l")
        or (entry.device != (0, 0) and kind not in ("c", "b"))
        or (kind == "c" and entry.device == (0, 0))  # as a whiteout is kept
        or ((entry.opaque or entry.redirect) and kind != "d")
        or (entry.redirect and not is_redirect(entry.redirect))
        or (entry.link and kind in ("d", "w"))
        or (kind == "w" and entry != Entry(entry.path, "w"))
        or list(entry.xattrs) != sorted(dict(entry.xattrs).items())
        or any(not name or "\0" in name for name, _ in entry.xattrs)
    )
    if wrong:
        raise ValueError(f"{entry.path!r} is no {kind!r}")


class CanonicalOrder:
    """Sees to it that entries come in their one order, each once and in a directory that came before."""

    def __init__(self) -> None:
        self._directories: list[tuple[str, bytes]] = []
        """Those that may still get entries, each with the last name in it."""
        self._moved: set[tuple[str, str]] = set()
        """Where directories go on in the layers below: a directory was moved to one place only."""

    def expect_next(self, entry: Entry) -> None:
        """Take the next entry.

        Raises:
            Corrupt: it cannot come here.
        """
        path = entry.path
        above, _, last = path.rpartition("/")
        if path:
            name = os.fsencode(last)
            while self._directories and self._directories[-1][0] != above:
                self._directories.pop()
            if not self._directories:
                raise corrupt("an entry lies in no directory, or comes too late", "the next path", path, path=path)
            if self._directories[-1][1] >= name:
                raise corrupt("an entry is out of order", "the next path", path, path=path)
            self._directories[-1] = (above, name)
        elif self._directories or entry.kind != "d":
            raise corrupt("the root is out of order", "the first entry", path, path=path)
        if entry.link and sort_key(entry.link) >= sort_key(path):
            raise corrupt("a link to what comes later", "an earlier path", entry.link, path=path)
        if entry.kind == "d":
            self._directories.append((path, b""))
        if entry.redirect:
            place = ("" if entry.redirect.startswith("/") else above, entry.redirect)
            if place in self._moved:
                raise corrupt("two directories go on in one place", "one", entry.redirect, path=path)
            self._moved.add(place)


class WholeContents:
    """Compares the contents of small files with their hashes, in a thread beside whoever writes them."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "worldfork-hash")
        self._batch: list[tuple[Entry, memoryview]] = []
        self._size_bytes = 0
        self._waiting: deque[Future[None]] = deque()

    def add(self, entry: Entry, content: memoryview) -> None:
        """Take a whole file.

        Raises:
            Corrupt: an earlier one was not what its entry says.
        """
        # A view keeps its whole block, and a block of zeros is next to nothing in an archive.
        if self._batch and self._batch[-1][1].obj is not content.obj:
            self._submit()
        self._batch.append((entry, content))
        self._size_bytes += len(content)
        if self._size_bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_FILES:
            self._submit()

    def finish(self) -> None:
        """Wait until all have been compared.

        Raises:
            Corrupt: one was not what its entry says.
        """
        self._submit()
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Compare no more."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self) -> None:
        if not self._batch:
            return
        self._waiting.append(self._pool.submit(_compare, self._batch))
        self._batch, self._size_bytes = [], 0
        while len(self._waiting) > _BATCHES:
            self._waiting.popleft().result()


def _compare(batch: list[tuple[Entry, memoryview]]) -> None:
    from blake3 import blake3

    for entry, content in batch:
        found = blake3(content).hexdigest()
        if found != entry.content:
            raise corrupt(f"the content of {entry.path!r}", entry.content, found, path=entry.path)
