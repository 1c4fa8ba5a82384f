"""Manifests: written, read back, and refused when they are not what was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from blake3 import blake3

from worldfork.content.compression import zstd
from worldfork.content.entry import encode
from worldfork.content.layer import Found, walk
from worldfork.content.manifest import digest_of, read_manifest, write_manifest
from worldfork.core.errors import Corrupt


@pytest.fixture
def found(tmp_path: Path) -> list[Found]:
    root = tmp_path / "tree"
    root.mkdir()
    for number in range(2000):
        (root / f"file-{number}").write_bytes(b"x" * number)
    os.link(root / "file-1999", root / "again")
    (root / "line\nend").touch()
    (root / "\udcff").touch()
    return list(walk(root, "trusted"))


def test_what_is_written_is_read_back(tmp_path: Path, found: list[Found]) -> None:
    place = tmp_path / "manifest"
    sealed = write_manifest(found, place)
    assert list(read_manifest(place, sealed.digest)) == [each.entry for each in found]
    assert digest_of(found) == sealed
    assert sealed.digest == "b3:" + blake3(b"".join(encode(each.entry) for each in found)).hexdigest()
    assert sealed.entries == 2004
    assert sealed.logical_bytes == sum(range(2000))
    assert sealed.stored_bytes == sum(each.stored_bytes for each in found) > sealed.logical_bytes


def test_nothing_is_written_over(tmp_path: Path, found: list[Found]) -> None:
    place = tmp_path / "manifest"
    place.write_text("old")
    with pytest.raises(FileExistsError):
        write_manifest(found, place)
    assert place.read_text() == "old"


def test_a_manifest_that_was_cut_anywhere_is_corrupt(tmp_path: Path, found: list[Found]) -> None:
    place = tmp_path / "manifest"
    sealed = write_manifest(found[:8], place)
    whole = place.read_bytes()
    for length in range(len(whole)):
        place.write_bytes(whole[:length])
        with pytest.raises(Corrupt):
            list(read_manifest(place, sealed.digest))


def test_a_manifest_with_a_wrong_byte_is_corrupt(tmp_path: Path, found: list[Found]) -> None:
    place = tmp_path / "manifest"
    sealed = write_manifest(found[:20], place)
    whole = bytearray(place.read_bytes())
    unnoticed = 0
    for position in range(len(whole)):
        whole[position] ^= 0x10
        place.write_bytes(whole)
        whole[position] ^= 0x10
        try:
            assert list(read_manifest(place, sealed.digest)) == [each.entry for each in found[:20]]
            unnoticed += 1  # a bit of zstd's own header that says nothing about the content
        except Corrupt:
            pass
    assert unnoticed <= len(whole) // 100


def test_another_manifest_is_corrupt_and_both_digests_are_told(tmp_path: Path, found: list[Found]) -> None:
    sealed = write_manifest(found, tmp_path / "one")
    other = write_manifest(found[:-1], tmp_path / "other")
    with pytest.raises(Corrupt) as caught:
        list(read_manifest(tmp_path / "other", sealed.digest))
    assert (caught.value.expected, caught.value.actual) == (sealed.digest, other.digest)
    (tmp_path / "lines").write_bytes(zstd.compress(b"[1]\n"))
    with pytest.raises(Corrupt):
        list(read_manifest(tmp_path / "lines"))
