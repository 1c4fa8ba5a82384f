"""What an entry that comes from elsewhere must look like before anything is made of it."""

from __future__ import annotations

import os

from worldfork.content.blocks import corrupt
from worldfork.content.entry import Entry, sort_key

_KINDS = frozenset("fdlcbpsw")
_HEX = frozenset("0123456789abcdef")
_LARGEST = 1 << 63


def expect_entry(entry: Entry) -> None:
    """Check each field of an entry, whoever wrote it.

    Raises:
        ValueError: it can be no path of a tree.
    """
    for text in (entry.path, entry.kind, entry.content, entry.target, entry.link, entry.redirect):
        if type(text) is not str or "\0" in text:
            raise ValueError(f"{text!r} is no text of an entry")
        os.fsencode(text)  # refuses what no file system could have given
    for number in (entry.mode, entry.uid, entry.gid, entry.size_bytes, *entry.device):
        if type(number) is not int or not 0 <= number < _LARGEST:
            raise ValueError(f"{number!r} is no number of an entry")
    if type(entry.mtime_ns) is not int or not -_LARGEST <= entry.mtime_ns < _LARGEST or entry.mode > 0o7777:
        raise ValueError("a time or a mode is out of range")
    if type(entry.opaque) is not bool:
        raise ValueError(f"{entry.opaque!r} is neither true nor false")
    if entry.kind not in _KINDS or len(entry.kind) != 1:
        raise ValueError(f"{entry.kind!r} is no kind")
    _expect_path(entry.path)
    if entry.link:
        _expect_path(entry.link)
    _expect_fit(entry)


def _expect_path(path: str) -> None:
    if path and not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise ValueError(f"{path!r} is no path below a root")


def _expect_fit(entry: Entry) -> None:
    """Refuse what the kind has no use for: there is one way to say a thing."""
    kind = entry.kind
    hashed = len(entry.content) == 64 and not set(entry.content) - _HEX
    wrong = (
        hashed != (kind == "f")
        or (entry.content and kind != "f")
        or (entry.size_bytes and kind != "f")
        or bool(entry.target) != (kind == "l")
        or (entry.device != (0, 0) and kind not in "cb")
        or (kind == "c" and entry.device == (0, 0))
        or ((entry.opaque or entry.redirect or not entry.path) and kind != "d")
        or (entry.link and kind in "dw")
        or (kind == "w" and entry != Entry(entry.path, "w"))
        or list(entry.xattrs) != sorted(dict(entry.xattrs).items())
        or any(not name or "\0" in name for name, _ in entry.xattrs)
    )
    if wrong:
        raise ValueError(f"{entry.path!r} is no {kind!r}")


class CanonicalOrder:
    """Sees to it that entries come in their one order, each once and in a directory that came before."""

    def __init__(self) -> None:
        self._last: list[bytes] | None = None
        self._directories: list[str] = []

    def expect_next(self, entry: Entry) -> None:
        """Take the next entry.

        Raises:
            Corrupt: it cannot come here.
        """
        key = sort_key(entry.path)
        if (self._last is None) != (not key) or (self._last is not None and key <= self._last):
            raise corrupt("an entry is out of order", "the next path", entry.path, path=entry.path)
        if entry.link and sort_key(entry.link) >= key:
            raise corrupt("a link to what comes later", "an earlier path", entry.link, path=entry.path)
        self._last = key
        if key:
            above = entry.path.rpartition("/")[0]
            while self._directories and self._directories[-1] != above:
                self._directories.pop()
            if not self._directories:
                raise corrupt("an entry lies in no directory", "a directory", above, path=entry.path)
        if entry.kind == "d":
            self._directories.append(entry.path)
