"""Reading files piece by piece."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from worldfork.content.pieces import read_pieces

MIB = 1 << 20


def pieces(path: Path) -> list[bytes]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return list(read_pieces(fd))
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 4095, MIB - 1, MIB, MIB + 1, 2 * MIB])
def test_a_file_is_read_to_its_end(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    found = pieces(tmp_path / "file")
    assert b"".join(found) == content
    assert all(0 < len(piece) <= MIB for piece in found)


def test_a_file_that_does_not_say_its_size_is_read() -> None:
    assert b"".join(pieces(Path("/proc/self/status"))).startswith(b"Name:")


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"small")
    tracemalloc.start()
    try:
        pieces(tmp_path / "file")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 64 << 10
