"""Content hashes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from worldfork.content import hashing
from worldfork.content.hashing import ContentHash, hash_file

MIB = 1 << 20
GIB = 1 << 30


def hash_of(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        info = os.fstat(fd)
        return hash_file(fd, info.st_size, info.st_blocks * 512 < info.st_size)
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 4096, MIB - 1, MIB, MIB + 1, 3 * MIB + 7])
def test_up_to_a_gibibyte_it_is_blake3_of_the_bytes(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    assert hash_of(tmp_path / "file") == blake3(data).hexdigest()


def test_holes_are_zeros_and_are_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(5 * MIB)
        file.seek(2 * MIB)
        file.write(b"x" * 100_000)
        file.truncate(7 * MIB + 5)
    assert (tmp_path / "sparse").stat().st_blocks * 512 < MIB
    data = (tmp_path / "sparse").read_bytes()
    assert hash_of(tmp_path / "sparse") == blake3(data).hexdigest()


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        for size in (4, 2 * MIB):
            with pytest.raises(OSError, match="shorter"):
                hash_file(fd, size, False)
    finally:
        os.close(fd)


@given(st.lists(st.one_of(st.binary(min_size=1, max_size=40), st.integers(1, 100)), max_size=12))
def test_above_a_limit_it_depends_on_the_bytes_alone(pieces: list[bytes | int]) -> None:
    data = b"".join(bytes(piece) if isinstance(piece, int) else piece for piece in pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "WHOLE_BYTES", 0)
        patch.setattr(hashing, "_BLOCK_BYTES", 16)
        hashing._block_of_zeros.cache_clear()
        by_pieces, by_bytes, at_once = (ContentHash(len(data)) for _ in range(3))
        for piece in pieces:
            by_pieces.zeros(piece) if isinstance(piece, int) else by_pieces.update(piece)
        for value in data:
            by_bytes.update(bytes([value]))
        at_once.update(data)
        found = at_once.hexdigest()
        assert by_pieces.hexdigest() == by_bytes.hexdigest() == found
        changed = ContentHash(len(data) + 1)
        changed.update(data + b"\0")
        assert changed.hexdigest() != found
    hashing._block_of_zeros.cache_clear()


def test_a_tebibyte_of_holes_takes_no_time(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as file:
        try:
            file.truncate(1 << 40)
            file.seek((1 << 39) + 12345)
        except OSError:
            pytest.skip("this file system has no files of a tebibyte")
        file.write(b"here")
    before = os.times()
    first = hash_of(tmp_path / "huge")
    after = os.times()
    assert after.user + after.system - before.user - before.system < 2
    with open(tmp_path / "huge", "r+b") as file:
        file.seek((1 << 39) + 12345)
        file.write(b"gone")
    assert hash_of(tmp_path / "huge") != first


def test_the_rule_for_large_files_in_plain_words() -> None:
    blocks = GIB // (16 * MIB)
    content = ContentHash(GIB + 5)
    content.zeros(GIB)
    content.update(b"hello")
    zeros = blake3(bytes(16 * MIB)).digest()
    expected = blake3(blocks.to_bytes(8, "little") + zeros + (1).to_bytes(8, "little") + blake3(b"hello").digest())
    assert content.hexdigest() == expected.hexdigest()
