"""A walk finds everything in canonical order, and goes nowhere else."""

from __future__ import annotations

import errno
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3
from tests.stores import in_child
from tests.trees import FIRST, program

from worldfork.content.entry import Entry, sort_key
from worldfork.content.layer import NOBODY, Found, look, walk
from worldfork.content.manifest import digest_of
from worldfork.content.mapped import lines_of, value_inside, value_outside
from worldfork.core import beneath
from worldfork.core.errors import StoreError

FORMS = ("trusted", "user")


def entries(root: Path, form: str = "trusted") -> dict[str, Entry]:
    return {found.entry.path: found.entry for found in walk(root, form)}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "d").mkdir(parents=True)
    return root


def test_every_kind_with_what_belongs_to_it(tree: Path) -> None:
    (tree / "d" / "file").write_bytes(b"content")
    os.chmod(tree / "d" / "file", 0o4755)
    os.utime(tree / "d" / "file", ns=(5, 1_700_000_000_123_456_789))
    os.setxattr(tree / "d" / "file", "user.b", b"2")
    os.setxattr(tree / "d" / "file", "user.a", b"\0\xff")
    os.symlink("/etc/passwd", tree / "link")
    os.mkfifo(tree / "pipe", 0o600)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tree / "socket"))
    found = entries(tree)
    file = found["d/file"]
    assert (file.kind, file.mode, file.size_bytes) == ("f", 0o4755, 7)
    assert (file.uid, file.gid) == (os.getuid(), os.getgid())
    assert file.mtime_ns == 1_700_000_000_123_456_789
    assert file.content == blake3(b"content").hexdigest()
    assert file.xattrs == (("user.a", b"\0\xff"), ("user.b", b"2"))
    assert (found["link"].kind, found["link"].target, found["link"].size_bytes) == ("l", "/etc/passwd", 0)
    assert {path: entry.kind for path, entry in found.items()} == {
        "": "d",
        "d": "d",
        "d/file": "f",
        "link": "l",
        "pipe": "p",
        "socket": "s",
    }


def test_canonical_order_at_any_name(tree: Path) -> None:
    for name in ("a", "a.b", "A", "é", "\uffff", "\udcff\udcfe", "line\nend", "d.x", "D"):
        (tree / name).mkdir()
        (tree / name / "in").touch()
    (tree / "d" / "x").touch()
    paths = [found.entry.path for found in walk(tree, "trusted")]
    assert paths == sorted(paths, key=sort_key)
    assert len(set(paths)) == len(paths) == 21


def test_hard_links_are_one_group_of_those_in_the_tree(tree: Path) -> None:
    (tree / "d" / "first").write_bytes(b"xyz")
    os.link(tree / "d" / "first", tree / "z")
    os.link(tree / "d" / "first", tree / "e")
    os.symlink("x", tree / "s1")
    os.link(tree / "s1", tree / "s2", follow_symlinks=False)
    (tree / "alone").write_bytes(b"1")
    os.link(tree / "alone", tree.parent / "outside")
    found = {each.entry.path: each for each in walk(tree, "trusted")}
    assert {path: each.entry.link for path, each in found.items() if each.entry.link} == {
        "e": "d/first",
        "z": "d/first",
        "s2": "s1",
    }
    assert found["z"].entry == found["d/first"].entry._replace(path="z", link="d/first")
    assert (found["d/first"].stored_bytes, found["z"].stored_bytes) == (4096, 0)


def test_a_link_is_never_followed(tree: Path) -> None:
    outside = tree.parent / "outside"
    outside.mkdir()
    (outside / "secret").touch()
    os.symlink(outside, tree / "dir")
    assert set(entries(tree)) == {"", "d", "dir"}
    os.symlink(tree, tree.parent / "entry")
    with pytest.raises(StoreError) as caught:
        list(walk(tree.parent / "entry", "trusted"))
    assert caught.value.fields["errno"] in (errno.ELOOP, errno.ENOTDIR)


def test_without_reading_files(tree: Path) -> None:
    (tree / "file").write_bytes(b"abc")
    found = {each.entry.path: each.entry for each in walk(tree, "trusted", hashed=False)}
    assert (found["file"].content, found["file"].size_bytes) == ("", 3)


