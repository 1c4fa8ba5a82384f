"""The stream of a tree that a guest sends: everything in it, in one order, and through no link."""

from __future__ import annotations

import io
import os
import shutil
import socket
import stat
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from worldfork.sandbox.microvm import wire

NATIVE = Path(__file__).resolve().parents[3] / "native"


@dataclass
class Record:
    """One record of the stream."""

    kind: str
    again: bool
    mode: int
    uid: int
    gid: int
    device: tuple[int, int]
    links: int
    mtime_ns: int
    size: int
    inode: int
    xattrs: dict[bytes, bytes]
    target: bytes
    stretches: list[tuple[int, bytes]]


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """native/tests/export, compiled."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler")
    out = tmp_path_factory.mktemp("export") / "export"
    sources = [str(path) for path in NATIVE.glob("*.c") if path.name != "main.c"]
    line = [compiler, "-std=gnu11", "-O1", "-o", str(out), str(NATIVE / "tests" / "export.c"), *sources]
    subprocess.run(line, check=True)
    return out


def read_xattrs(data: bytes) -> dict[bytes, bytes]:
    found = {}
    at = 0
    while at < len(data):
        name_len, value_len = struct.unpack_from("<HI", data, at)
        at += 6
        found[data[at : at + name_len]] = data[at + name_len : at + name_len + value_len]
        at += name_len + value_len
    return found


def read_content(stream: io.BytesIO, size: int) -> list[tuple[int, bytes]]:
    stretches: list[tuple[int, bytes]] = []
    while True:
        offset, length = wire.STRETCH.unpack(stream.read(wire.STRETCH.size))
        if length == 0:
            assert offset == size
            return stretches
        stretches.append((offset, stream.read(length)))


def records(data: bytes) -> tuple[list[tuple[bytes, Record]], int, bytes]:
    """All records with their names, then the errno of the last one and its name."""
    stream = io.BytesIO(data)
    found: list[tuple[bytes, Record]] = []
    while True:
        fields = wire.EXPORT_HEAD.unpack(stream.read(wire.EXPORT_HEAD.size))
        kind, again, mode, uid, gid, name_len, xattrs_len, target_len, major, minor, links, ns, seconds, size, ino = (
            fields
        )
        name = stream.read(name_len)
        if chr(kind) == "e":
            assert stream.read() == b""
            return found, size, name
        xattrs, target = read_xattrs(stream.read(xattrs_len)), stream.read(target_len)
        content = read_content(stream, size) if chr(kind) == "f" and not again else []
        mtime_ns = seconds * 1_000_000_000 + ns
        record = Record(
            chr(kind), bool(again), mode, uid, gid, (major, minor), links, mtime_ns, size, ino, xattrs, target, content
        )
        found.append((name, record))


def run(export: Path, tree: Path) -> tuple[list[tuple[bytes, Record]], int, bytes]:
    return records(subprocess.run([export, tree], capture_output=True, check=False).stdout)


def test_every_kind_of_thing_comes_with_all_that_it_has(export: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "b").mkdir(mode=0o751)
    (tree / "b" / "file").write_bytes(b"content")
    os.chmod(tree / "b" / "file", 0o4640)
    os.utime(tree / "b" / "file", ns=(1, -1_500_000_001))
    os.setxattr(tree / "b" / "file", "user.b", b"2")
    os.setxattr(tree / "b" / "file", "user.a", b"1\0")
    os.symlink("/etc/passwd", tree / "a")
    os.mkfifo(tree / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tree / "sock"))
    found, error, _ = run(export, tree)
    things = dict(found)
    assert error == 0
    assert [name for name, _ in found] == [b"", b"a", b"b", b"b/file", b"pipe", b"sock"]
    assert "".join(things[name].kind for name, _ in found) == "dldfps"
    file = things[b"b/file"]
    assert (file.mode, file.mtime_ns, file.stretches) == (0o4640, -1_500_000_001, [(0, b"content")])
    assert list(file.xattrs.items()) == [(b"user.a", b"1\0"), (b"user.b", b"2")]
    assert (file.uid, file.gid) == (os.geteuid(), os.getegid())
    assert things[b"b"].mode == 0o751
    assert things[b"a"].target == b"/etc/passwd"


@pytest.mark.skipif(os.geteuid() != 0, reason="making devices takes root")
def test_what_an_upper_says_of_removals_comes_too(export: Path, tmp_path: Path) -> None:
    os.mknod(tmp_path / "gone", 0o600 | stat.S_IFCHR, os.makedev(0, 0))
    os.mknod(tmp_path / "loop", 0o600 | stat.S_IFBLK, os.makedev(7, 300))
    (tmp_path / "opaque").mkdir()
    os.setxattr(tmp_path / "opaque", "trusted.overlay.opaque", b"y")
    things = dict(run(export, tmp_path)[0])
    assert (things[b"gone"].kind, things[b"gone"].device) == ("c", (0, 0))
    assert (things[b"loop"].kind, things[b"loop"].device) == ("b", (7, 300))
    assert things[b"opaque"].xattrs == {b"trusted.overlay.opaque": b"y"}


def test_holes_stay_holes(export: Path, tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 30)
        file.write(b"x" * 4096)
    (tmp_path / "empty").write_bytes(b"")
    things = dict(run(export, tmp_path)[0])
    assert things[b"empty"].stretches == []
    sparse = things[b"sparse"]
    assert sparse.size == 1 << 40
    assert sum(len(data) for _, data in sparse.stretches) < 1 << 20
    offset, data = sparse.stretches[0]
    assert data[(1 << 30) - offset :][:4096] == b"x" * 4096


def test_other_names_of_a_file_carry_no_content(export: Path, tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number:04}").write_bytes(b"%d" % number)
        os.link(tmp_path / f"{number:04}", tmp_path / f"{number:04}x")
    found, error, _ = run(export, tmp_path)
    assert error == 0
    first = {name: record for name, record in found if not record.again and record.kind == "f"}
    again = {name: record for name, record in found if record.again}
    assert len(first) == len(again) == 3000
    for name, record in again.items():
        assert first[name[:-1]].inode == record.inode
        assert record.links == 2


def test_names_come_in_the_order_of_their_bytes(export: Path, tmp_path: Path) -> None:
    names = [b"\xff", b"a", b"a b", b"a\nb", b"B", b"\x01", b"ab", "ü".encode()]
    for name in names:
        (tmp_path / os.fsdecode(name)).touch()
    assert [name for name, _ in run(export, tmp_path)[0]][1:] == sorted(names)


def test_two_exports_of_one_tree_are_the_same_bytes(export: Path, tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"d{number}").mkdir()
        (tmp_path / f"d{number}" / "f").write_bytes(os.urandom(number * 1000))
    once, again = (subprocess.run([export, tmp_path], capture_output=True, check=True).stdout for _ in range(2))
    assert once == again


def test_a_tree_that_is_too_deep_is_an_error_that_says_where(export: Path, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    found, error, name = run(export, tmp_path)
    assert error != 0
    assert name.startswith(b"d/d/d")
    assert len(found) <= 1001
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


def test_what_is_no_directory_is_an_error(export: Path, tmp_path: Path) -> None:
    assert run(export, tmp_path / "nope") == ([], 2, b"")


def test_a_link_in_the_place_of_the_directory_is_not_followed(export: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("key")
    (tmp_path / "tree").mkdir()
    os.symlink("../secret", tmp_path / "tree" / "link")
    assert [name for name, _ in run(export, tmp_path / "tree")[0]] == [b"", b"link"]
