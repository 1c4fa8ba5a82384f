"""Trees as an image, read back by the kernel: every byte, owner, time and mark is there."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import ConfigError, NotCapturable, NotFound, OutOfSpace
from worldfork.sandbox.microvm import trees

LOOK = """
import hashlib, json, os, stat, sys
found = {}
def see(fd, path):
    for name in [".", *sorted(os.listdir(fd))]:
        info = os.lstat(name, dir_fd=fd)
        place = f"/proc/self/fd/{fd}/{name}"
        marks = {key: os.getxattr(place, key, follow_symlinks=False).hex()
                 for key in os.listxattr(place, follow_symlinks=False)}
        is_directory = stat.S_ISDIR(info.st_mode)
        row = [info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, info.st_rdev, sorted(marks.items())]
        if not is_directory:
            row += [info.st_nlink, info.st_size]
        if stat.S_ISLNK(info.st_mode):
            row.append(os.readlink(name, dir_fd=fd))
        if stat.S_ISREG(info.st_mode):
            file = os.open(name, os.O_RDONLY, dir_fd=fd)
            with open(file, "rb") as content:
                row.append(hashlib.file_digest(content, "sha256").hexdigest())
        found[os.fsencode(path + "/" + name).hex()] = row
        if is_directory and name != ".":
            below = os.open(name, os.O_RDONLY, dir_fd=fd)
            see(below, path + "/" + name)
            os.close(below)
