"""The leak check must be able to fail."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests import leaks

from worldfork.core.ids import new_id


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


def test_what_others_share_in_memory_is_not(tmp_path: Path) -> None:
    before = leaks.look(tmp_path)
    planted = Path("/dev/shm/worldfork-of-somebody-else")
    planted.touch()
    try:
        assert left(before, tmp_path) == []
    finally:
        planted.unlink()


def test_a_grandchild_is_known_by_its_mark(tmp_path: Path) -> None:
    before = leaks.look(tmp_path)
    with orphaned(os.environ) as orphan:
        assert any(f"processes: {orphan} " in line and "mark" in line for line in left(before, tmp_path))


def test_a_process_of_another_run_is_not_named(tmp_path: Path) -> None:
    before = leaks.look(tmp_path)
    with orphaned({**os.environ, leaks.MARK_NAME: "1-1"}) as orphan:
        assert not [line for line in left(before, tmp_path) if str(orphan) in line]


@contextlib.contextmanager
def orphaned(environment: Mapping[str, str]) -> Iterator[int]:
    """Start a process whose parent is gone."""
    program = (
        "import os, sys\nif os.fork(): os._exit(0)\nos.setsid()\nprint(os.getpid(), flush=True); sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent.stdin, parent.stdout:
        orphan = int(parent.stdout.readline())
        parent.wait()
        gone = os.pidfd_open(orphan)
        yield orphan
    select.select([gone], [], [], 5)
    os.close(gone)


@pytest.fixture
def hierarchy() -> Path:
    roots = [root for _, root in leaks._cgroup_roots() if os.access(root, os.W_OK)]
    if not roots:
        pytest.skip("no cgroup hierarchy is writable")
    return roots[-1]


@contextlib.contextmanager
def planted_group(hierarchy: Path, sandbox_id: str) -> Iterator[Path]:
    planted = hierarchy / f"worldfork-{sandbox_id}"
    planted.mkdir()
    try:
        yield planted
    finally:
        planted.rmdir()


@pytest.mark.root
@pytest.mark.parametrize("room", ["run", "locks"])
def test_an_empty_cgroup_of_a_sandbox_of_this_home_is_named(tmp_path: Path, hierarchy: Path, room: str) -> None:
    sandbox_id = new_id("sb")
    (tmp_path / room / sandbox_id).mkdir(parents=True)
    before = leaks.look(tmp_path)
    # It is gone from the home by the time that its group is seen.
    (tmp_path / room / sandbox_id).rmdir()
    with planted_group(hierarchy, sandbox_id) as planted:
        assert left(before, tmp_path) == [f"cgroups: {planted} (0 processes)"]


@pytest.mark.root
def test_an_empty_cgroup_of_nobody_is_named_if_it_stays(
    tmp_path: Path, hierarchy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "BESIDE", False)
    before = leaks.look(tmp_path)
    with planted_group(hierarchy, new_id("sb")) as planted:
        assert left(before, tmp_path) == []
        monkeypatch.setattr(leaks, "DOUBT_S", 0.01)
        assert f"cgroups: nobody knows whose: {planted} (0 processes)" in left(before, tmp_path)


@pytest.mark.root
def test_a_cgroup_of_another_home_is_not_named(
    tmp_path: Path, hierarchy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox_id = new_id("sb")
    (tmp_path / "worldfork-home-other" / "run" / sandbox_id).mkdir(parents=True)
    home = tmp_path / "worldfork-home-own"
    before = leaks.look(home)
    monkeypatch.setattr(leaks, "DOUBT_S", 0.01)
    with planted_group(hierarchy, sandbox_id):
        assert not [line for line in left(before, home) if sandbox_id in line]


@pytest.mark.root
def test_a_cgroup_with_processes_of_others_is_not_named(tmp_path: Path, hierarchy: Path) -> None:
    before = leaks.look(tmp_path)
    with (
        planted_group(hierarchy, new_id("sb")) as planted,
        orphaned({**os.environ, leaks.MARK_NAME: "1-1"}) as orphan,
    ):
        (planted / "cgroup.procs").write_text(str(orphan))
        named = left(before, tmp_path)
        assert not [line for line in named if not line.startswith("descriptors")]
        (hierarchy / "cgroup.procs").write_text(str(orphan))


@pytest.mark.root
def test_a_cgroup_with_a_process_of_this_run_is_named(tmp_path: Path, hierarchy: Path) -> None:
    before = leaks.look(tmp_path)
    with planted_group(hierarchy, new_id("sb")) as planted, orphaned(os.environ) as orphan:
        (planted / "cgroup.procs").write_text(str(orphan))
        assert f"cgroups: {planted} (1 processes)" in left(before, tmp_path)
        (hierarchy / "cgroup.procs").write_text(str(orphan))


@pytest.mark.root
def test_a_mount_is_named(tmp_path: Path) -> None:
    # Mounted in a namespace of its own, where this process cannot be: so the rule is tried on two looks.
    before = leaks.look(tmp_path)
    after = leaks.Look(**{**vars(before), "mounts": {"999": f"999 1 0:1 / {tmp_path} rw - tmpfs"}})
    assert leaks.differences(before, after) == [f"mounts: 999 1 0:1 / {tmp_path} rw - tmpfs"]


def test_a_removed_cgroup_that_the_kernel_keeps_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "ALONE", True)
    monkeypatch.setattr(leaks, "_others", lambda ours: False)
    before = leaks.look(tmp_path)
    grown = {name: count + 100 for name, count in before.dying_cgroups.items()} | {"planted": 100}
    lines = leaks.differences(before, leaks.Look(**{**vars(before), "dying_cgroups": grown}))
    assert any("100 more removed ones in planted" in line for line in lines) is bool(before.dying_cgroups)


@pytest.mark.parametrize("held_by", ["the page cache", "somebody"])
def test_what_the_page_cache_keeps_is_no_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_by: str) -> None:
    dying = {"planted": 100}
    first = leaks.look(tmp_path)

    def look(home: Path) -> leaks.Look:
        return leaks.Look(**{**vars(first), "dying_cgroups": dict(dying)})

    def let_go() -> None:
        if held_by == "the page cache":
            dying["planted"] = 1

    monkeypatch.setattr(leaks, "look", look)
    monkeypatch.setattr(leaks, "CACHED_S", 0.0)
    monkeypatch.setattr(leaks, "_let_go_of_cached_pages", let_go)
    before = leaks.Look(**{**vars(first), "dying_cgroups": {"planted": 1}})
    left = leaks.wait_until_clean(before, tmp_path, deadline_s=0.3 if held_by == "somebody" else 30)
    assert bool(left) is (held_by == "somebody")


def test_what_nobody_knows_of_is_not_looked_for_where_a_stage_runs_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "_cgroups", lambda home, ours: ({"known": "known"}, {"doubtful": "doubtful"}))
    for beside in (True, False):
        monkeypatch.setattr(leaks, "BESIDE", beside)
        seen = leaks.look(tmp_path)
        assert seen.cgroups.keys() == {"known"}
        assert ("doubtful" in seen.doubtful_cgroups) is not beside


def test_removed_cgroups_are_not_counted_where_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "ALONE", True)
    monkeypatch.setattr(leaks, "_others", lambda ours: True)
    before = leaks.look(tmp_path)
    assert before.dying_cgroups == {}
    assert leaks.differences(before, leaks.Look(**{**vars(before), "dying_cgroups": {"planted": 100}})) == []
