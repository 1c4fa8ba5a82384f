"""Empty writable disks over read-only ones, as QEMU's qcow2 files."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from worldfork.core.errors import ConfigError

CLUSTER_BYTES = 64 << 10
"""What one entry of a map stands for; the default of QEMU."""

_MAGIC = b"QFI\xfb"
_VERSION = 3
_CLUSTER_BITS = 16
_HEADER_BYTES = 104
_BACKING_FORMAT = 0xE2792ACA
_BACKING_LIMIT_BYTES = 1023
_FORMATS = ("raw", "qcow2")


def write_overlay(path: Path, size_bytes: int, backing: str, backing_format: str = "raw") -> None:
    """Write a disk that shows another one and takes changes; the other is never written.

    Args:
        path: must not be there.
        size_bytes: of the disk as the guest sees it; a multiple of 512, and at least the other's.
        backing: the other's path: absolute, or relative to the directory of `path`. Empty for a disk of zeros.
        backing_format: "raw" or "qcow2". It is written down, since QEMU would otherwise believe what the guest wrote.

    Raises:
        ConfigError: the size or the path of the other is not possible.
        OSError: the file cannot be made.
    """
    content = header(size_bytes, backing, backing_format)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for at, data in content:
            if os.pwrite(handle, data, at) != len(data):
                raise OSError(f"{path} was written in part only")
        os.ftruncate(handle, length_bytes(size_bytes))
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(handle)


def header(size_bytes: int, backing: str, backing_format: str = "raw") -> list[tuple[int, bytes]]:
    """Return (offset, bytes) of what an empty overlay holds; all else in it is zero.

    The clusters are: the header, the table of reference counts, the one block of these counts, and the first map.
    """
    name = os.fsencode(backing)
    if size_bytes <= 0 or size_bytes % 512 or size_bytes > 1 << 44:
        raise ConfigError(f"a disk cannot have {size_bytes} bytes", remedy="give a multiple of 512, at most 16 TiB")
    if len(name) > _BACKING_LIMIT_BYTES or b"\0" in name:
        raise ConfigError("the path of the disk below is too long", remedy="use a shorter WORLDFORK_HOME")
    if backing_format not in _FORMATS:
        raise ConfigError(f"a disk cannot have the format {backing_format!r}", remedy="use raw or qcow2")
    extensions = b""
    if name:
        word = backing_format.encode()
        extensions += struct.pack(">II", _BACKING_FORMAT, len(word)) + word + bytes(-len(word) % 8)
    extensions += bytes(8)
    start = _HEADER_BYTES + len(extensions) if name else 0
    maps = _maps(size_bytes)
    fields = struct.pack(
        ">4sIQIIQIIQQIIQQQQII",
        _MAGIC,
        _VERSION,
        start,
        len(name),
        _CLUSTER_BITS,
        size_bytes,
        0,  # no encryption
        maps,
        3 * CLUSTER_BYTES,  # the first map
        CLUSTER_BYTES,  # the table of reference counts
        1,
        0,  # no snapshots of QEMU's own
        0,
        0,  # features: none
        0,
        0,
        4,  # counts of 16 bits
        _HEADER_BYTES,
    )
    used = 3 + _clusters(maps * 8)
    counts = struct.pack(">H", 1) * used
    return [
        (0, fields + extensions + name),
        (CLUSTER_BYTES, struct.pack(">Q", 2 * CLUSTER_BYTES)),
        (2 * CLUSTER_BYTES, counts),
    ]


def _clusters(count_bytes: int) -> int:
    return -(-count_bytes // CLUSTER_BYTES)


def _maps(size_bytes: int) -> int:
    return -(-_clusters(size_bytes) // (CLUSTER_BYTES // 8))


def length_bytes(size_bytes: int) -> int:
    """Return how long the file of an empty overlay is; most of it are holes."""
    return (3 + _clusters(_maps(size_bytes) * 8)) * CLUSTER_BYTES
