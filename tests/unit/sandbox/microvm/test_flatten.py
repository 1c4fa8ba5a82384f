"""Several disks over each other as one: what is seen is the same, and the file is one that QEMU may write."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from worldfork.core.errors import Corrupt
from worldfork.sandbox.microvm.flatten import flatten
from worldfork.sandbox.microvm.qcow2 import CLUSTER_BYTES, write_overlay

SIZE = 1 << 40
ENTRIES = CLUSTER_BYTES // 8
FAR = 3 * ENTRIES + 17
MAPS_AT = 3 * CLUSTER_BYTES


def cluster(byte: int) -> bytes:
    return bytes([byte]) * CLUSTER_BYTES


def make(path: Path, content: Mapping[int, bytes | None], size: int = SIZE) -> Path:
    """Write a disk with some clusters; None is one of zeros. Its reference counts are left as of an empty one."""
    write_overlay(path, size, "")
    with path.open("r+b") as file:
        tables: dict[int, int] = {}
        for number, data in content.items():
            row, index = divmod(number, ENTRIES)
            if row not in tables:
                tables[row] = file.seek(0, os.SEEK_END)
                file.write(bytes(CLUSTER_BYTES))
                file.seek(MAPS_AT + row * 8)
                file.write(struct.pack(">Q", tables[row] | 1 << 63))
            word = 1
            if data is not None:
                word = file.seek(0, os.SEEK_END) | 1 << 63
                file.write(data)
            file.seek(tables[row] + index * 8)
            file.write(struct.pack(">Q", word))
    return path


def seen(path: Path, *, whole: bool = True) -> dict[int, bytes | None]:
    """What a disk has, by its own tables, and where not `whole` only where; each cluster is counted and used once."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert len(content) % CLUSTER_BYTES == 0
    maps, first = struct.unpack_from(">IQ", content, 36)
    table, tables = struct.unpack_from(">QI", content, 48)
    used = [0, *range(table // CLUSTER_BYTES, table // CLUSTER_BYTES + tables)]
    used += range(first // CLUSTER_BYTES, -(-(first + maps * 8) // CLUSTER_BYTES))
    found: dict[int, bytes | None] = {}
    for row, entry in enumerate(struct.unpack_from(f">{maps}Q", content, first)):
        if not entry:
            continue
        assert entry >> 63
        place = entry & (1 << 56) - 1
        used.append(place // CLUSTER_BYTES)
        for index, word in enumerate(struct.unpack_from(f">{ENTRIES}Q", content, place)):
            if word == 1:
                found[row * ENTRIES + index] = None
            elif word:
                assert word >> 63
                at = word & (1 << 56) - 1
                used.append(at // CLUSTER_BYTES)
                found[row * ENTRIES + index] = content[at : at + CLUSTER_BYTES] if whole else b""
    counts: list[int] = []
    for place in struct.unpack_from(f">{ENTRIES}Q", content, table):
        if place:
            used.append(place // CLUSTER_BYTES)
            counts += struct.unpack_from(f">{CLUSTER_BYTES // 2}H", content, place)
    assert sorted(used) == list(range(len(content) // CLUSTER_BYTES))
    assert [number for number, count in enumerate(counts) if count] == sorted(used)
    assert set(counts) <= {0, 1}
    return found


def test_what_lies_above_hides_what_lies_below(tmp_path: Path) -> None:
    top = make(tmp_path / "top", {0: cluster(1), 5: None, FAR: cluster(2)})
    middle = make(tmp_path / "middle", {0: cluster(3), 5: cluster(4), 7: None})
    bottom = make(tmp_path / "bottom", {7: cluster(5), 9: cluster(6), FAR: cluster(7)})
    flatten(tmp_path / "one", [top, middle, bottom])
    assert seen(tmp_path / "one") == {0: cluster(1), 5: None, 7: None, 9: cluster(6), FAR: cluster(2)}
    flatten(tmp_path / "again", [tmp_path / "one"])
    assert (tmp_path / "again").read_bytes() == (tmp_path / "one").read_bytes()


def test_empty_disks_make_an_empty_disk(tmp_path: Path) -> None:
    flatten(tmp_path / "one", [make(tmp_path / "a", {}), make(tmp_path / "b", {})])
    assert seen(tmp_path / "one") == {}
    write_overlay(tmp_path / "empty", SIZE, "")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "empty").read_bytes()


def test_a_cluster_that_is_cut_off_ends_with_zeros(tmp_path: Path) -> None:
    disk = make(tmp_path / "disk", {3: cluster(1)})
    os.truncate(disk, disk.stat().st_size - 1000)
    flatten(tmp_path / "one", [disk])
    assert seen(tmp_path / "one") == {3: cluster(1)[:-1000] + bytes(1000)}


def test_many_clusters_need_more_than_one_block_of_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = make(tmp_path / "disk", {})
    with disk.open("r+b") as file:
        place = file.seek(0, os.SEEK_END)
        for row in range(5):
            file.seek(MAPS_AT + row * 8)
            file.write(struct.pack(">Q", place + row * CLUSTER_BYTES))
            file.seek(place + row * CLUSTER_BYTES)
            file.write(struct.pack(">Q", place) * ENTRIES)
        file.truncate(place + 5 * (ENTRIES + 1) * CLUSTER_BYTES)  # it has to be as long as what it shows
    # Only where they are counts here, and they are 2.5 GiB.
    monkeypatch.setattr("worldfork.sandbox.microvm.flatten._copy", lambda *_: None)
    flatten(tmp_path / "one", [disk])
    assert list(seen(tmp_path / "one", whole=False)) == list(range(5 * ENTRIES))


def patched(disk: Path, at: int, form: str, value: int) -> Path:
    with disk.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack(form, value))
    return disk


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (0, ">I", 0),
        (4, ">I", 2),
        (20, ">I", 9),
        (20, ">I", 1 << 31),
        (24, ">Q", 1 << 60),
        (32, ">I", 1),
        (36, ">I", 1 << 31),
        (40, ">Q", 1 << 50),
        (40, ">Q", 3),
        (72, ">Q", 16),
        (MAPS_AT, ">Q", 1 << 50),
        (4 * CLUSTER_BYTES, ">Q", 1 << 62),
        (4 * CLUSTER_BYTES, ">Q", 1 << 50),
        (4 * CLUSTER_BYTES, ">Q", CLUSTER_BYTES + 512),
    ],
)
def test_a_file_with_a_wrong_number_is_damaged(tmp_path: Path, at: int, form: str, value: int) -> None:
    disk = patched(make(tmp_path / "disk", {0: cluster(1)}), at, form, value)
    with pytest.raises(Corrupt):
        flatten(tmp_path / "one", [disk])
    assert not (tmp_path / "one").exists()


def test_what_lies_behind_the_end_of_the_disk_is_damage(tmp_path: Path) -> None:
    disk = make(tmp_path / "disk", {16: cluster(1)}, 16 * CLUSTER_BYTES)
    with pytest.raises(Corrupt):
        flatten(tmp_path / "one", [disk])


def test_disks_of_two_sizes_are_none_over_each_other(tmp_path: Path) -> None:
    with pytest.raises(Corrupt, match="differ in size"):
        flatten(tmp_path / "one", [make(tmp_path / "a", {}), make(tmp_path / "b", {}, SIZE // 2)])


def test_an_empty_file_is_no_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").touch()
    with pytest.raises(Corrupt):
        flatten(tmp_path / "one", [tmp_path / "disk"])


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        flatten(tmp_path / "one", [make(tmp_path / "disk", {})])
    assert (tmp_path / "one").read_bytes() == b"mine"
