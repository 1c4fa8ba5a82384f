"""PID 1: file operations in a process of their own."""

from __future__ import annotations

import errno
import os
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.native import raw_client as raw
from tests.unit.native.raw_client import Ending, RawClient

pytestmark = pytest.mark.sandbox
Operation = Callable[..., Ending]


@pytest.fixture
def work() -> Iterator[Path]:
    """The directory of the operations, where any user can get to."""
    with tempfile.TemporaryDirectory(prefix="wf-files-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture
def do(client: RawClient, work: Path) -> Operation:
    """Runs one operation in `work`."""

    def run(*argv: str, stdin: bytes | None = None, user: str = "") -> Ending:
        flags = raw.BUILTIN | (raw.WITH_STDIN if stdin is not None else 0)
        channel = client.start(list(argv), flags, cwd=str(work), env=(), user=user)
        if stdin is not None:
            client.send(raw.STDIN, channel, stdin, raw.EOF_FLAG)
        return client.finish(channel)

    return run


def test_write_and_read(do: Operation, work: Path) -> None:
    path = work / "a/b/file"
    assert do("write", "a/b/file", "4600", stdin=b"hello").code == 0
    assert (path.read_bytes(), path.stat().st_mode & 0o7777) == (b"hello", 0o4600)
    assert do("write", "a/b/file", "-", "append", stdin=b" there").code == 0
    assert do("read", "a/b/file").out == struct.pack("<Q", 11) + b"hello there"
    assert do("read", "a/b/file", "6", "3").out[8:] == b"the"
    assert do("write", "a/b/file", "-", "excl", stdin=b"").code == errno.EEXIST
    assert do("write", "a/b/file", "-", "-", "1500000000123456789", stdin=b"x").code == 0
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (b"x", 1500000000123456789)


@pytest.mark.parametrize("kind", ["directory", "fifo", "socket", "device"])
def test_only_regular_files_have_content(do: Operation, work: Path, kind: str) -> None:
    path = "/dev/zero" if kind == "device" else str(work / "it")
    if kind == "directory":
        os.mkdir(path)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path)
    wanted = errno.EISDIR if kind == "directory" else errno.EINVAL
    for ending in (do("read", path), do("write", path, "-", stdin=b"x")):
        assert ending.code == wanted, ending.err
        assert b"regular" in ending.err or b"directory" in ending.err


def test_a_reader_may_stop_early(client: RawClient, do: Operation, work: Path) -> None:
    with (work / "big").open("wb") as file:
        file.truncate(2 << 30)
    channel = client.start(["read", "big"], raw.BUILTIN, cwd=str(work), credit=1000)
    assert client.frame(channel)[0] == raw.STARTED
    assert client.frame(channel)[2][:8] == struct.pack("<Q", 2 << 30)
    assert client.kill(channel).reason == "cancelled"


def records(packed: bytes) -> dict[str, tuple[str, int, int, str]]:
    found = {}
    while packed:
        kind, mode, _, _, size, _, _, _, length = struct.unpack_from("<cIIIQqQII", packed)
        name, packed = packed[45 : 45 + length], packed[45 + length :]
        length = int.from_bytes(packed[:4], "little")
        target, packed = packed[4 : 4 + length], packed[4 + length :]
        found[name.decode()] = (kind.decode(), mode, size, target.decode())
    return found


def test_list_and_stat(do: Operation, work: Path) -> None:
    (work / "file").write_text("abc")
    (work / "file").chmod(0o640)
    (work / "dir").mkdir(mode=0o755)
    (work / "link").symlink_to("dir")
    (work / "dangling").symlink_to("nowhere")
    listed = records(do("list", ".").out)
    assert listed.keys() == set(os.listdir(work))
    assert listed["file"] == ("f", 0o640, 3, "")
    assert listed["link"][0::3] == ("l", "dir")
    assert records(do("stat", "link").out)["link"][0] == "d"
    assert records(do("stat", "link", "nofollow").out)["link"][0] == "l"
    assert do("stat", "dangling").code == errno.ENOENT
    assert do("list", "file").code == errno.ENOTDIR


