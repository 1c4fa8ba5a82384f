"""Trees go away, and nothing else does."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from worldfork.core import beneath, remove
from worldfork.core.errors import ConfigError, StoreError
from worldfork.core.remove import remove_tree


def test_removes_files_links_and_special_files(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "file").write_text("x")
    (tree / "a" / os.fsdecode(b"not-utf8-\xff")).write_text("x")
    os.mkfifo(tree / "pipe")
    os.symlink("/nowhere", tree / "dangling")
    remove_tree(tree)
    assert not tree.exists()


def test_a_path_that_does_not_exist_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")
    remove_tree(tmp_path / "none" / "below")


@pytest.mark.parametrize("path", ["/", "..", "a/.."])
def test_refuses_a_path_without_a_last_name(path: str) -> None:
    with pytest.raises(ConfigError):
        remove_tree(Path(path))


def test_a_link_is_removed_and_what_it_points_at_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    tree = tmp_path / "tree"
    tree.mkdir()
    os.symlink(outside, tree / "link")
    os.symlink(outside, tmp_path / "top")
    remove_tree(tree)
    remove_tree(tmp_path / "top")
    assert (outside / "keep").read_text() == "x"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["outside"]


def test_relative_to_a_directory(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    above = os.open(tmp_path, os.O_PATH)
    try:
        remove_tree(Path("a/b"), dir_fd=above)
        remove_tree(Path("a"), dir_fd=above)
    finally:
        os.close(above)
    assert not list(tmp_path.iterdir())


def test_deeper_than_any_stack_or_path(tmp_path: Path) -> None:
    depth = 1500
    (tmp_path / "tree").mkdir()
    here = os.open(tmp_path / "tree", os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("directory", dir_fd=here)
        below = os.open("directory", os.O_RDONLY, dir_fd=here)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
        os.close(here)
        here = below
    os.close(here)
    before = len(os.listdir("/proc/self/fd"))
    remove_tree(tmp_path / "tree")
    assert not list(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_openat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beneath, "_openat2", lambda: None)
    (tmp_path / "tree" / "a").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "file").write_text("x")
    remove_tree(tmp_path / "tree")
    assert not list(tmp_path.iterdir())


def test_many_entries(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    for number in range(3000):
        os.mknod(tmp_path / "tree" / f"a-file-with-a-name-{number}")
    remove_tree(tmp_path / "tree")
    assert not list(tmp_path.iterdir())


def remove_shut_tree(tree: Path) -> None:
    (tree / "shut" / "below").mkdir(parents=True)
    (tree / "shut" / "below" / "file").write_text("x")
    (tree / "read-only").mkdir()
    (tree / "read-only" / "file").write_text("x")
    for shut in (tree / "read-only", tree / "shut" / "below", tree / "shut", tree):
        shut.chmod(0o500 if shut.name == "read-only" else 0)
    remove_tree(tree)
    assert not tree.exists()


@pytest.mark.root
def test_opens_up_directories_of_our_own() -> None:
    # Not under tmp_path: its parents belong to root alone, and the interpreter may too, so fork and stay in it.
    with tempfile.TemporaryDirectory() as place:
        os.chown(place, 65534, 65534)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                remove_shut_tree(Path(place) / "tree")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


MOUNTED = """
import errno, os, subprocess, sys
from pathlib import Path
from worldfork.core import beneath, remove
from worldfork.core.errors import StoreError
place = Path(sys.argv[1])
if sys.argv[2] == "without":
    beneath._openat2 = lambda: None
tree, host = place / "tree", place / "host"
for made in (tree / "sub" / "mounted", tree / "sub" / "memory", host / "deep", tree / "other"):
    made.mkdir(parents=True)
(host / "deep" / "keep").write_text("x")
(host / "single").write_text("x")
(tree / "single").write_text("under")
(tree / "other" / "file").write_text("x")
def mount(*args):
    subprocess.run(["mount", *map(str, args)], check=True)
mount("--bind", host, tree / "sub" / "mounted")
mount("-t", "tmpfs", "none", tree / "sub" / "memory")
(tree / "sub" / "memory" / "keep").write_text("x")
mount("--bind", host / "single", tree / "single")
try:
    remove.remove_tree(tree)
except StoreError as error:
    found = dict(error.failures)
else:
    raise AssertionError("nothing was refused")
assert found[str(tree / "sub" / "mounted")] == errno.EXDEV, found
assert found[str(tree / "sub" / "memory")] == errno.EXDEV, found
assert found[str(tree / "single")] == errno.EBUSY, found
assert not (tree / "other").exists()
assert (host / "deep" / "keep").read_text() == "x"
assert (host / "single").read_text() == "x"
assert (tree / "sub" / "memory" / "keep").read_text() == "x"
try:
    remove.remove_tree(tree / "sub" / "mounted")
except StoreError as error:
    assert dict(error.failures) == {str(tree / "sub" / "mounted"): errno.EXDEV}, error.failures
else:
    raise AssertionError("a mount point was entered")
assert (host / "deep" / "keep").read_text() == "x"
for mounted in (tree / "sub" / "mounted", tree / "sub" / "memory", tree / "single"):
    subprocess.run(["umount", str(mounted)], check=True)
remove.remove_tree(tree)
assert not tree.exists() and (host / "deep" / "keep").exists()
"""


@pytest.mark.root
@pytest.mark.parametrize("openat2", ["with", "without"])
def test_never_enters_a_mount(tmp_path: Path, openat2: str) -> None:
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", MOUNTED, str(tmp_path), openat2],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(remove.__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.root
def test_one_failure_does_not_keep_the_rest(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("a", "b", "c"):
        (tree / name).mkdir(parents=True)
        (tree / name / "file").write_text("x")
    if subprocess.run(["chattr", "+i", str(tree / "b" / "file")], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no immutable files")
    try:
        with pytest.raises(StoreError) as caught:
            remove_tree(tree)
        assert caught.value.fields["failures"] == [(str(tree / "b" / "file"), errno.EPERM)]
        assert [entry.name for entry in tree.iterdir()] == ["b"]
    finally:
        subprocess.run(["chattr", "-i", str(tree / "b" / "file")], check=True)
    remove_tree(tree)
    assert not tree.exists()
