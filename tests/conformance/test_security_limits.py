"""Security: limits that cannot be lifted or evaded from inside."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
from tests.conformance.attack import Factory, attacked, facts, prisons
from tests.conformance.inside import python, shell

from worldfork.core.errors import OutOfSpace
from worldfork.lineage import measuring
from worldfork.lineage.watch import DEEPEST, IMMEASURABLE, tree_bytes

pytestmark = pytest.mark.timeout(240)
prison = prisons()


@pytest.mark.behaviour("security-18")
def test_the_knobs_of_its_cgroups_stay_as_they_were(prison: Factory) -> None:
    box = prison(memory_mb=200, pids=100, cpus=0.5)
    groups = facts(box).cgroups
    if not groups:
        pytest.skip("a capability that this driver has not got here: limits")
    names = ("memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max", "release_agent",
             "notify_on_release", "cgroup.clone_children")  # fmt: skip
    before = {path: path.read_text() for group in groups for name in names if (path := Path(group, name)).exists()}
    assert before
    program = """
answers = []
for top in ("/sys/fs/cgroup", "/proc/self/root/sys/fs/cgroup", "/mnt", "/proc/1/root/sys/fs/cgroup", *sys.argv[1:]):
    for name in ("memory.limit_in_bytes", "memory.max", "pids.max", "cgroup.procs", "tasks", "release_agent"):
        answers.append(attempt(os.open, f"{top}/{name}", os.O_WRONLY))
tell(answers)
"""
    answers = attacked(box, program, *groups)
    assert set(answers) <= {"ENOENT", "EACCES", "ENOTDIR", "EPERM", "EROFS"}
    assert {path: path.read_text() for path in before} == before


@pytest.mark.behaviour("security-18")
def test_directories_nested_out_of_sight_do_not_hide_what_they_hold(prison: Factory) -> None:
    box = prison(disk_mb=40)
    program = f"""
import os, signal
for _ in range({DEEPEST} + 40):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
for n in range(3):
    with open(str(n), "wb") as file:
        file.write(bytes(30 << 20))
print("written", flush=True)
signal.pause()
"""
    with pytest.raises(OutOfSpace) as ended:
        python(box, program, timeout=60)
    assert ended.value.scope == "sandbox"


def deep(top: Path, levels: int) -> None:
    fd = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d" * 200, dir_fd=fd)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
    os.close(fd)


@pytest.mark.behaviour("security-18")
def test_the_measure_of_a_tree_counts_all_and_no_link(tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    for directory in (outside, tree / "a" / "b"):
        directory.mkdir(parents=True)
    (outside / "big").write_bytes(os.urandom(8 << 20))
    (tree / "a" / "b" / "file").write_bytes(os.urandom(1 << 20))
    os.link(tree / "a" / "b" / "file", tree / "again")
    (tree / "out").symlink_to(outside)
    (tree / "file-out").symlink_to(outside / "big")
    size = tree_bytes(str(tree))
    assert 1 << 20 <= size < 2 << 20
    assert tree_bytes(str(tmp_path / "nowhere")) == 0
    (tmp_path / "link").symlink_to(tree)
    assert tree_bytes(str(tmp_path / "link")) == 0
    deep(tree, DEEPEST - 2)
    assert size <= tree_bytes(str(tree)) < 4 << 20
    (tmp_path / "deeper").mkdir()
    deep(tmp_path / "deeper", DEEPEST + 1)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert tree_bytes(str(tmp_path / "deeper")) == IMMEASURABLE
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.behaviour("security-18")
def test_a_flood_of_empty_files_is_a_use_of_disk(prison: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    box = prison(disk_mb=40)
    if box._inner._live.facts.ids:
        pytest.skip("files of other ids are measured by another process, where nothing can be made smaller")
    monkeypatch.setattr(measuring, "MOST", 2000)
    with pytest.raises(OutOfSpace) as ended:
        python(box, "for n in range(3000): open(str(n), 'w').close()\nimport signal; signal.pause()", timeout=60)
    assert ended.value.scope == "sandbox"
    death = box.cause_of_death()
    assert death is not None
    assert death.own


@pytest.mark.behaviour("security-18")
def test_the_measure_of_a_tree_counts_its_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(3):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "file").touch()
    monkeypatch.setattr(measuring, "MOST", 6)
    assert tree_bytes(str(tmp_path)) < 1 << 20
    monkeypatch.setattr(measuring, "MOST", 5)
    assert tree_bytes(str(tmp_path)) == IMMEASURABLE


@pytest.mark.behaviour("security-18")
def test_the_measure_of_a_tree_that_changes_never_leaves_it(tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    outside.mkdir()
    tree.mkdir()
    (outside / "big").write_bytes(bytes(32 << 20))
    enough = threading.Event()

    def swap() -> None:
        while not enough.is_set():
            (tree / "d").mkdir()
            (tree / "d").rename(tree / "e")
            (tree / "d").symlink_to(outside)
            (tree / "d").unlink()
            (tree / "e").rmdir()

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        sizes = [tree_bytes(str(tree)) for _ in range(3000)]
    finally:
        enough.set()
        swapper.join()
    assert max(sizes) < 1 << 20


@pytest.mark.behaviour("security-18")
def test_shared_memory_and_devices_are_bounded(prison: Factory) -> None:
    box = prison(memory_mb=100)
    # /dev/shm is half of the memory, /dev a little.
    program = """
def fill(path):
    with open(path, "wb", buffering=0) as file:
        for _ in range(200):
            file.write(bytes(1 << 20))
    return "filled"
answers = [attempt(fill, path) for path in ("/dev/shm/file", "/dev/file")]
for path in ("/dev/shm/file", "/dev/file"):
    os.unlink(path)
def many():
    for n in range(100000):
        os.close(os.open(f"/dev/n{n}", os.O_CREAT | os.O_WRONLY))
    return "made"
def terminals():
    import resource
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened = []
    for _ in range(1000):
        opened.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
tell([*answers, attempt(many), attempt(terminals)])
"""
    assert attacked(box, program) == ["ENOSPC"] * 4
    assert shutil.disk_usage("/dev/shm").free > 0
    assert shell(box, "echo on") == "on"
