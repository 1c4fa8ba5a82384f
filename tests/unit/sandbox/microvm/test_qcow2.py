"""Empty overlays, read back as the format's specification says."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from worldfork.core.errors import ConfigError
from worldfork.sandbox.microvm.qcow2 import CLUSTER_BYTES, write_overlay


def numbers(content: bytes, at: int, form: str) -> int:
    return struct.unpack_from(form, content, at)[0]


@pytest.mark.parametrize("size", [512, 1 << 20, 64 << 30, 1 << 44])
def test_an_overlay_shows_the_disk_below_and_holds_nothing(tmp_path: Path, size: int) -> None:
    path = tmp_path / "disk"
    write_overlay(path, size, "../below.raw")
    content = path.read_bytes()
    assert content[:4] == b"QFI\xfb"
    assert numbers(content, 4, ">I") == 3
    assert numbers(content, 24, ">Q") == size
    start, length = numbers(content, 8, ">Q"), numbers(content, 16, ">I")
    assert content[start : start + length] == b"../below.raw"
    kind, count = struct.unpack_from(">II", content, 104)
    assert (kind, content[112 : 112 + count]) == (0xE2792ACA, b"raw")
    maps, first = numbers(content, 36, ">I"), numbers(content, 40, ">Q")
    assert maps * (CLUSTER_BYTES // 8) * CLUSTER_BYTES >= size
    assert content[first : first + maps * 8] == bytes(maps * 8)
    assert len(content) == -(-(first + maps * 8) // CLUSTER_BYTES) * CLUSTER_BYTES


@pytest.mark.parametrize("size", [1 << 20, 1 << 44])
def test_every_cluster_is_counted_once(tmp_path: Path, size: int) -> None:
    path = tmp_path / "disk"
    write_overlay(path, size, "")
    content = path.read_bytes()
    assert numbers(content, 8, ">Q") == 0
    table = numbers(content, 48, ">Q")
    block = numbers(content, table, ">Q")
    counts = struct.unpack_from(f">{CLUSTER_BYTES // 2}H", content, block)
    clusters = len(content) // CLUSTER_BYTES
    assert counts == (1,) * clusters + (0,) * (len(counts) - clusters)


@pytest.mark.parametrize(
    ("size", "backing", "form"), [(0, "", "raw"), (100, "", "raw"), (512, "x" * 1024, "raw"), (512, "x", "vmdk")]
)
def test_what_cannot_be_a_disk_is_refused(tmp_path: Path, size: int, backing: str, form: str) -> None:
    with pytest.raises(ConfigError):
        write_overlay(tmp_path / "disk", size, backing, form)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write_overlay(tmp_path / "disk", 512, "")
    assert (tmp_path / "disk").read_bytes() == b"mine"
