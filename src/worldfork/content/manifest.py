"""The manifest of a tree: its entries line by line, and the digest over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from worldfork.content.entry import Entry, decode, encode
from worldfork.content.layer import Found
from worldfork.core.errors import Corrupt

_LEVEL = 3
_BATCH_BYTES = 1 << 17


class Sealed(NamedTuple):
    """What a manifest amounts to."""

    digest: str
    """"b3:" and BLAKE3 of the canonical lines as 64 hex digits."""
    entries: int
    logical_bytes: int
    """The sizes of all files together, one with several names once."""
    stored_bytes: int
    """What they take on disk, directories and all."""


def write_manifest(found: Iterable[Found], path: Path) -> Sealed:
    """Write the manifest of a tree into a new file, and bring it to disk.

    Args:
        found: the entries in canonical order.
        path: must not exist.
    Raises:
        OSError: it cannot be written.
    """
    from worldfork.content.compression import zstd

    with open(path, "xb") as file:
        with zstd.ZstdFile(file, "wb", level=_LEVEL) as compressed:
            sealed = _summed(found, compressed.write)
        file.flush()
        os.fsync(file.fileno())
    return sealed


def digest_of(found: Iterable[Found]) -> Sealed:
    """Return what the manifest of a tree amounts to, without writing it."""
    return _summed(found, lambda lines: None)


def _summed(found: Iterable[Found], write: Callable[[bytes], object]) -> Sealed:
    from blake3 import blake3

    digest = blake3()
    entries = logical = stored = 0
    lines: list[bytes] = []
    waiting = 0
    for entry, stored_bytes in found:
        line = encode(entry)
        lines.append(line)
        waiting += len(line)
        entries += 1
        stored += stored_bytes
        if not entry.link:
            logical += entry.size_bytes
        if waiting >= _BATCH_BYTES:
            digest.update(b"".join(lines))
            write(b"".join(lines))
            lines, waiting = [], 0
    digest.update(b"".join(lines))
    write(b"".join(lines))
    return Sealed(f"b3:{digest.hexdigest()}", entries, logical, stored)


def read_manifest(path: Path, digest: str | None = None) -> Iterator[Entry]:
    """Read what `write_manifest` wrote.

    Args:
        path: the manifest.
        digest: what the lines must amount to, told when the last one has been read; None if that does not matter.
    Raises:
        Corrupt: it is no manifest, ends early, or is not the one of this digest.
        OSError: it cannot be read.
    """
    from blake3 import blake3

    from worldfork.content.compression import zstd

    found = blake3()
    with zstd.ZstdFile(path, "rb") as lines:
        try:
            for line in lines:
                found.update(line)
                yield decode(line)
        except (zstd.ZstdError, EOFError, ValueError) as error:
            raise Corrupt(f"{path} is damaged: {error}", expected="a manifest", actual=str(error)) from error
    actual = f"b3:{found.hexdigest()}"
    if digest is not None and actual != digest:
        raise Corrupt(f"{path} is not the manifest of {digest}", expected=digest, actual=actual)
