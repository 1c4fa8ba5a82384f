"""The leak check must be able to fail."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests import leaks


def left(before: leaks.Look, home: Path) -> list[str]:
    return leaks.wait_until_clean(before, home, deadline_s=0.05)


def test_clean(tmp_path: Path) -> None:
    assert left(leaks.look(tmp_path), tmp_path) == []


def test_a_child_is_named(tmp_path: Path) -> None:
    before = leaks.look(tmp_path)
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert any(f"processes: {child.pid} 'sleep 60'" in line for line in left(before, tmp_path))
    finally:
        child.kill()
        child.wait()
    assert left(before, tmp_path) == []


def test_a_process_that_is_no_child_is_known_by_its_lock(tmp_path: Path) -> None:
    (tmp_path / "locks").mkdir()
    lock = tmp_path / "locks" / "sb-aaaaaaaaaaaaaaaa"
    before = leaks.look(tmp_path)
    program = (
        "import fcntl, os, sys\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "file = open(sys.stdin.readline().strip(), 'w'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print(os.getpid(), flush=True); sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        parent.stdin.write(f"{lock}\n")
        parent.stdin.flush()
        orphan = int(parent.stdout.readline())
        parent.wait()
        assert any(f"processes: {orphan} " in line and "lock" in line for line in left(before, tmp_path))
    end_s = time.monotonic() + 5
    with open(lock, "w") as file:
        while time.monotonic() < end_s:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.01)


def test_a_descriptor_is_named(tmp_path: Path) -> None:
    before = leaks.look(tmp_path)
    with open(tmp_path / "file", "w"):
        assert any("descriptors: " in line and str(tmp_path / "file") in line for line in left(before, tmp_path))


def test_a_thread_is_named(tmp_path: Path) -> None:
    before = leaks.look(tmp_path)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left-over")
    thread.start()
    try:
        assert "threads: left-over" in left(before, tmp_path)
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("room", ["run", "trash"])
def test_an_entry_of_the_home_is_named(tmp_path: Path, room: str) -> None:
    before = leaks.look(tmp_path)
    (tmp_path / room / "sb-aaaaaaaaaaaaaaaa").mkdir(parents=True)
    assert left(before, tmp_path) == [f"home_entries: {tmp_path / room}/sb-aaaaaaaaaaaaaaaa"]


def test_shared_memory_is_named(tmp_path: Path) -> None:
    before = leaks.look(tmp_path)
    planted = Path(f"/dev/shm/worldfork-test-{os.getpid()}")
    planted.touch()
    try:
        assert left(before, tmp_path) == [f"shared_memory: {planted}"]
    finally:
        planted.unlink()


@pytest.mark.root
def test_an_empty_cgroup_is_named(tmp_path: Path) -> None:
    roots = [root for kind, root in leaks._cgroup_roots() if os.access(root, os.W_OK)]
    if not roots:
        pytest.skip("no cgroup hierarchy is writable")
    before = leaks.look(tmp_path)
    planted = roots[-1] / f"worldfork-test-{os.getpid()}"
    planted.mkdir()
    try:
        assert left(before, tmp_path) == [f"cgroups: {planted} (0 processes)"]
    finally:
        planted.rmdir()


@pytest.mark.root
def test_a_mount_is_named(tmp_path: Path) -> None:
    # Mounted in a namespace of its own, where this process cannot be: so the rule is tried on two looks.
    before = leaks.look(tmp_path)
    after = leaks.Look(**{**vars(before), "mounts": {"999": f"999 1 0:1 / {tmp_path} rw - tmpfs"}})
    assert leaks.differences(before, after) == [f"mounts: 999 1 0:1 / {tmp_path} rw - tmpfs"]


def test_a_removed_cgroup_that_the_kernel_keeps_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "ALONE", True)
    before = leaks.look(tmp_path)
    grown = {name: count + 100 for name, count in before.dying_cgroups.items()} | {"planted": 100}
    lines = leaks.differences(before, leaks.Look(**{**vars(before), "dying_cgroups": grown}))
    assert any("100 more removed ones in planted" in line for line in lines)