def test_one_path_alone_is_as_in_the_walk(tree: Path) -> None:
    (tree / "d" / "file").write_bytes(b"abc")
    os.symlink("x", tree / "d" / "link")
    found = {each.entry.path: each for each in walk(tree, "trusted")}
    directory = os.open(tree / "d", os.O_RDONLY)
    try:
        for name in ("file", "link"):
            assert look(directory, name, f"d/{name}", "trusted") == found[f"d/{name}"]
        with pytest.raises(StoreError) as caught:
            look(directory, "none", "d/none", "trusted")
    finally:
        os.close(directory)
    assert caught.value.fields["path"] == "d/none"


def test_deeper_than_any_path_and_any_limit_of_files(tmp_path: Path) -> None:
    depth, name = 300, "n" * 60
    root = tmp_path / "tree"
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        os.close(os.open("z", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    before = sorted(os.listdir("/proc/self/fd"))

    def look_with_few_files() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
        paths = [found.entry.path for found in walk(root, "trusted")]
        assert len(paths) == 1 + 2 * depth
        assert paths == sorted(paths, key=sort_key)

    assert in_child(look_with_few_files) == 0
    for count, _ in enumerate(walk(root, "trusted")):
        if count == 100:
            break  # a walk that is given up holds nothing
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert sum(1 for _ in walk(root, "trusted")) == 1 + 2 * depth


@pytest.mark.root
def test_marks_are_fields_and_whiteouts_say_nothing_else(tree: Path) -> None:
    for form in FORMS:
        root = tree.parent / form
        (root / "opaque").mkdir(parents=True)
        (root / "moved").mkdir()
        os.setxattr(root / "opaque", f"{form}.overlay.opaque", b"y")
        os.setxattr(root / "opaque", f"{form}.overlay.origin", b"handle of somewhere")
        os.setxattr(root / "moved", f"{form}.overlay.redirect", b"/else\xff")
        os.setxattr(root / "moved", f"{form}.overlay.overlay.opaque", b"data")
        os.mknod(root / "gone", 0o020666, 0)
        os.chown(root / "gone", 5, 5)
        os.link(root / "gone", root / "gone too")
    os.mknod(tree / "null", 0o020600, os.makedev(1, 3))
    found = entries(tree.parent / "trusted")
    assert found["opaque"].opaque
    assert found["opaque"].xattrs == ()
    assert found["moved"].redirect == "/else\udcff"
    assert found["moved"].xattrs == (("trusted.overlay.opaque", b"data"),)
    assert found["gone"] == Entry("gone", "w")
    assert found["gone too"] == Entry("gone too", "w")
    assert entries(tree)["null"].device == (1, 3)
    other = entries(tree.parent / "user", "user")
    assert other["opaque"].opaque
    assert other["moved"].xattrs == (("user.overlay.opaque", b"data"),)
    foreign = entries(tree.parent / "user", "trusted")
    assert not foreign["opaque"].opaque
    assert ("user.overlay.opaque", b"y") in foreign["opaque"].xattrs


@pytest.mark.root
def test_both_forms_of_one_tree_have_one_digest(tmp_path: Path) -> None:
    digests = []
    for form in FORMS:
        root = tmp_path / form
        root.mkdir()
        with program() as running:
            running.ask(root, operations=[*FIRST, ("utime", "base", 7), ("utime", "other", 7)])
        os.setxattr(root / "base", f"{form}.overlay.opaque", b"y")
        os.mknod(root / "base" / "gone", 0o020000, 0)
        os.utime(root, ns=(1, 1))
        digests.append(digest_of(fixed(root, form)).digest)
    assert digests[0] == digests[1]


def fixed(root: Path, form: str) -> list[Found]:
    return [found._replace(entry=found.entry._replace(mtime_ns=0)) for found in walk(root, form)]


MOUNTED = """
import errno, os, subprocess, sys
from pathlib import Path
from worldfork.content.layer import walk
from worldfork.core import beneath
from worldfork.core.errors import StoreError
place = Path(sys.argv[1])
if sys.argv[2] == "without":
    beneath._openat2 = lambda: None
host = place / "host"
host.mkdir()
(host / "file").write_text("x")
os.mkfifo(host / "pipe")
for kind in ("dir", "file", "pipe"):
    tree = place / kind
    tree.mkdir()
    if kind == "dir":
        (tree / "x").mkdir()
    elif kind == "file":
        (tree / "x").touch()
    else:
        os.mkfifo(tree / "x")
    subprocess.run(["mount", "--bind", host if kind == "dir" else host / "file", tree / "x"], check=True)
    try:
        list(walk(tree, "trusted"))
    except StoreError as error:
        assert (error.path, error.errno) == ("x", errno.EXDEV), error.fields
    else:
        raise AssertionError(f"a mount on a {kind} was entered")
"""


@pytest.mark.root
@pytest.mark.parametrize("openat2", ["with", "without"])
def test_never_enters_a_mount(tmp_path: Path, openat2: str) -> None:
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", MOUNTED, str(tmp_path), openat2],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(beneath.__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_is_left_open_by_name_leads_nowhere(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "d" / "file").touch()
    os.symlink("d", tree / "link")
    directory = os.open(tree, os.O_PATH)
    try:
        for openat2 in (True, False):
            if not openat2:
                monkeypatch.setattr(beneath, "_openat2", lambda: None)
            before = len(os.listdir("/proc/self/fd"))
            os.close(beneath.open_beneath(directory, "d/file", os.O_RDONLY))
            for bad in ("link/file", "../tree/d/file", "link", "d/none"):
                with pytest.raises(OSError):
                    beneath.open_beneath(directory, bad, os.O_RDONLY)
            assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(directory)


@pytest.mark.user
def test_an_ordinary_user_is_root_inside_and_sees_what_it_has_closed(tree: Path) -> None:
    (tree / "a").write_bytes(b"open")
    (tree / "d" / "secret").write_bytes(b"closed")
    os.setxattr(tree / "d" / "secret", "user.k", b"v")
    os.chmod(tree / "d" / "secret", 0)
    os.chmod(tree / "d", 0)
    ctime = (tree / "d").stat().st_ctime_ns
    try:
        found = entries(tree, "user")
        assert (tree / "d").stat().st_ctime_ns == ctime, "nothing was opened up for it"
    finally:
        os.chmod(tree / "d", 0o700)
    assert list(found) == ["", "a", "d", "d/secret"]
    assert {(entry.uid, entry.gid) for entry in found.values()} == {(0, 0)}
    assert (found["d"].mode, found["d/secret"].mode) == (0, 0)
    assert found["d/secret"].content == blake3(b"closed").hexdigest()
    assert found["d/secret"].xattrs == (("user.k", b"v"),)
    os.chmod(tree / "d", 0)
    with pytest.raises(StoreError) as caught:
        list(walk(tree, "trusted"))  # its owners are as they are, so that nobody can be root instead
    os.chmod(tree / "d", 0o700)
    assert caught.value.fields["path"] == "d"
    assert caught.value.fields["errno"] == errno.EACCES


@pytest.mark.user
def test_errors_cross_from_the_process_that_may_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        list(lines_of("worldfork.content.layer", "_lines", f"{tmp_path}/none", "user", ""))
    assert caught.value.fields["errno"] == errno.ENOENT


@pytest.mark.root
def test_an_unreadable_path_is_named(tree: Path) -> None:
    (tree / "d" / "x").write_text("x")
    os.chmod(tree / "d", 0)
    os.chmod(tree.parent, 0o755)

    def look_as_nobody() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        fd = os.open("/proc/self/fd/" + str(parent), os.O_PATH)
        os.fchdir(fd)
        with pytest.raises(StoreError) as caught:
            list(walk(Path("tree"), "trusted"))
        assert caught.value.fields["path"] == "d"
        assert "'d' cannot be read" in str(caught.value)

    parent = os.open(tree.parent, os.O_RDONLY)
    os.fchmod(parent, 0o755)
    try:
        assert in_child(look_as_nobody) == 0
    finally:
        os.close(parent)


def test_owners_in_attributes_are_as_seen_inside() -> None:
    acl = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, 7, owner) for tag, owner in ((1, 0xFFFFFFFF), (2, 1000), (2, 7), (8, 1001))
    )
    inside = value_inside("system.posix_acl_access", acl, 1000, 1001)
    assert [each[2] for each in struct.iter_unpack("<HHI", inside[4:])] == [0xFFFFFFFF, 0, NOBODY, 0]
    with pytest.raises(LookupError):
        value_outside("system.posix_acl_access", inside, 1000, 1001)
    mine = acl[:20] + acl[28:]
    assert (
        value_outside("system.posix_acl_access", value_inside("system.posix_acl_access", mine, 1000, 1001), 1000, 1001)
        == mine
    )
    with_root = struct.pack("<6I", 0x03000001, 1, 2, 3, 4, 1000)
    assert value_inside("security.capability", with_root, 1000, 1000) == struct.pack("<5I", 0x02000001, 1, 2, 3, 4)
    assert value_inside("security.capability", with_root, 5, 5) == with_root
    assert value_inside("user.k", acl, 1000, 1001) == acl
