"""The kernel's ELF comes out of every boot image that a distribution packs, and a damaged one is told."""

from __future__ import annotations

import bz2
import lzma
import random
import struct
import sys
import zlib
from collections.abc import Callable

import pytest

from worldfork.core.errors import ConfigError
from worldfork.sandbox.microvm.kernel import extract_kernel

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ELF = b"\x7fELF" + random.Random(1).randbytes(5000) + b"abc" * 3000 + bytes(4000)


def boot_image(payload: bytes, size: int = len(ELF)) -> bytes:
    """Return an x86 boot image with three sectors of setup code and the payload 64 bytes behind them."""
    image = bytearray((3 + 1) * 512)
    image[0x1F1] = 3
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", image, 0x206, 0x020F)
    struct.pack_into("<II", image, 0x248, 64, len(payload) + 4)
    return bytes(image) + bytes(64) + payload + struct.pack("<I", size) + b"what follows"


def lz4(data: bytes) -> bytes:
    """Pack by taking the longest copy from the last 300 bytes, so that literals, copies and overlaps all occur."""
    out = bytearray()
    at = start = 0
    while at < len(data) - 12:
        best = max(((length(data, at - back, at), back) for back in range(1, min(at, 300) + 1)), default=(0, 0))
        if best[0] < 4:
            at += 1
            continue
        out += sequence(data[start:at], best)
        at += best[0]
        start = at
    out += sequence(data[start:], None)
    return b"\x02\x21\x4c\x18" + struct.pack("<I", len(out)) + bytes(out)


def length(data: bytes, one: int, other: int) -> int:
    count = 0
    while other + count < len(data) - 5 and data[one + count] == data[other + count]:
        count += 1
    return count


def sequence(literals: bytes, copy: tuple[int, int] | None) -> bytes:
    high, more = _count(len(literals))
    low, rest = _count(copy[0] - 4) if copy else (0, b"")
    tail = struct.pack("<H", copy[1]) + rest if copy else b""
    return bytes([high << 4 | low]) + more + literals + tail


def _count(number: int) -> tuple[int, bytes]:
    if number < 15:
        return number, b""
    return 15, b"\xff" * ((number - 15) // 255) + bytes([(number - 15) % 255])


def gzipped(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("pack", [lz4, gzipped, lzma.compress, bz2.compress, zstd.compress])
def test_every_packing_gives_the_elf_file(pack: Callable[[bytes], bytes]) -> None:
    elf = ELF[:1500] + ELF[-5000:]
    assert extract_kernel(boot_image(pack(elf), len(elf))) == elf


def test_lz4_may_come_in_several_blocks() -> None:
    packed = lz4(ELF[:1000]) + lz4(ELF[1000:1800])[4:]
    assert extract_kernel(boot_image(packed, 1800)) == ELF[:1800]


def test_an_elf_file_is_taken_as_it_is() -> None:
    assert extract_kernel(ELF) == ELF


@pytest.mark.parametrize(
    "image",
    [
        b"",
        b"MZ" + bytes(4000),
        boot_image(b"unknown packing"),
        boot_image(lz4(ELF[:1500]), 1600),
        boot_image(lz4(ELF[:1500]), 1400),
        boot_image(lz4(ELF[:1500]))[:900],
        boot_image(lz4(b"no elf" * 300), 1800),
        boot_image(b"\x02\x21\x4c\x18" + struct.pack("<I", 4) + b"\x10a\x09\x00", 100),
        boot_image(b"\x02\x21\x4c\x18" + struct.pack("<I", 1 << 30) + b"\x10a", 100),
        boot_image(b"\x1f\x8b" + bytes(40)),
        boot_image(zstd.compress(ELF)[:-30]),
        boot_image(lzma.compress(ELF), 0xFFFFFFFF),
    ],
)
def test_what_is_no_kernel_is_told(image: bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        extract_kernel(image)
    assert caught.value.remedy


def test_no_cut_or_flipped_byte_gives_anything_but_an_error_or_a_whole_kernel() -> None:
    elf = ELF[:300] + bytes(500)
    packed = lz4(elf)
    dice = random.Random(2)
    for _ in range(300):
        damaged = bytearray(packed)
        damaged[dice.randrange(4, len(damaged))] ^= 1 << dice.randrange(8)
        try:
            found = extract_kernel(boot_image(bytes(damaged), len(elf)))
        except ConfigError:
            continue
        assert len(found) == len(elf)