def test_delete_follows_no_link(do: Operation, work: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    (work / "tree/sub").mkdir(parents=True)
    (work / "tree/sub/link").symlink_to(outside)
    (work / "link").symlink_to(outside)
    assert do("delete", "link", "recursive").code == 0
    assert do("delete", "tree").code == errno.ENOTEMPTY
    assert do("delete", "tree", "recursive").code == 0
    assert (outside / "precious").exists()
    assert os.listdir(work) == []
    assert do("delete", "tree").code == errno.ENOENT
    assert do("delete", "..", "recursive").code == errno.EINVAL


def test_delete_goes_deeper_than_descriptors_and_paths(do: Operation, work: Path) -> None:
    below = os.open(work, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=below)
        below, above = os.open("d", os.O_RDONLY, dir_fd=below), below
        os.close(above)
    os.close(below)
    assert do("delete", "d", "recursive").code == 0
    assert os.listdir(work) == []


@pytest.mark.parametrize("mount", ["/proc", "/dev"])
def test_delete_does_not_cross_a_mount(do: Operation, mount: str) -> None:
    if not os.path.ismount(mount):
        pytest.skip(f"{mount} is no mount here")
    assert do("delete", mount, "recursive").code in (errno.EXDEV, errno.EBUSY)


def test_the_smaller_operations(do: Operation, work: Path) -> None:
    assert do("mkdir", "x/y", "700").code == 0
    assert (work / "x/y").stat().st_mode & 0o777 == 0o700
    assert do("mkdir", "x/y").code == 0
    (work / "file").touch()
    assert do("mkdir", "file").code == errno.ENOTDIR
    assert do("symlink", "target", "link").code == 0
    assert do("rename", "link", "moved").code == 0
    assert os.readlink(work / "moved") == "target"
    assert do("chmod", "4755", "file").code == 0
    assert do("chmod", "9", "file").code == errno.EINVAL
    assert do("unheard-of").code == errno.ENOSYS


@pytest.mark.root
def test_files_belong_to_the_user(do: Operation, work: Path) -> None:
    assert do("write", "file", "-", stdin=b"", user="nobody").code == errno.EACCES
    work.chmod(0o777)
    assert do("write", "d/file", "-", stdin=b"x" * 60_000, user="nobody").code == 0
    assert ((work / "d/file").stat().st_uid, (work / "d/file").stat().st_size) == (65534, 60_000)


def laid(*things: tuple[bytes, str, bytes, int]) -> bytes:
    return b"".join(
        struct.pack("<cxHIQ", what, mode, len(os.fsencode(path)), len(content)) + os.fsencode(path) + content
        for what, path, content, mode in things
    )


def test_lay_replaces_whatever_stands_in_the_way(do: Operation, work: Path) -> None:
    base, other = work / "base", work / "other"
    for directory in (base, other, base / "dir" / "in", base / "roots" / "deep"):
        directory.mkdir(parents=True)
    (other / "kept").write_text("kept")
    (base / "file").write_text("x")
    (base / "hard").write_text("x")
    os.link(base / "hard", other / "hard")
    (base / "link").symlink_to(other)
    (base / "last").symlink_to(other / "kept")
    os.mkfifo(base / "pipe")
    big = os.urandom(40_000)
    things = laid(
        (b"r", "roots", b"", 0),
        (b"r", "absent/deep", b"", 0),
        (b"r", "link/kept", b"", 0),
        (b"r", "file/below", b"", 0),
        (b"f", "dir", b"1", 0o644),
        (b"f", "file/a/b", b"2", 0o755),
        (b"f", "link/kept", b"3", 0o644),
        (b"f", "last", b"4", 0o644),
        (b"f", "pipe", b"5", 0o4600),
        (b"f", "hard", b"6", 0o644),
        (b"f", "big\udcff", big, 0o600),
        (b"f", "empty", b"", 0o644),
    )
    assert do("lay", "base", stdin=things).code == 0
    found = {
        str(path.relative_to(base)): (path.read_bytes(), path.stat().st_mode & 0o7777)
        for path in base.rglob("*")
        if not path.is_dir()
    }
    assert found == {
        "dir": (b"1", 0o644), "file/a/b": (b"2", 0o755), "link/kept": (b"3", 0o644), "last": (b"4", 0o644),
        "pipe": (b"5", 0o4600), "hard": (b"6", 0o644), "big\udcff": (big, 0o600), "empty": (b"", 0o644),
    }  # fmt: skip
    assert not any(path.is_symlink() for path in base.rglob("*"))
    assert ((other / "kept").read_text(), (other / "hard").read_text()) == ("kept", "x")
    assert not (base / "roots").exists()


@pytest.mark.parametrize("path", ["../out", "a/../../out", "/out", "a//b", "./a", "", "a/", "a\0b"])
def test_lay_stays_below_its_directory(do: Operation, work: Path, path: str) -> None:
    (work / "base" / "a").mkdir(parents=True)
    (work / "out").write_text("kept")
    for what in (b"r", b"f"):
        assert do("lay", "base", stdin=laid((what, path, b"x", 0o644))).code == errno.EINVAL
    assert (work / "out").read_text() == "kept"
    assert [each.name for each in (work / "base").rglob("*")] == ["a"]


@pytest.mark.parametrize("cut", [1, 15, 17, 20])
def test_lay_tells_of_input_that_ends_early(do: Operation, work: Path, cut: int) -> None:
    (work / "base").mkdir()
    assert do("lay", "base", stdin=laid((b"f", "abc", b"content", 0o644))[:cut]).code == errno.EPIPE
    assert do("lay", "base", stdin=b"").code == 0
    assert do("lay", "base", stdin=laid((b"x", "abc", b"", 0))).code == errno.EINVAL
    assert do("lay", "absent", stdin=b"").code == errno.ENOENT
    assert do("lay").code == errno.EINVAL