sys.setrecursionlimit(10000)
top = os.open(sys.argv[1], os.O_RDONLY)
see(top, "")
json.dump(found, sys.stdout)
"""

pytestmark = pytest.mark.root


def look(path: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", LOOK, path], check=True, capture_output=True)
    return dict(json.loads(done.stdout))


def look_inside(image: Path, name: str) -> dict[str, Any]:
    """Mount an image where nobody else sees it, and look at one of its trees."""
    mounted = image.parent / "mounted"
    mounted.mkdir(exist_ok=True)
    script = 'mount -t erofs -o ro "$1" "$2" && exec "$3" -c "$4" "$2/$5"'
    argv = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh"]
    done = subprocess.run([*argv, image, mounted, sys.executable, LOOK, name], capture_output=True, text=True)
    if done.returncode and "mount:" in done.stderr:
        pytest.skip(f"this kernel does not mount erofs here: {done.stderr.strip()}")
    assert not done.returncode, done.stderr
    return dict(json.loads(done.stdout))


def mark(path: Path, name: str, value: bytes) -> None:
    os.setxattr(path, name, value, follow_symlinks=False)


def furnish(top: Path) -> None:
    """Make one of everything that a layer can hold."""
    (top / "sub/empty").mkdir(parents=True)
    (top / "plain").write_bytes(b"text")
    os.chown(top / "plain", 70000, 1 << 20)
    os.chmod(top / "plain", 0o6751)
    mark(top / "plain", "user.long", b"v" * 1000)
    mark(top / "plain", "user.nothing", b"")
    mark(top / "plain", "trusted.overlay.origin", b"\0\xfb\x1d")
    mark(top / "plain", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    acl = "0200000001000700ffffffff04000500ffffffff20000500ffffffff"
    mark(top / "sub", "system.posix_acl_default", bytes.fromhex(acl))
    mark(top / "sub", "trusted.overlay.opaque", b"y")
    mark(top / "sub", "trusted.overlay.redirect", b"/elsewhere/sub")
    mark(top / "sub/empty", "user.overlay.opaque", b"y")
    os.link(top / "plain", top / "sub/linked")
    os.mknod(top / "gone", stat.S_IFCHR, os.makedev(0, 0))
    os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(top / "block", stat.S_IFBLK | 0o600, os.makedev(259, 70000))
    os.mkfifo(top / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(top / "socket"))
    for length in (1, 60, 1023, 1024, 1025, 4000):
        os.symlink("x" * length, top / f"link{length}")
    mark(top / "link60", "trusted.of.link", b"1")
    for length in (0, 1, 1023, 1024, 1025, 4095, 4096, 4097, 70_001):
        (top / f"file{length}").write_bytes(random.Random(length).randbytes(length))
    (top / ("n" * 255)).write_bytes(b"")
    (top / os.fsdecode(b"not \xff utf-8\n")).write_bytes(b"")
    times = (-5_000_000_001, 0, 1, 1_234_567_890_123_456_789, 5_000_000_000_000_000_007)
    for moment, name in zip(times, ("fifo", "null", "link1", "plain", "sub"), strict=True):
        os.utime(top / name, ns=(moment, moment), follow_symlinks=False)


def test_all_that_a_layer_holds_is_kept(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    furnish(tmp_path / "one")
    (tmp_path / "two").mkdir(mode=0o711)
    (tmp_path / "two/plain").write_bytes(b"other")
    trees.write_image(tmp_path / "image", {"0": tmp_path / "one", "b": tmp_path / "two"})
    assert look_inside(tmp_path / "image", "0") == look(tmp_path / "one")
    assert look_inside(tmp_path / "image", "b") == look(tmp_path / "two")
    assert stat.S_IMODE((tmp_path / "image").stat().st_mode) == 0o400


def test_an_ordinary_user_is_root_of_its_own_trees_and_others_are_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").mkdir()
    for name, owner in (("mine", 1234), ("root's", 0), ("other", 77)):
        (tmp_path / "one" / name).touch()
        os.chown(tmp_path / "one" / name, owner, owner)
    before = trees.image_id({"0": "x"})
    with monkeypatch.context() as user:
        user.setattr(os, "geteuid", lambda: 1234)
        user.setattr(os, "getegid", lambda: 1234)
        assert trees.image_id({"0": "x"}) != before
        trees.write_image(tmp_path / "image", {"0": tmp_path / "one"})
    owners = {bytes.fromhex(name).decode(): row[1:3] for name, row in look_inside(tmp_path / "image", "0").items()}
    assert owners == {"/.": [65534] * 2, "/mine": [0, 0], "/root's": [65534] * 2, "/other": [65534] * 2}


def test_holes_take_no_room_and_read_as_zeros(tmp_path: Path) -> None:
    top = tmp_path / "tree"
    top.mkdir()
    for name, size, written in (
        ("none", 64 << 20, []),
        ("middle", 64 << 20, [(32 << 20) + 100]),
        ("end", (1 << 20) + 17, [(1 << 20) + 16]),
        ("large", 400 << 20, [0, 200 << 20, (400 << 20) - 3]),
    ):
        with (top / name).open("wb") as file:
            file.truncate(size)
            for at in written:
                file.seek(at)
                file.write(b"xyz"[: size - at])
    trees.write_image(tmp_path / "image", {"t": top})
    assert (tmp_path / "image").stat().st_size < 3 << 20
    assert look_inside(tmp_path / "image", "t") == look(top)


def test_large_and_deep_directories_are_kept(tmp_path: Path) -> None:
    top = tmp_path / "tree"
    top.mkdir()
    for number in range(3000):
        (top / f"file-{number:05}-{'n' * (number % 90)}").write_bytes(b"%d" % number)
    here = os.open(top, os.O_RDONLY)
    for _ in range(60):
        os.mkdir("d" * 100, dir_fd=here)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("bottom", os.O_WRONLY | os.O_CREAT, dir_fd=here))
    os.close(here)
    trees.write_image(tmp_path / "image", {"t": top})
    inside = look_inside(tmp_path / "image", "t")
    assert inside == look(top)
    assert len(inside) > 3060


def test_the_same_trees_give_the_same_image_under_one_name(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    furnish(tmp_path / "tree")
    images = tmp_path / "images"
    first = trees.cached_image(images, {"0": ("ly-1", tmp_path / "tree")})
    content = first.read_bytes()
    assert trees.cached_image(images, {"0": ("ly-1", tmp_path / "gone")}) == first
    first.unlink()
    assert trees.cached_image(images, {"0": ("ly-1", tmp_path / "tree")}).read_bytes() == content
    assert trees.cached_image(images, {"1": ("ly-1", tmp_path / "tree")}) != first
    assert [path.suffix for path in images.iterdir()] == [".erofs"] * 2


def test_an_attribute_beyond_the_format_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotCapturable) as caught:
        trees.pack_attributes({"user.x": bytes(65536)}, "/some/file")
    assert caught.value.what == "/some/file"
    assert trees.pack_attributes({"btrfs.compression": b"zstd"}, "/some/file") == b""


def test_a_tree_that_is_gone_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        trees.write_image(tmp_path / "image", {"0": tmp_path / "gone"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "longer-than-8"])
def test_only_short_names_are_taken(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        trees.write_image(tmp_path / "image", {name: tmp_path})


def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/large").write_bytes(os.urandom(3 << 20))
    program = (
        "import resource, signal, sys; from pathlib import Path; from worldfork.sandbox.microvm import trees\n"
        "trees.write_image(Path(sys.argv[1]) / 'small/image', {'0': Path(sys.argv[1]) / 'tree'})"
    )
    script = 'mount -t tmpfs -o size=1m none "$1/small" && "$2" -c "$3" "$1"; ls -A "$1/small"'
    (tmp_path / "small").mkdir()
    argv = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", tmp_path, sys.executable, program]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert OutOfSpace.__name__ in done.stderr
    assert done.stdout == ""
