"""The kernel of a guest, taken out of the compressed file that a distribution ships."""

from __future__ import annotations

import bz2
import lzma
import struct
import sys
import zlib
from collections.abc import Callable

from worldfork.core.errors import ConfigError

_SETUP_SECTORS = 0x1F1
_MAGIC = 0x202
_VERSION = 0x206
_PAYLOAD = 0x248
_FIRST_WITH_PAYLOAD = 0x0208
_ELF = b"\x7fELF"
_LIMIT_BYTES = 512 << 20
_LEGACY_LZ4 = b"\x02\x21\x4c\x18"
_REMEDY = "give the vmlinuz of a Debian or Ubuntu kernel package for x86-64"


def extract_kernel(image: bytes) -> bytes:
    """Return the ELF file within an x86 boot image; an ELF file is returned as it is.

    QEMU starts an ELF kernel straight away, where the boot image would first unpack itself in the guest.

    Raises:
        ConfigError: it is no such image, is damaged, or is compressed in a way that is not known here.
    """
    if image.startswith(_ELF):
        return image
    if len(image) < 0x260 or image[_MAGIC : _MAGIC + 4] != b"HdrS":
        raise ConfigError("this file is no x86 kernel", remedy=_REMEDY)
    if struct.unpack_from("<H", image, _VERSION)[0] < _FIRST_WITH_PAYLOAD:
        raise ConfigError("this kernel is too old to tell where its payload is", remedy=_REMEDY)
    sectors = image[_SETUP_SECTORS] or 4
    offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    start = (sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if len(payload) != length or length < 8:
        raise ConfigError("this kernel file is cut short", remedy="install its package again")
    size = struct.unpack_from("<I", payload, length - 4)[0]
    if size > _LIMIT_BYTES:
        raise ConfigError(f"this kernel claims to be {size} bytes long", remedy=_REMEDY)
    try:
        elf = _unpacker(payload)(payload[:-4], size)
    except (OSError, EOFError, ValueError, IndexError, zlib.error, lzma.LZMAError, struct.error) as error:
        raise ConfigError(f"this kernel file is damaged: {error}", remedy="install its package again") from error
    if len(elf) != size or not elf.startswith(_ELF):
        raise ConfigError("this kernel file is damaged", remedy="install its package again")
    return elf


def _unpacker(payload: bytes) -> Callable[[bytes, int], bytes]:
    for magic, unpack in (
        (_LEGACY_LZ4, _lz4),
        (b"\x1f\x8b", _gzip),
        (b"\xfd7zXZ\0", _xz),
        (b"\x5d\0\0", _xz),
        (b"\x28\xb5\x2f\xfd", _zstd),
        (b"BZh", _bzip2),
    ):
        if payload.startswith(magic):
            return unpack
    raise ConfigError(f"this kernel is compressed in an unknown way ({payload[:6].hex()})", remedy=_REMEDY)


def _gzip(data: bytes, size: int) -> bytes:
    return zlib.decompressobj(31).decompress(data, size + 1)


def _xz(data: bytes, size: int) -> bytes:
    return lzma.LZMADecompressor().decompress(data, size + 1)


def _bzip2(data: bytes, size: int) -> bytes:
    return bz2.BZ2Decompressor().decompress(data, size + 1)


def _zstd(data: bytes, size: int) -> bytes:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    try:
        return zstd.ZstdDecompressor().decompress(data, size + 1)
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from error


def _lz4(data: bytes, size: int) -> bytes:
    """Unpack the legacy frame: a magic, then blocks that each unpack to at most 8 MiB by themselves."""
    out = bytearray()
    at = len(_LEGACY_LZ4)
    while at + 4 <= len(data) and len(out) < size:
        length = int.from_bytes(data[at : at + 4], "little")
        at += 4
        if length > len(data) - at:
            raise ValueError("a block is cut short")
        _lz4_block(data, at, at + length, out, size)
        at += length
    return bytes(out)


def _lz4_block(data: bytes, at: int, end: int, out: bytearray, limit: int) -> None:
    """Unpack one block: sequences of literals and of copies of what is already there."""
    first = len(out)
    while at < end:
        token = data[at]
        at += 1
        count = token >> 4
        if count == 15:
            while True:
                more = data[at]
                at += 1
                count += more
                if more != 255:
                    break
        if at + count > end or len(out) + count > limit:
            raise ValueError("literals run over the end")
        out += data[at : at + count]
        at += count
        if at >= end:
            return
        back = data[at] | data[at + 1] << 8
        at += 2
        count = (token & 15) + 4
        if count == 19:
            while True:
                more = data[at]
                at += 1
                count += more
                if more != 255:
                    break
        here = len(out)
        start = here - back
        if back == 0 or start < first or here + count > limit:
            raise ValueError("a copy reaches out of its block")
        if back >= count:
            out += out[start : start + count]
        else:
            piece = bytes(out[start:])
            out += (piece * (count // back + 1))[:count]
