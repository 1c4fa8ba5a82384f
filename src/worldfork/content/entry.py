"""One path of a tree in its canonical form: what a digest covers, what an archive carries, what a diff compares."""

from __future__ import annotations

import base64
import json
import os
from typing import Any, NamedTuple

# Of every path of every layer: to set an encoder up takes as long as to use it.
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Entry(NamedTuple):
    """One path. Equal entries are the same file for whoever looks from inside a sandbox."""

    path: str
    """From the root of the tree, without a leading slash, the root itself empty. Bytes that are not UTF-8 are kept as
    lone surrogates, as `os.fsdecode` has them."""
    kind: str
    """f file, d directory, l link, c or b device, p FIFO, s socket, w whiteout: a deletion, in a layer alone."""
    mode: int = 0
    """Permission bits, 0 to 0o7777."""
    uid: int = 0
    """As seen inside, as is `gid`."""
    gid: int = 0
    mtime_ns: int = 0
    """Nanoseconds since the epoch."""
    size_bytes: int = 0
    """Of a file's content."""
    content: str = ""
    """Of a file: BLAKE3 of its bytes as 64 hex digits; empty where nobody has read them."""
    target: str = ""
    """Of a link."""
    device: tuple[int, int] = (0, 0)
    """Of a device: major and minor number."""
    link: str = ""
    """The first path, in canonical order, of a group of hard links; empty on that first one."""
    xattrs: tuple[tuple[str, bytes], ...] = ()
    """Sorted by name, without the overlay's own."""
    opaque: bool = False
    """A directory of a layer that hides what lies below it."""
    redirect: str = ""
    """A directory of a layer that goes on below in another place: its overlay's own words."""


def encode(entry: Entry) -> bytes:
    """Return an entry as its canonical line, which ends with a newline and has no other."""
    fields: list[Any] = [*entry]
    fields[11] = [[name, base64.b64encode(value).decode("ascii")] for name, value in entry.xattrs]
    return _to_json(fields).encode("ascii") + b"\n"


def decode(line: bytes) -> Entry:
    """Read what `encode` wrote.

    Raises:
        ValueError: it is no such line.
    """
    fields = json.loads(line.decode("ascii"))
    if not isinstance(fields, list) or len(fields) != len(Entry._fields):
        raise ValueError("not an entry")
    try:
        major, minor = fields[9]
        if type(major) is not int or type(minor) is not int:
            raise ValueError("not an entry")
        fields[9] = (major, minor)
        fields[11] = tuple((name, base64.b64decode(value, validate=True)) for name, value in fields[11])
    except TypeError as error:
        raise ValueError("not an entry") from error
    return Entry(*fields)


def sort_key(path: str) -> list[bytes]:
    """Return what puts paths into canonical order: a directory before what is in it, names by their bytes."""
    return os.fsencode(path).split(b"/") if path else []
