"""Memory: checkpoints that hold what runs, and forks that go on with it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conformance.conftest import Sandboxes
from tests.conformance.inside import processes, shell, wait_for

from worldfork import CheckpointType, ConfigError, Sandbox, SandboxStatus, SnapshotInfo, SnapshotStatus, SnapshotStore
from worldfork.core.errors import LaunchFailed, NotCapturable, NotFound
from worldfork.lineage.place import place

HOOK = "/etc/worldfork/after-fork"
KEEPER = """
import os, sys
kept, log = bytearray(8 << 20), open("/srv/log", "a")
for number, line in enumerate(sys.stdin):
    kept[number * 4096] = 1
    print(line.strip(), number, sum(kept), file=log, flush=True)
"""
"""For each line that it is sent it says how many there were, as its memory and its open file know it."""
WHO = (
    "cat /etc/hostname /etc/machine-id /proc/sys/kernel/random/uuid; hostname; date +%s; "
    "echo $WORLDFORK_SANDBOX_ID $WORLDFORK_FORK_INDEX $WORLDFORK_SEED"
)


def memory_of(box: Sandbox, **options: object) -> SnapshotInfo:
    """Take a memory checkpoint; a throw-away, unless told otherwise: it is not written out to the disk."""
    options.setdefault("level", "volatile")
    return box.checkpoint(checkpoint_type=CheckpointType.MEMORY, **options)  # type: ignore[arg-type]


def keep(box: Sandbox) -> int:
    """Start what lives through checkpoints, and return its pid inside."""
    pid = box.start_process("python", ["-c", KEEPER], stdin_mode="pipe").pid
    told(box, pid, "begin")
    return pid


def told(box: Sandbox, pid: int, word: str) -> list[str]:
    """Send it a word; return all that it has said since its start."""
    box.write_stdin(pid, f"{word}\n".encode())
    shell(box, f"until grep -q ^{word} /srv/log 2>/dev/null; do sleep 0.02; done", timeout=60)
    return box.read_file("/srv/log").decode().splitlines()


@pytest.mark.behaviour("memory-1")
def test_what_runs_is_in_the_snapshot_and_its_source_goes_on(sandboxes: Sandboxes, box: Sandbox) -> None:
    pid = keep(box)
    shell(box, "echo disk > /srv/file; echo shared > /dev/shm/file")
    snapshot = memory_of(box, level="local", label="running", wait_until="completed")
    assert (snapshot.snapshot_type, snapshot.label) == (CheckpointType.MEMORY, "running")
    assert snapshot.status is SnapshotStatus.COMPLETED
    assert (snapshot.pause_s or 0) > 0
    assert told(box, pid, "source") == ["begin 0 1", "source 1 2"]
    shell(box, "echo later > /srv/file")
    fork = sandboxes.restore(snapshot)
    assert told(fork, pid, "fork") == ["begin 0 1", "fork 1 2"]
    assert shell(fork, "cat /srv/file /dev/shm/file") == "disk\nshared"
    assert told(box, pid, "again") == ["begin 0 1", "source 1 2", "again 2 3"]
    assert (processes(box), processes(fork)) == (1, 1)


@pytest.mark.behaviour("memory-2")
def test_each_fork_goes_on_by_itself_at_any_depth(sandboxes: Sandboxes, box: Sandbox) -> None:
    pid, at = keep(box), box
    for depth in range(3):
        one, other = sandboxes.fork(at, 2, memory=True)
        assert told(one, pid, f"one{depth}")[-1] == f"one{depth} {depth + 1} {depth + 2}"
        assert told(other, pid, f"other{depth}")[-1] == f"other{depth} {depth + 1} {depth + 2}"
        assert f"other{depth}" not in one.read_file("/srv/log").decode()
        other.terminate()
        at = one
    assert box.read_file("/srv/log") == b"begin 0 1\n"
    # Its disk is one like any other.
    assert SnapshotStore().read_file(at.checkpoint().snapshot_id, "/srv/log") == at.read_file("/srv/log")


@pytest.mark.behaviour("memory-3")
def test_a_fork_has_its_own_identity_before_it_is_handed_out(sandboxes: Sandboxes, box: Sandbox) -> None:
    snapshot = memory_of(box)
    time.sleep(1.5)  # a clock that was copied and not set would be that late
    forks = sandboxes.fork(snapshot, 3, seeds=[7, 8, 9])
    seen = [shell(one, WHO).split() for one in (box, *forks)]
    for what, name in enumerate(("host name", "machine id", "random", "host name")):
        assert len({row[what] for row in seen}) == len(seen), name
    for index, (one, row) in enumerate(zip(forks, seen[1:], strict=True)):
        assert (row[0], row[3]) == (one.sandbox_id, one.sandbox_id)
        assert row[5:] == [one.sandbox_id, str(index), str(7 + index)]
        assert abs(int(row[4]) - time.time()) < 30
    clock = "import time; print(time.time())"
    before_s = time.time()
    inside_s = float(forks[0].run("python", ["-c", clock]).stdout)
    assert before_s - 0.5 < inside_s < time.time() + 0.5


@pytest.mark.behaviour("memory-4")
def test_a_hook_runs_first_and_its_failure_is_that_child_s(sandboxes: Sandboxes, box: Sandbox) -> None:
    line = '#!/bin/sh\necho "$WORLDFORK_SANDBOX_ID $WORLDFORK_FORK_INDEX" > /srv/hook\n[ $WORLDFORK_FORK_INDEX != 1 ]\n'
    box.write_file(HOOK, line, mode=0o755)
    results = memory_of(box).fork(3)
    children = [sandboxes.keep(child) for child in results.sandboxes]
    assert [type(result.error) for result in results] == [type(None), LaunchFailed, type(None)]
    assert HOOK in str(results[1].error)
    for child in children:
        assert shell(child, "cat /srv/hook") == f"{child.sandbox_id} {child.fork_index}"
    assert box.run("test", ["-e", "/srv/hook"]).exit_code == 1
    # A fork without memory has nothing to renew.
    assert sandboxes.fork(box, 1)[0].run("test", ["-e", "/srv/hook"]).exit_code == 1


CALL = """
import socket, time
one = socket.create_connection(("10.0.2.2", {port}), 20)
open("/srv/on", "w")
time.sleep(900)
"""


@pytest.fixture
def port() -> Iterator[int]:
    """A server of the host."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.behaviour("memory-5")
