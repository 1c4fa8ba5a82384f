"""A tree that is written says exactly what its entries say, and nothing leads out of it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.stores import in_child
from tests.trees import FIRST, Operation, Program, operations, program

from worldfork.content.entry import Entry
from worldfork.content.hashing import ContentHash
from worldfork.content.layer import walk
from worldfork.content.writing import Writer
from worldfork.core.errors import ConfigError, Corrupt, OutOfSpace, StoreError

ROOT = Entry("", "d", 0o755, mtime_ns=1)
OWN = "trusted" if os.geteuid() == 0 else "user"


def copy(source: Path, target: Path, form: str, into: str = "", *, chunks: bool = False) -> None:
    """Write what a walk over `source` finds, contents from descriptors or as chunks."""
    with Writer(target, into or form, checked=True) as writer:
        for entry, _ in walk(source, form):
            if entry.kind != "f" or entry.link:
                writer.add(entry)
            elif chunks:
                writer.add(entry, pieces(source / entry.path))
            else:
                with open(source / entry.path, "rb") as file:
                    writer.add(entry, file.fileno())
        writer.finish()


def write(target: Path, form: str, entry: Entry, content: Any = None) -> None:
    """Write a tree of a root and one entry."""
    with Writer(target, form, checked=True) as writer:
        writer.add(ROOT)
        writer.add(entry, content)
        writer.finish()


def pieces(path: Path) -> Iterator[bytes | int]:
    with open(path, "rb") as file:
        while piece := file.read(1000):
            yield piece if piece.strip(b"\0") else len(piece)


def entries(root: Path, form: str) -> list[Entry]:
    return [found.entry for found in walk(root, form)]


@pytest.fixture(scope="module")
def running() -> Iterator[Program]:
    with program(() if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user")) as started:
        yield started


@pytest.mark.parametrize("chunks", [False, True])
@settings(
    derandomize=True,
    deadline=None,
    max_examples=30 if os.geteuid() == 0 else 8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    done=st.lists(
        operations(
            [(0, 0), (1000, 1001)] if os.geteuid() == 0 else [(0, 0)],
            overlay_xattrs=os.geteuid() == 0,  # written beside an overlay, in the user form they are its marks
            capabilities=os.geteuid() == 0,
        ),
        max_size=15,
    )
)
def test_any_tree_comes_out_the_same(
    running: Program, tmp_path_factory: pytest.TempPathFactory, chunks: bool, done: list[Operation]
) -> None:
    place = tmp_path_factory.mktemp("tree")
    (place / "source").mkdir()
    running.ask(place / "source", operations=[*FIRST, *done], describe=False)
    if os.geteuid() == 0:
        copy(place / "source", place / "target", "trusted", chunks=chunks)
    else:
        assert in_child(lambda: opened_copy(place, chunks)) == 0
    assert entries(place / "target", OWN) == entries(place / "source", OWN)


def opened_copy(place: Path, chunks: bool) -> None:
    """The part of an ordinary user, who opens what is closed for reading it, in a child that may fail."""
    modes = {}
    for found in walk(place / "source", "user", hashed=False):
        entry, full = found.entry, place / "source" / found.entry.path
        if entry.kind in "df" and entry.mode & 0o700 != 0o700:
            modes[full] = entry.mode
    kept = entries(place / "source", "user")
    for full in modes:
        full.chmod(0o700)
    with Writer(place / "target", "user", checked=True) as writer:
        for entry in kept:
            full = place / "source" / entry.path
            writer.add(entry, pieces(full) if entry.kind == "f" and not entry.link else None)
        writer.finish()
    for full, mode in reversed(modes.items()):
        full.chmod(mode)


def test_sparse_files_stay_sparse(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with open(source / "sparse", "wb") as file:
        file.seek(5 << 20)
        file.write(b"x")
        file.truncate(9 << 20)
    for chunks in (False, True):
        target = tmp_path / f"target-{chunks}"
        copy(source, target, OWN, chunks=chunks)
        assert (target / "sparse").stat().st_blocks * 512 < 1 << 20
        assert entries(target, OWN)[1] == entries(source, OWN)[1]


def test_a_file_of_a_tebibyte_of_holes(tmp_path: Path) -> None:
    size = 1 << 40
    content = ContentHash(size)
    content.zeros(size)
    entry = Entry("huge", "f", 0o644, size_bytes=size, content=content.hexdigest())
    with Writer(tmp_path / "tree", OWN, checked=True) as writer:
        writer.add(ROOT)
        try:
            writer.add(entry, [size])
        except StoreError as error:
            if error.fields["errno"] == errno.EFBIG:
                pytest.skip("this file system has no files of a tebibyte")
            raise
        writer.finish()
    assert entries(tmp_path / "tree", OWN)[1] == entry


@pytest.mark.root
def test_layers_change_their_form_where_it_can_say_the_same(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "opaque").mkdir(parents=True)
    os.setxattr(source / "opaque", "trusted.overlay.opaque", b"y")
    os.setxattr(source / "opaque", "trusted.overlay.origin", b"tie")
    os.setxattr(source / "opaque", "user.overlay.opaque", b"data")
    os.mknod(source / "gone", 0o020000, 0)
    copy(source, tmp_path / "user", "trusted", "user")
    copy(tmp_path / "user", tmp_path / "trusted", "user", "trusted")
    assert entries(source, "trusted") == entries(tmp_path / "user", "user") == entries(tmp_path / "trusted", "trusted")
    names = os.listxattr(tmp_path / "user" / "opaque")
    assert set(names) == {"user.overlay.opaque", "user.overlay.overlay.opaque"}
    assert stat.S_ISCHR((tmp_path / "user" / "gone").lstat().st_mode)


@pytest.mark.root
@pytest.mark.parametrize(
    "entry",
    [
        Entry("x", "d", redirect="/y"),
        Entry("x", "f", xattrs=(("security.capability", b"1"),)),
        Entry("x", "d", xattrs=(("trusted.k", b"1"),)),
    ],
)
def test_a_user_s_form_refuses_what_it_cannot_say(tmp_path: Path, entry: Entry) -> None:
    with pytest.raises(ConfigError) as caught:
        write(tmp_path / "tree", "user", entry)
    assert caught.value.fields["path"] == "x"


@pytest.mark.user
@pytest.mark.parametrize(
    "entry",
    [Entry("x", "f", uid=1), Entry("x", "l", gid=65534, target="y"), Entry("x", "c", device=(1, 3)), Entry("x", "b")],
)
def test_an_ordinary_user_cannot_make_everything(tmp_path: Path, entry: Entry) -> None:
    with pytest.raises(ConfigError) as caught:
        write(tmp_path / "tree", "user", entry)
    assert caught.value.fields["path"] == "x"


@pytest.mark.root
def test_a_tree_in_a_directory_that_gives_its_group_on() -> None:
    place = Path(tempfile.mkdtemp(dir="/var/tmp"))
    try:
        os.chown(place, 64321, 4242)
        place.chmod(0o2755)

        def write_as_a_user() -> None:
            os.setgroups([])
            os.setresgid(64321, 64321, 64321)
            os.setresuid(64321, 64321, 64321)
            tree = [
                ROOT,
                Entry("a", "d", 0o755),
                Entry("a/f", "f", 0o644),
                Entry("g", "d", 0o2755),
                Entry("g/f", "f", 0o600),
            ]
            with Writer(place / "tree", "user") as writer:
                for entry in tree:
                    writer.add(entry)
                writer.finish()
            found = [each.entry for each in walk(place / "tree", "user", hashed=False)]
            assert {(entry.uid, entry.gid) for entry in found} == {(0, 0)}
            assert {entry.path: entry.mode for entry in found}["g"] == 0o2755

        assert in_child(write_as_a_user) == 0
    finally:
        shutil.rmtree(place)


@pytest.mark.user
def test_directories_that_their_owner_is_closed_out_of(tmp_path: Path) -> None:
    tree = [
        ROOT._replace(mode=0o500),
        Entry("a", "d", 0, mtime_ns=5),
        Entry("a/f", "f", 0, mtime_ns=6),
        Entry("b", "d", 0o100, mtime_ns=7),
        Entry("b/again", "f", 0, mtime_ns=6, link="a/f"),
        Entry("c", "d", 0, mtime_ns=8),
        Entry("c/d", "d", 0, mtime_ns=9),
        Entry("c/d/e", "d", 0o300, mtime_ns=10),
        Entry("c/f", "d", 0o400, mtime_ns=11),
    ]
    with Writer(tmp_path / "tree", "user") as writer:
        for entry in tree:
            writer.add(entry)
        writer.finish()
    try:
        found = [each.entry._replace(content="") for each in walk(tmp_path / "tree", "user", hashed=False)]
        assert found == tree
    finally:
        os.chmod(tmp_path / "tree", 0o700)


@pytest.mark.parametrize(
    "bad",
    [
        Entry("..", "f"),
        Entry("d/..", "f"),
        Entry("d/.", "d"),
        Entry("d/", "f"),
        Entry("/etc", "f"),
        Entry("d/a\0b", "f"),
        Entry("none/f", "f"),
        Entry("out/f", "f"),
        Entry("d/x", "f", link="../../outside/secret"),
        Entry("d/x", "f", link="out/secret"),
        Entry("d/x", "f", link="d/none"),
        Entry("d/x", "f", link="none/none"),
        Entry("x", "q"),
    ],
)
def test_nothing_leads_out_of_the_tree(tmp_path: Path, bad: Entry) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("x")
    before = sorted(os.listdir("/proc/self/fd"))
    with Writer(tmp_path / "tree", OWN) as writer:
        writer.add(ROOT)
        writer.add(Entry("out", "l", target=str(outside)))
        writer.add(Entry("d", "d"))
        with pytest.raises(ConfigError) as caught:
            writer.add(bad)
    assert caught.value.fields["path"] == bad.path
    assert sorted(os.listdir(outside)) == ["secret"]
    assert (outside / "secret").stat().st_nlink == 1
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_order_is_kept(tmp_path: Path) -> None:
    with Writer(tmp_path / "first", OWN) as writer:
        with pytest.raises(ConfigError):
            writer.add(Entry("a", "f"))
        with pytest.raises(ConfigError):
            writer.finish()
    with Writer(tmp_path / "tree", OWN) as writer:
        writer.add(ROOT)
        writer.add(Entry("a", "d"))
        writer.add(Entry("b", "d"))
        with pytest.raises(ConfigError):
            writer.add(Entry("a/late", "f"))
    with pytest.raises(StoreError):
        Writer(tmp_path / "tree", OWN)
    with pytest.raises(StoreError):
        Writer(tmp_path / "none" / "tree", OWN)


def test_content_that_is_not_what_the_entry_says(tmp_path: Path) -> None:
    entry = Entry("f", "f", 0o600, size_bytes=3, content=blake3(b"abc").hexdigest())
    for number, content in enumerate([[b"abd"], [b"ab"], [b"abcd"], [b"ab", 1], [1 << 60], None]):
        with pytest.raises(Corrupt) as caught:
            write(tmp_path / f"tree-{number}", OWN, entry, content)
        assert caught.value.fields["path"] == "f"
    assert caught.value.expected == 3
    (tmp_path / "file").write_bytes(b"abcd")
    with open(tmp_path / "file", "rb") as file, pytest.raises(Corrupt):
        write(tmp_path / "tree", OWN, entry, file.fileno())
    write(tmp_path / "good", OWN, entry, iter([b"a", b"", b"bc"]))
    assert (tmp_path / "good" / "f").read_bytes() == b"abc"


def test_deeper_than_any_path_and_any_limit_of_files(tmp_path: Path) -> None:
    depth, name = 300, "n" * 60
    tree = [ROOT]
    for level in range(depth):
        tree.append(Entry(f"{tree[-1].path}/{name}".lstrip("/"), "d", 0o755, mtime_ns=level))
    tree += [Entry(f"{tree[level].path}/z".lstrip("/"), "f", mtime_ns=9) for level in range(depth, -1, -1)]
    tree[-1] = tree[-1]._replace(link=tree[depth + 1].path)
    tree[-1] = tree[depth + 1]._replace(path="z", link=tree[depth + 1].path)

    def write() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
        with Writer(tmp_path / "tree", OWN) as writer:
            for entry in tree:
                writer.add(entry)
            writer.finish()
        found = [each.entry for each in walk(tmp_path / "tree", OWN, hashed=False)]
        assert [entry.path for entry in found] == [entry.path for entry in tree]
        assert [entry.mtime_ns for entry in found] == [entry.mtime_ns for entry in tree]
        assert found[-1].link == tree[depth + 1].path

    assert in_child(write) == 0


def test_an_inherited_access_list_is_not_taken_over(tmp_path: Path) -> None:
    acl = bytes.fromhex("0200000001000700ffffffff04000500ffffffff20000000ffffffff")
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", acl)
    except OSError as error:
        pytest.skip(f"no access control lists here: {error.strerror}")
    with Writer(tmp_path / "tree", OWN) as writer:
        writer.add(ROOT)
        writer.add(Entry("d", "d", 0o755))
        writer.finish()
    assert {each.xattrs for each in entries(tmp_path / "tree", OWN)} == {()}


def test_a_full_disk_is_told_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutOfSpace) as caught:
        write(tmp_path / "tree", OWN, Entry("f", "f", size_bytes=1), [b"x"])
    assert caught.value.fields["path"] == "f"
    assert caught.value.scope == "host"
