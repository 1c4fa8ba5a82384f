"""Archives: the same bytes for the same content, and nothing but what was written comes out of one."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from blake3 import blake3
from tests.archives import (
    HEAD,
    MIB,
    archive_of,
    data,
    entries_of,
    entry,
    extract,
    file,
    forged,
    forged_layer,
    head_of,
    make_tree,
    read_through,
    record,
)

from worldfork.content import blocks
from worldfork.content.archive import ArchiveReader, ArchiveWriter
from worldfork.content.blocks import BlockWriter
from worldfork.content.compression import zstd
from worldfork.content.entry import Entry
from worldfork.core.errors import ConfigError, Corrupt, FormatUnsupported, StoreError, WorldforkError

ROOT = entry("", "d")


def hash_of(content: bytes) -> str:
    return str(blake3(content).hexdigest())


class TestWhatTravels:
    def test_a_tree_comes_out_as_it_went_in(self, tmp_path: Path) -> None:
        make_tree(tmp_path / "tree", large=True)
        out = extract(archive_of(tmp_path / "tree"), tmp_path / "out")
        assert entries_of(out / "0") == entries_of(tmp_path / "tree")
        assert os.stat(out / "0" / "sparse").st_blocks < 200
        assert os.stat(out / "0" / "a" / "file").st_ino == os.stat(out / "0" / "a" / "deep" / "twin").st_ino

    def test_the_same_content_has_the_same_bytes_however_it_lies_on_disk(self, tmp_path: Path) -> None:
        make_tree(tmp_path / "one", large=True)
        archive = archive_of(tmp_path / "one")
        again = extract(archive, tmp_path / "out") / "0"
        assert os.stat(again / "a" / "zeros").st_blocks < os.stat(tmp_path / "one" / "a" / "zeros").st_blocks
        assert archive_of(again) == archive
        assert archive_of(tmp_path / "one") == archive

    def test_many_layers_and_some_left_out(self, tmp_path: Path) -> None:
        for name in ("one", "two", "three"):
            make_tree(tmp_path / name)
            (tmp_path / name / "name").write_text(name)
        archive = archive_of(tmp_path / "one", tmp_path / "two", tmp_path / "three")
        reader = ArchiveReader(io.BytesIO(archive))
        assert reader.head == HEAD
        found = []
        for number, layer in enumerate(reader.layers()):
            assert layer.head == head_of(tmp_path / ("one", "two", "three")[number])
            if number == 1:
                continue
            for each, content in layer.files():
                if each.path == "name":
                    found.append(b"".join(bytes(part) for part in content if not isinstance(part, int)))
                if number == 2 and each.path == "a":
                    break
        assert found == [b"one"]

    def test_both_ends_may_be_pipes(self, tmp_path: Path) -> None:
        make_tree(tmp_path / "tree")
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(reading)
            with open(writing, "wb", buffering=0) as out, ArchiveWriter(out, HEAD) as archive:
                archive.layer(head_of(tmp_path / "tree"), tmp_path / "tree", entries_of(tmp_path / "tree"))
                archive.end()
            os._exit(0)
        os.close(writing)
        with open(reading, "rb", buffering=0) as source:
            (layer,) = ArchiveReader(source).layers()
        assert layer.head == head_of(tmp_path / "tree")
        assert os.wait()[1] == 0

    @pytest.mark.root
    def test_whiteouts_devices_opaque_and_redirects(self, tmp_path: Path) -> None:
        tree = tmp_path / "tree"
        make_tree(tree)
        os.mknod(tree / "gone", 0o020000, 0)
        os.mknod(tree / "device", 0o020600, os.makedev(1, 3))
        os.chown(tree / "a" / "file", 1000, 70_000)
        os.setxattr(tree / "a", "trusted.overlay.opaque", b"y")
        os.setxattr(tree / "a" / "deep", "trusted.overlay.redirect", b"/elsewhere")
        archive = archive_of(tree, form="trusted")
        out = extract(archive, tmp_path / "out", "trusted") / "0"
        assert entries_of(out, "trusted") == entries_of(tree, "trusted")
        assert {each.kind for each in entries_of(out, "trusted")} == set("fdlpswc")
        with pytest.raises(ConfigError) as caught:
            extract(archive, tmp_path / "user", "user")
        assert caught.value.fields["path"] == "a/deep"


class TestWhatIsChangedOnTheWayOut:
    def test_another_content_names_the_path(self, tmp_path: Path) -> None:
        make_tree(tmp_path / "tree")
        entries, head = entries_of(tmp_path / "tree"), head_of(tmp_path / "tree")
        (tmp_path / "tree" / "a-").write_bytes(b"sorts between A and A/")
        with ArchiveWriter(io.BytesIO(), HEAD) as archive, pytest.raises(Corrupt) as caught:
            archive.layer(head, tmp_path / "tree", entries)
        assert caught.value.fields["path"] == "a-"
        assert caught.value.expected != caught.value.actual

    @pytest.mark.parametrize("change", ["longer", "shorter", "gone", "link", "directory", "pipe"])
    def test_another_kind_or_size(self, tmp_path: Path, change: str) -> None:
        make_tree(tmp_path / "tree")
        entries, head = entries_of(tmp_path / "tree"), head_of(tmp_path / "tree")
        path = tmp_path / "tree" / "a-"
        if change in ("longer", "shorter"):
            path.write_bytes(b"x" * (100 if change == "longer" else 3))
        else:
            path.unlink()
            if change == "link":
                path.symlink_to("a/file")
            if change == "directory":
                path.mkdir()
            if change == "pipe":
                os.mkfifo(path)
        with ArchiveWriter(io.BytesIO(), HEAD) as archive, pytest.raises(StoreError) as caught:
            archive.layer(head, tmp_path / "tree", entries)
        assert caught.value.fields["path"] == "a-"

    def test_a_directory_that_became_a_link(self, tmp_path: Path) -> None:
        make_tree(tmp_path / "tree")
        make_tree(tmp_path / "other")
        entries, head = entries_of(tmp_path / "tree"), head_of(tmp_path / "tree")
        (tmp_path / "tree" / "a").rename(tmp_path / "away")
        (tmp_path / "tree" / "a").symlink_to(tmp_path / "other" / "a")
        with ArchiveWriter(io.BytesIO(), HEAD) as archive, pytest.raises(StoreError) as caught:
            archive.layer(head, tmp_path / "tree", entries)
        assert caught.value.fields["path"].startswith("a/")

    def test_another_manifest(self, tmp_path: Path) -> None:
        make_tree(tmp_path / "tree")
        entries = [each for each in entries_of(tmp_path / "tree") if each.path != "pipe"]
        with ArchiveWriter(io.BytesIO(), HEAD) as archive, pytest.raises(Corrupt):
            archive.layer(head_of(tmp_path / "tree"), tmp_path / "tree", entries)

    def test_a_tree_deeper_than_open_files_allow(self, tmp_path: Path) -> None:
        tree = tmp_path / "tree"
        tree.mkdir()
        here = os.open(tree, os.O_RDONLY)
        for number in range(300):
            os.mkdir("d" * 20, dir_fd=here)
            below = os.open("d" * 20, os.O_RDONLY, dir_fd=here)
            for name in ("a", "z"):  # before and after what is below
                with open(os.open(name, os.O_WRONLY | os.O_CREAT, dir_fd=here), "wb") as out:
                    out.write(f"{number}{name}".encode())
            os.close(here)
            here = below
        os.close(here)
        archive = archive_of(tree)
        out = extract(archive, tmp_path / "out") / "0"
        assert head_of(out) == head_of(tree)


class TestDamage:
    @pytest.fixture
    def archive(self, tmp_path: Path) -> bytes:
        make_tree(tmp_path / "tree")
        return archive_of(tmp_path / "tree")

    def test_cut_off_at_any_byte(self, archive: bytes) -> None:
        read_through(archive)
        for length in [*range(0, len(archive) - 200, 7), *range(len(archive) - 200, len(archive))]:
            with pytest.raises(Corrupt):
                read_through(archive[:length])

    def test_more_after_the_end(self, archive: bytes) -> None:
        with pytest.raises(Corrupt):
            read_through(archive + b"\0")

    def test_any_byte_changed(self, archive: bytes) -> None:
        random.seed(5)
        for place in [*range(60), *range(60, len(archive) - 60, 3), *range(len(archive) - 60, len(archive))]:
            changed = bytearray(archive)
            changed[place] ^= 1 << random.randrange(8)
            with pytest.raises(Corrupt):
                read_through(bytes(changed))

    def test_a_newer_version_is_told_apart(self, archive: bytes) -> None:
        with pytest.raises(FormatUnsupported) as caught:
            read_through(archive[:12] + struct.pack("<HH", 2, 2 ^ 0xFFFF) + archive[16:])
        assert caught.value.fields["actual"] == 2

    @pytest.mark.parametrize("content", [b"", b"x", b"\x1f\x8b" + bytes(100), b"PK\3\4" * 30, bytes(1000)])
    def test_what_is_no_archive(self, content: bytes) -> None:
        with pytest.raises(Corrupt):
            read_through(content)


HOSTILE = {
    "dot dot": [ROOT, *file("..", b"x")],
    "dot dot inside": [ROOT, entry("a", "d"), *file("a/../b", b"x")],
    "a dot": [ROOT, *file(".", b"x")],
    "absolute": [ROOT, *file("/etc/passwd", b"x")],
    "empty name": [ROOT, entry("a", "d"), *file("a//b", b"x")],
    "trailing slash": [ROOT, entry("a/", "d")],
    "a NUL": [ROOT, *file("a\0b", b"x")],
    "below a link": [ROOT, entry("a", "l", target="/etc"), *file("a/passwd", b"x")],
    "below a file": [ROOT, *file("a", b"x"), *file("a/b", b"x")],
    "below nothing": [ROOT, *file("a/b", b"x")],
    "twice": [ROOT, *file("a", b"x"), *file("a", b"y")],
    "twice, as a directory": [ROOT, entry("a", "l", target="/etc"), entry("a", "d")],
    "out of order": [ROOT, *file("b", b"x"), *file("a", b"x")],
    "a directory again": [ROOT, entry("a", "d"), *file("b", b"x"), *file("a/c", b"x")],
    "no root": [*file("a", b"x")],
    "two roots": [ROOT, ROOT],
    "a file as root": [entry("", "f")],
    "a link as root": [entry("", "l", target="/etc")],
    "no kind": [ROOT, entry("a", "x")],
    "two kinds": [ROOT, entry("a", "fd")],
    "a whiteout with a mode": [ROOT, record("E", b'["a","w",493,0,0,0,0,"","",[0,0],"",[],false,""]\n')],
    "a device that is a whiteout": [ROOT, entry("a", "c")],
    "a link to what comes later": [ROOT, entry("a", "f", link="b"), *file("b", b"x")],
    "a link to itself": [ROOT, entry("a", "f", link="a")],
    "a link outside": [ROOT, entry("a", "f", link="../../etc/passwd")],
    "an absolute link": [ROOT, entry("a", "f", link="/etc/passwd")],
    "a link with content": [ROOT, *file("a", b"x"), entry("b", "f", link="a"), data(0, b"x")],
    "content of a directory": [ROOT, data(0, b"x")],
    "content past the end": [ROOT, entry("a", size_bytes=1, content=hash_of(b"xy")), data(0, b"xy")],
    "content far past the end": [ROOT, entry("a", size_bytes=1, content="0" * 64), data(1 << 62, b"x")],
    "content backwards": [ROOT, entry("a", size_bytes=2, content=hash_of(b"xy")), data(1, b"x"), data(0, b"y")],
    "content over content": [ROOT, entry("a", size_bytes=3, content=hash_of(b"xyz")), data(0, b"xy"), data(1, b"z")],
    "no content": [ROOT, entry("a", size_bytes=9, content="0" * 64)],
    "an empty part": [ROOT, *file("a", b"x"), data(1, b"")],
    "a short part": [ROOT, *file("a", b"x"), record("D", b"1234")],
    "another content": [ROOT, file("a", b"x")[0], data(0, b"y")],
    "no hash": [ROOT, entry("a", content="")],
    "a hash that is none": [ROOT, entry("a", content="Z" * 64)],
    "a negative size": [ROOT, entry("a", size_bytes=-1, content="0" * 64)],
    "a size that no file has": [ROOT, entry("a", size_bytes=1 << 63, content="0" * 64)],
    "a time that no file has": [ROOT, entry("a", mtime_ns=1 << 70)],
    "an owner that nobody is": [ROOT, entry("a", uid=1 << 32)],
    "true as a number": [ROOT, record("E", b'["a","d",true,0,0,0,0,"","",[0,0],"",[],false,""]\n')],
    "one as true": [ROOT, record("E", b'["a","d",1,0,0,0,0,"","",[0,0],"",[],1,""]\n')],
    "attributes twice": [ROOT, entry("a", xattrs=(("user.k", b"1"), ("user.k", b"2")))],
    "a nameless attribute": [ROOT, entry("a", xattrs=(("", b"1"),))],
    "an opaque file": [ROOT, entry("a", opaque=True)],
    "a redirected file": [ROOT, entry("a", redirect="/etc")],
    "the owner that means none": [ROOT, entry("a", "d", gid=(1 << 32) - 1)],
    "a device that there is not": [ROOT, entry("a", "c", device=((1 << 32) - 1, 0))],
    "a minor that there is not": [ROOT, entry("a", "b", device=(1, 1 << 20))],
    "a device without end": [ROOT, record("E", b'["a","c",1,0,0,0,0,"","",[1e999,0],"",[],false,""]\n')],
    "half a device": [ROOT, record("E", b'["a","c",1,0,0,0,0,"","",[1.5,0],"",[],false,""]\n')],
    "nothing as a broken number": [ROOT, record("E", b'["a","d",1,0,0,0,0,"","",[0.0,0],"",[],false,""]\n')],
    "a device in words": [ROOT, record("E", b'["a","c",1,0,0,0,0,"","",["1",0],"",[],false,""]\n')],
    "an attribute of no bytes": [ROOT, entry("a", "d", xattrs=(("user.\ud800", b"1"),))],
    "a number as attribute": [ROOT, record("E", b'["a","d",1,0,0,0,0,"","",[0,0],"",[[7,""]],false,""]\n')],
    "attributes of two kinds": [ROOT, record("E", b'["a","d",1,0,0,0,0,"","",[0,0],"",[["a",""],[7,""]],false,""]\n')],
    "a redirect upwards": [ROOT, entry("a", "d", redirect="..")],
    "a redirect to itself": [ROOT, entry("a", "d", redirect="/b/./c")],
    "a redirect to nothing": [ROOT, entry("a", "d", redirect="/b//c")],
    "a redirect to the root": [ROOT, entry("a", "d", redirect="/")],
    "a relative path as redirect": [ROOT, entry("a", "d", redirect="b/c")],
    "redirects to one place": [ROOT, entry("a", "d", redirect="/x"), entry("b", "d", redirect="/x")],
    "redirects to one name": [ROOT, entry("a", "d", redirect="x"), entry("b", "d", redirect="x")],
    "a surrogate of no byte": [ROOT, record("E", b'["\\ud800","d",1,0,0,0,0,"","",[0,0],"",[],false,""]\n')],
    "no JSON": [ROOT, record("E", b"]")],
    "deep JSON": [ROOT, record("E", b"[" * 100_000)],
    "an object": [ROOT, record("E", b"{}")],
    "an unknown record": [ROOT, record("Q", b"")],
    "a layer in a layer": [ROOT, record("L", b"{}")],
    "a cut record": [ROOT, record("E", b"xxxx")[:7]],
    "a record as long as memory": [ROOT, struct.pack("<cI", b"E", 0xFFFFFFFF)],
}


class TestHostile:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_nothing_is_believed(self, tmp_path: Path, name: str) -> None:
        before = sorted(os.listdir("/etc"))
        archive = forged_layer(HOSTILE[name])  # whose digest and numbers are right
        with pytest.raises(Corrupt):
            extract(archive, tmp_path / "out")
        assert sorted(os.listdir(tmp_path)) == ["out"]
        assert sorted(os.listdir("/etc")) == before

    def test_a_sound_one_comes_through(self, tmp_path: Path) -> None:
        extract(forged_layer([ROOT, *file("a", b"x"), entry("b", "d"), *file("b/c", b"y")]), tmp_path / "out")
        assert (tmp_path / "out" / "0" / "b" / "c").read_bytes() == b"y"

    def test_a_link_to_what_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(WorldforkError):
            extract(forged_layer([ROOT, *file("a", b"x"), entry("b", "f", link="Z")]), tmp_path / "out")

    @pytest.mark.parametrize(
        "head",
        [
            {"entries": 1},
            {"logical_bytes": 0},
            {"entries": 1 << 70},
            {"entries": True},
            {"logical_bytes": -1},
            {"digest": "b3:" + "0" * 64},
            {"digest": "sha256:" + "0" * 64},
            {"digest": None},
        ],
    )
    def test_never_more_than_was_announced(self, tmp_path: Path, head: dict[str, object]) -> None:
        with pytest.raises(Corrupt):
            extract(forged_layer([ROOT, *file("a", b"x")], **head), tmp_path / "out")

    def test_sizes_of_blocks_are_bounded(self) -> None:
        head = forged()[:16]
        for raw, packed in ((1 << 31, 100), (100, 1 << 31), (100, 0), (0, 31), (0, 1 << 30)):
            with pytest.raises(Corrupt):
                read_through(head + struct.pack("<II", raw, packed) + bytes(1000))

    def test_small_files_do_not_keep_the_blocks_that_they_came_in(self) -> None:
        records = [ROOT]
        for number in range(50):
            zeros = blake3(bytes(4 * MIB)).hexdigest()
            records.append(entry(f"{number:03}a", size_bytes=4 * MIB, content=zeros))
            records += [data(part * MIB, bytes(MIB)) for part in range(4)]
            records += file(f"{number:03}b", b"x")
        archive = forged_layer(records)
        assert len(archive) < 64 << 10
        tracemalloc.start()
        try:
            read_through(archive)
            assert tracemalloc.get_traced_memory()[1] < 60 * MIB
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize(
        "records",
        [
            [record("H", json.dumps({"x": "y" * (17 << 20)}).encode()), record("Z")],
            [record("H", b"{}"), record("L", json.dumps({"x": "y" * MIB}).encode())],
            [record("H", b"{}"), record("Z", b"x")],
        ],
    )
    def test_records_have_the_size_of_their_kind(self, records: list[bytes]) -> None:
        with pytest.raises(Corrupt, match="longer than one of its kind"):
            read_through(forged(*records))

    def test_a_part_of_a_file_is_no_more_than_a_piece(self) -> None:
        with pytest.raises(Corrupt, match="longer than one of its kind"):
            read_through(forged_layer([ROOT, *file("a", bytes(MIB + 1))]))

    def test_a_large_block_has_one_record(self) -> None:
        out = io.BytesIO()
        with BlockWriter(out) as blocks:
            blocks.write(record("H", json.dumps({"x": "y" * (5 * MIB)}).encode()) + record("Z"))
            blocks.end()
        with pytest.raises(Corrupt, match="more than one record"):
            read_through(out.getvalue())

    def test_a_block_that_unpacks_to_more_than_it_says(self) -> None:
        head = forged()[:16]
        bomb = zstd.compress(bytes(1 << 30), 1)
        with pytest.raises(Corrupt):
            read_through(head + struct.pack("<II", len(bomb), len(bomb)) + bomb + bytes(40))

    def test_records_after_the_end(self) -> None:
        for extra in (record("Z"), record("H", b"{}"), record("F")):
            with pytest.raises(Corrupt):
                read_through(forged(record("H", b"{}"), record("Z"), extra))
        read_through(forged(record("H", b"{}"), record("Z")))

    @pytest.mark.parametrize("head", [b"[]", b"null", b"{", b"[" * 100_000, b"\xff"])
    def test_a_head_that_is_none(self, head: bytes) -> None:
        with pytest.raises(Corrupt):
            read_through(forged(record("H", head), record("Z")))


def test_a_record_larger_than_a_block() -> None:
    words = "x" * (blocks.BLOCK_BYTES + 1)
    out = io.BytesIO()
    with ArchiveWriter(out, {"words": words}) as archive:
        archive.end()
    reader = ArchiveReader(io.BytesIO(out.getvalue()))
    assert list(reader.layers()) == []
    assert reader.head == {"words": words}


def test_memory_is_bounded_by_blocks_not_by_the_archive(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with open(tree / "large", "wb") as out:
        for _ in range(40):
            out.write(os.urandom(MIB))

    class Counting(io.BytesIO):
        most = 0

        def read(self, size_bytes: int | None = -1, /) -> bytes:
            assert size_bytes is not None
            Counting.most = max(Counting.most, size_bytes)
            return super().read(size_bytes)

    read = Counting(archive_of(tree))
    for layer in ArchiveReader(read).layers():
        assert sum(1 for _ in layer.files()) == 2
    assert Counting.most < 2 * blocks.BLOCK_BYTES


def test_an_entry_of_every_field_passes() -> None:
    facts = {"uid": 1, "gid": 2, "mtime_ns": -3, "xattrs": (("user.a", b"1"), ("user.b", b"2"))}
    kinds = [
        Entry("a", "d", 0o7777, opaque=True, redirect="x", **facts),
        Entry("b", "l", 0o777, target="/t", **facts),
        Entry("c", "b", 0o600, device=(8, 1), **facts),
        Entry("d", "p", 0o600, **facts),
        Entry("e", "s", 0o600, link="d", **facts),
        Entry("f", "w"),
    ]
    from worldfork.content.entry import encode

    read_through(forged_layer([ROOT, *(record("E", encode(one)) for one in kinds)]))


def test_damage_is_found_before_it_is_taken_for_content(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    archive = archive_of(tmp_path / "tree")
    random.seed(8)
    seen = []
    for _ in range(150):
        changed = bytearray(archive)
        changed[random.randrange(30, len(archive) - 50)] ^= 1 << random.randrange(8)
        with pytest.raises(Corrupt):
            seen += [layer.head for layer in ArchiveReader(io.BytesIO(bytes(changed))).layers()]
    assert seen == []