def test_connections_that_leave_are_refused_unless_told_otherwise(sandboxes: Sandboxes, port: int) -> None:
    box = sandboxes.create(network="host")
    assert place().store.snapshot(memory_of(box).snapshot_id).facts.get("connections") is None
    box.start_process("python", ["-c", CALL.format(port=port)])
    wait_for(box, "/srv/on")
    before = len(Sandbox.list_all_snapshots())
    with pytest.raises(NotCapturable) as refused:
        memory_of(box)
    assert f"10.0.2.2:{port}" in json.dumps(refused.value.fields)
    assert refused.value.remedy
    assert len(Sandbox.list_all_snapshots()) == before
    for decided in ("keep", "close"):
        record = place().store.snapshot(memory_of(box, outside=decided).snapshot_id)
        assert record.facts["connections"]["decided"] == decided
        assert f"10.0.2.2:{port}" in json.dumps(record.facts["connections"]["found"])
    memory_of(box)  # they are closed


@pytest.mark.behaviour("memory-6")
def test_a_suspended_sandbox_comes_back_as_the_one_it_was(sandboxes: Sandboxes) -> None:
    box = sandboxes.create(name="rests", seed=77)
    pid = keep(box)
    box.suspend()
    assert box.status is SandboxStatus.SUSPENDED
    assert (box.sandbox_id, SandboxStatus.SUSPENDED) in {(one.sandbox_id, one.status) for one in Sandbox.list()}
    again = sandboxes.keep(Sandbox.resume("rests"))
    assert (again.sandbox_id, again.name, again.seed) == (box.sandbox_id, "rests", 77)
    assert told(again, pid, "awake") == ["begin 0 1", "awake 1 2"]
    with pytest.raises(NotFound):
        Sandbox.resume("rests")


@pytest.mark.behaviour("memory-7")
def test_what_a_memory_snapshot_cannot_do_is_refused(box: Sandbox, tmp_path: Path) -> None:
    snapshot, store = memory_of(box).snapshot_id, SnapshotStore()
    remote = tmp_path / "remote"
    calls: list[Callable[[], object]] = [
        lambda: store.list_directory(snapshot),
        lambda: store.digest(snapshot),
        lambda: store.push([snapshot], str(remote)),
        lambda: Sandbox.create(snapshot_id=snapshot, memory_mb=512),
        lambda: memory_of(box, level="exported"),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as refused:
            call()
        assert refused.value.remedy
    assert not remote.exists()
    assert box.run("true").ok
