"""Bytes that are copied, and bytes that are shared: on real file systems that can share, and on one that cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worldfork.content import share
from worldfork.content.share import CannotShare, Cloning, share_bytes

MIB = 1 << 20


@pytest.mark.parametrize("clones", [True, False])
def test_a_copy_has_the_bytes_and_the_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clones: bool) -> None:
    if not clones:
        monkeypatch.setattr(Cloning, "_cloned", lambda *_: False)
    with open(tmp_path / "source", "wb") as file:
        file.write(os.urandom(100_000))
        file.seek(6 * MIB)
        file.write(b"x" * 5)
        file.truncate(9 * MIB)
    for sparse in (True, False):
        with open(tmp_path / "source", "rb") as source, open(tmp_path / "target", "wb") as target:
            Cloning().copy(source.fileno(), target.fileno(), 9 * MIB, sparse=sparse)
        assert (tmp_path / "target").read_bytes() == (tmp_path / "source").read_bytes()
        if sparse:
            assert (tmp_path / "target").stat().st_blocks * 512 < MIB


def test_a_source_that_ends_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cloning, "_cloned", lambda *_: False)
    (tmp_path / "source").write_bytes(b"abc")
    with open(tmp_path / "source", "rb") as source, open(tmp_path / "target", "wb") as target:
        with pytest.raises(OSError, match="shorter"):
            Cloning().copy(source.fileno(), target.fileno(), 4, sparse=False)


def test_where_it_cannot_be_it_says_so() -> None:
    memory = [os.memfd_create(name) for name in ("one", "other")]
    try:
        for fd in memory:
            os.write(fd, bytes(MIB))
        with pytest.raises(CannotShare):
            share_bytes(memory[0], memory[1], MIB)
    finally:
        for fd in memory:
            os.close(fd)


ON_A_DISK = """
import os, subprocess, sys
from pathlib import Path
image, point = Path(sys.argv[1]), Path(sys.argv[2])
mounted = subprocess.run(["mount", "-o", "loop", str(image), str(point)], capture_output=True, text=True)
if mounted.returncode:
    print(mounted.stderr)
    sys.exit(77)
from worldfork.content.share import Cloning, share_bytes
size = 40 * (1 << 20) + 123
data = os.urandom(size)
names = ("one", "other", "differs")
for name in names:
    (point / name).write_bytes(data)
with open(point / "differs", "r+b") as file:
    file.seek(20 << 20)
    file.write(b"here")
os.chmod(point / "other", 0)
for name in names:
    os.setxattr(point / name, "user.k", name.encode())
os.sync()
before = {name: os.stat(point / name) for name in names}
free = os.statvfs(point).f_bfree
fds = {name: os.open(point / name, os.O_RDONLY) for name in names}
assert share_bytes(fds["one"], fds["other"], size) == size
assert share_bytes(fds["one"], fds["other"], size) == size, "again is fine"
assert share_bytes(fds["one"], fds["differs"], size) < 21 << 20
os.sync()
freed = (os.statvfs(point).f_bfree - free) * os.statvfs(point).f_frsize
assert freed > 35 << 20, freed
for name in names:
    now, then = os.stat(point / name), before[name]
    assert (now.st_mtime_ns, now.st_ctime_ns, now.st_ino, now.st_nlink, now.st_mode) == (
        then.st_mtime_ns, then.st_ctime_ns, then.st_ino, then.st_nlink, then.st_mode), name
    assert os.getxattr(point / name, "user.k") == name.encode()
assert (point / "other").read_bytes() == data
with open(point / "other", "r+b") as file:
    file.write(b"changed")
assert (point / "one").read_bytes() == data, "a write to one is not seen in the other"
assert (point / "differs").read_bytes()[20 << 20 :][:4] == b"here"
target = os.open(point / "clone", os.O_WRONLY | os.O_CREAT)
cloning = Cloning()
assert cloning._cloned(fds["one"], target)
assert (point / "clone").read_bytes() == data
for fd in (*fds.values(), target):
    os.close(fd)
subprocess.run(["umount", str(point)], check=True)
"""


def image_of(kind: str, directory: Path, size_bytes: int) -> Path:
    """Make a disk of a kind in a file, or skip."""
    program = shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None:
        pytest.skip(f"there is no mkfs.{kind} (Debian package {'xfsprogs' if kind == 'xfs' else 'btrfs-progs'})")
    image = directory / f"{kind}.img"
    with open(image, "wb") as file:
        file.truncate(size_bytes)
    subprocess.run([program, str(image)], check=True, capture_output=True)
    return image


@pytest.mark.root
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_equal_files_share_their_bytes_and_nobody_notices(tmp_path: Path, kind: str) -> None:
    image = image_of(kind, tmp_path, 400 * MIB)
    point = tmp_path / "point"
    point.mkdir()
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", ON_A_DISK, str(image), str(point)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(share.__file__).parents[2])},
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"{kind} cannot be mounted from a file here: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr
