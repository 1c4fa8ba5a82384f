"""Checkpoints: of sandboxes that go on, with and without processes in them, and of those that end."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conformance.conftest import Sandboxes
from tests.conformance.inside import SLEEPER, processes, shell, wait_for

from worldfork import CheckpointType, ConfigError, Sandbox, SandboxDied, SnapshotInfo, SnapshotStatus
from worldfork.core.errors import NotCapturable
from worldfork.lineage.place import place
from worldfork.sandbox.driver import Capabilities

Needs = Callable[[str], None]
MIB = 1 << 20


def layers(snapshot: SnapshotInfo) -> list[Path]:
    """The directories of a snapshot's layers, the newest first."""
    store = place().store
    return [store.layer_path(layer) for layer in store.snapshot(snapshot.snapshot_id).layers]


def disk_bytes(top: Path) -> int:
    """What a directory takes on disk."""
    return sum(path.lstat().st_blocks * 512 for path in top.rglob("*"))


def settle(box: Sandbox) -> None:
    """Let a tick of the kernel's clock pass, after which a change time tells whether a file was changed again."""
    shell(box, "sleep 0.05")


@pytest.mark.behaviour("checkpoint-1")
def test_an_idle_sandbox_goes_on(sandboxes: Sandboxes, box: Sandbox) -> None:
    box.write_file("/srv/f", b"before")
    snapshot = box.checkpoint()
    assert box.read_file("/srv/f") == b"before"
    box.write_file("/srv/f", b"after")
    shell(box, "echo new > /srv/g")
    assert shell(box, "cat /srv/f; cat /srv/g") == "afternew"
    restored = sandboxes.restore(snapshot)
    assert shell(restored, "cat /srv/f; ls /srv") == "beforef"
    # Its own files are still there, its processes and mounts work as before.
    assert box.read_file("/etc/hostname").decode().strip() == shell(box, "hostname")
    assert shell(box, "ls /proc/self/exe /dev/null /dev/shm /sys/kernel -d | wc -l") == "4"
    assert shell(box, "pwd; cd /tmp && touch x && ls") == "/workspace\nx"


@pytest.mark.behaviour("checkpoint-2")
def test_a_sandbox_with_a_sleeping_shell_goes_on(sandboxes: Sandboxes, box: Sandbox) -> None:
    agent = box.start_process("bash", [], stdin_mode="pipe", working_dir="/srv")
    lines = box.follow_stdout(agent.pid)
    box.write_stdin(agent.pid, b"x=kept; exec 3> open; echo to-file >&3; cd /tmp; echo ready\n")
    assert next(lines).line == "ready"
    snapshot = box.checkpoint()
    assert snapshot.pause_s is not None
    box.write_stdin(agent.pid, b"echo $x $$; echo more >&3; pwd; cat /srv/open\n")
    assert [next(lines).line for _ in range(4)] == [f"kept {agent.pid}", "/tmp", "to-file", "more"]
    restored = sandboxes.restore(snapshot)
    assert (restored.read_file("/srv/open"), processes(restored)) == (b"to-file\n", 0)
    box.kill_process(agent.pid)


@pytest.mark.behaviour("checkpoint-3")
def test_a_second_copy_stores_what_is_new(sandboxes: Sandboxes, box: Sandbox) -> None:
    box.start_process(*SLEEPER)
    shell(box, "mkdir /srv/d; for i in $(seq 40); do head -c 1M /dev/urandom > /srv/d/$i; done")
    settle(box)
    first = box.checkpoint()
    shell(box, "head -c 1M /dev/urandom > /srv/new; rm /srv/d/1; echo >> /srv/d/2")
    settle(box)
    second = box.checkpoint()
    assert disk_bytes(layers(first)[0]) >= 40 * MIB
    # The megabyte that is new, and the one that was touched.
    assert 2 * MIB <= disk_bytes(layers(second)[0]) < 3 * MIB
    assert layers(second)[1:] == layers(first)
    third = box.checkpoint()
    assert layers(third) == layers(second)
    shell(box, "chmod 600 /srv/d/3; touch -d 2001-01-01 /srv/d/4")
    settle(box)
    for snapshot, present in ((first, 41), (second, 40), (box.checkpoint(), 40)):
        restored = sandboxes.restore(snapshot)
        assert shell(restored, "find /srv -type f | wc -l") == str(present - (snapshot is first))
    assert shell(restored, "stat -c %a /srv/d/3; stat -c %Y /srv/d/4") == "600\n978307200"
    assert "ls: " in restored.sh("ls /srv/d/1").stdout


@pytest.mark.behaviour("checkpoint-3")
def test_copies_and_moves_in_turns(sandboxes: Sandboxes, box: Sandbox) -> None:
    wanted: list[str] = []
    for number in range(8):
        busy = box.start_process(*SLEEPER).pid if number % 3 else 0
        shell(box, f"echo {number} > /srv/f{number}; rm -f /srv/f{number - 2}; echo {number} > /srv/same")
        wanted = sorted({*wanted, f"f{number}", "same"} - {f"f{number - 2}"})
        snapshot = box.checkpoint()
        if busy:
            box.kill_process(busy)
        restored = sandboxes.restore(snapshot)
        assert shell(restored, "ls /srv").split() == wanted
        assert restored.read_file("/srv/same") == b"%d\n" % number
        restored.terminate()


@pytest.mark.behaviour("checkpoint-4")
def test_stop_takes_everything_and_ends_the_sandbox(sandboxes: Sandboxes, box: Sandbox) -> None:
    box.start_process("sh", ["-c", "echo $$ > /srv/pid; while :; do echo x >> /srv/log; done"])
    wait_for(box, "/srv/log")
    snapshot = box.checkpoint(stop=True, label="the end")
    assert snapshot.label == "the end"
    with pytest.raises(SandboxDied):
        box.run("true")
    restored = sandboxes.restore(snapshot)
    lines = restored.read_file("/srv/log").split(b"\n")
    assert set(lines) == {b"x", b""}
    assert processes(restored) == 0


@pytest.mark.behaviour("checkpoint-5")
@pytest.mark.parametrize("way", ["idle", "busy", "stopped"])
def test_an_unchanged_sandbox_adds_no_layer(sandboxes: Sandboxes, way: str) -> None:
    box = sandboxes.create()
    before = layers(box.checkpoint())
    box.write_file("/srv/f", b"1")
    snapshot = box.checkpoint()
    assert layers(snapshot) == [layers(snapshot)[0], *before]
    if way == "busy":
        box.start_process(*SLEEPER)
    shell(box, "cat /srv/f; ls -R /etc > /dev/null; cat /usr/bin/env > /dev/null")
    again = box.checkpoint(stop=way == "stopped")
    assert layers(again) == layers(snapshot)
    assert again.snapshot_id != snapshot.snapshot_id
    assert sandboxes.restore(again).read_file("/srv/f") == b"1"


@pytest.mark.behaviour("checkpoint-6")
def test_ready_or_completed(sandboxes: Sandboxes, box: Sandbox) -> None:
    box.write_file("/srv/f", b"1")
    ready = box.checkpoint()
    assert ready.status in (SnapshotStatus.LOCAL_READY, SnapshotStatus.COMPLETED)
    box.write_file("/srv/g", b"2")
    completed = box.checkpoint(wait_until="completed")
    assert completed.status is SnapshotStatus.COMPLETED
    assert Sandbox.get_snapshot(completed.snapshot_id).status is SnapshotStatus.COMPLETED
    assert shell(sandboxes.restore(ready), "ls /srv") == "f"
    with pytest.raises(ValueError):
        box.checkpoint(wait_until="soon")


@pytest.mark.behaviour("checkpoint-7")
def test_what_is_not_in_a_snapshot_is_said(sandboxes: Sandboxes, box: Sandbox) -> None:
    assert box.checkpoint().warnings == ()
    box.write_file("/dev/shm/a", b"1")
    snapshot = box.checkpoint()
    assert len(snapshot.warnings) == 1
    assert "/dev/shm" in snapshot.warnings[0]
    assert box.read_file("/dev/shm/a") == b"1"
    assert sandboxes.restore(snapshot).list_directory("/dev/shm").entries == ()


@pytest.mark.behaviour("checkpoint-8")
def test_a_snapshot_says_what_it_is(sandboxes: Sandboxes, box: Sandbox, base: str) -> None:
    box.write_file("/srv/f", b"1")
    # Else its status may change between two looks.
    snapshot = box.checkpoint(checkpoint_type=CheckpointType.FILESYSTEM, label="one", wait_until="completed")
    assert (snapshot.sandbox_id, snapshot.label, snapshot.snapshot_type, snapshot.base_image) == (
        box.sandbox_id, "one", CheckpointType.FILESYSTEM, base,
    )  # fmt: skip
    assert snapshot.id == snapshot.snapshot_id
    assert snapshot.created_at > 1.6e9
    assert Sandbox.get_snapshot(snapshot.snapshot_id) == pickle.loads(pickle.dumps(snapshot))
    second = sandboxes.restore(snapshot).checkpoint("filesystem")
    assert second.parent_id == snapshot.snapshot_id
    assert [info.snapshot_id for info in box.list_snapshots()] == [snapshot.snapshot_id]
    everything = [info.snapshot_id for info in Sandbox.list_all_snapshots()]
    assert everything.index(snapshot.snapshot_id) < everything.index(second.snapshot_id)


@pytest.mark.behaviour("checkpoint-9")
def test_memory_is_refused_where_it_cannot_be_stored(box: Sandbox, capabilities: Capabilities) -> None:
    if capabilities.memory_checkpoint:
        pytest.skip("this driver stores memory")
    with pytest.raises(NotCapturable):
        box.checkpoint(checkpoint_type=CheckpointType.MEMORY)
    assert box.run("true").ok


@pytest.mark.behaviour("checkpoint-22")
def test_what_a_checkpoint_would_take_is_told_without_one(box: Sandbox, capabilities: Capabilities) -> None:
    shell(box, "head -c 2000000 /dev/urandom > /srv/f; sync")
    before = box.explain()
    assert before.filesystem_bytes >= 2_000_000
    assert before.filesystem_pause_s is None, "nothing runs that could stand still"
    box.start_process(*SLEEPER)
    after = box.explain()
    assert after.filesystem_pause_s is not None
    assert after.filesystem_pause_s > 0
    assert (after.memory_bytes is not None) is capabilities.memory_checkpoint
    assert box.list_snapshots() == []


@pytest.mark.behaviour("checkpoint-16")
def test_commands_may_come_while_checkpoints_are_taken(sandboxes: Sandboxes, box: Sandbox) -> None:
    stop, failures, done = threading.Event(), [], [0]

    def work(name: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            result = box.run("sh", ["-c", f"echo {number} > /srv/{name}; cat /srv/{name}"])
            if (result.exit_code, result.stdout) != (0, f"{number}\n"):
                failures.append(result)
            box.write_file(f"/srv/{name}.file", b"%d" % number)
            done[0] += 1

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(3)]
    for thread in threads:
        thread.start()
    try:
        snapshots = [box.checkpoint() for _ in range(15)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert done[0] > 3
    for snapshot in (snapshots[0], snapshots[-1]):
        restored = sandboxes.restore(snapshot)
        for line in shell(restored, "cat /srv/w? 2>/dev/null || true").splitlines():
            assert int(line) > 0


@pytest.mark.behaviour("checkpoint-16")
def test_checkpoints_of_one_sandbox_at_the_same_time(sandboxes: Sandboxes, box: Sandbox) -> None:
    from concurrent.futures import ThreadPoolExecutor

    box.write_file("/srv/f", b"1")
    with ThreadPoolExecutor(6) as threads:
        snapshots = list(threads.map(lambda number: box.checkpoint(label=str(number)), range(6)))
    assert len({snapshot.snapshot_id for snapshot in snapshots}) == 6
    for snapshot in snapshots:
        assert sandboxes.restore(snapshot).read_file("/srv/f") == b"1"
    assert box.run("true").ok


@pytest.mark.behaviour("checkpoint-17")
def test_a_process_that_was_stopped_stays_stopped(box: Sandbox) -> None:
    info = box.start_process("sleep", ["1000"])
    state = f"sed 's/.*) //; s/ .*//' /proc/{info.pid}/stat"
    box.send_signal(info.pid, 19)
    assert shell(box, f"until [ $({state}) = T ]; do sleep 0.005; done; {state}", timeout=10) == "T"
    box.checkpoint()
    assert shell(box, state) == "T"
    box.send_signal(info.pid, 18)
    assert shell(box, f"until [ $({state}) = S ]; do sleep 0.005; done; {state}", timeout=10) == "S"
    box.checkpoint()
    assert shell(box, state) == "S"


@pytest.mark.behaviour("checkpoint-20")
def test_a_process_that_cannot_be_looked_into_is_no_obstacle(sandboxes: Sandboxes, box: Sandbox) -> None:
    program = (
        "import ctypes, mmap, os, sys\n"
        "assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0\n"  # PR_SET_DUMPABLE
        "fd = os.open('/srv/mapped', os.O_RDWR | os.O_CREAT)\n"
        "os.ftruncate(fd, 4096)\n"
        "page = mmap.mmap(fd, 4096)\n"
        "for number, _ in enumerate(sys.stdin):\n"
        "    page[0] = number; print(number, flush=True)\n"
    )
    closed = box.start_process("python", ["-c", program], stdin_mode="pipe")
    lines = box.follow_stdout(closed.pid)
    for number in range(3):
        box.write_stdin(closed.pid, b"\n")
        assert next(lines).line == str(number)
        assert sandboxes.restore(box.checkpoint()).read_file("/srv/mapped")[0] == number
    box.close_stdin(closed.pid)
    assert list(lines) == []


@pytest.mark.behaviour("checkpoint-20")
def test_processes_of_other_users_are_no_obstacle(sandboxes: Sandboxes, box: Sandbox, needs: Needs) -> None:
    needs("other_users")
    info = box.start_process("sh", ["-c", "echo ready; exec sleep 1000"], user="1234:55")
    assert next(box.follow_stdout(info.pid)).line == "ready"
    box.write_file("/srv/f", b"1")
    assert sandboxes.restore(box.checkpoint()).read_file("/srv/f") == b"1"
    assert box.get_process(info.pid).status == "running"


@pytest.mark.behaviour("checkpoint-18")
def test_many_checkpoints_in_a_row(sandboxes: Sandboxes, box: Sandbox) -> None:
    snapshots = []
    for number in range(60):
        shell(box, f"echo {number} >> /srv/log; echo {number} > /srv/f{number}; rm -f /srv/f{number - 5}")
        snapshots.append(box.checkpoint())
    for number in (0, 7, 30, 59):
        restored = sandboxes.restore(snapshots[number])
        assert restored.read_file("/srv/log") == b"".join(b"%d\n" % n for n in range(number + 1))
        assert shell(restored, "ls /srv | grep ^f | wc -l") == str(min(number + 1, 5))
    assert shell(box, "wc -l < /srv/log") == "60"


@pytest.mark.behaviour("checkpoint-19")
def test_nothing_is_taken_of_a_sandbox_that_is_gone(box: Sandbox) -> None:
    box.terminate()
    before = len(Sandbox.list_all_snapshots())
    for stop in (False, True):
        with pytest.raises(SandboxDied):
            box.checkpoint(stop=stop)
    assert len(Sandbox.list_all_snapshots()) == before


@pytest.mark.behaviour("checkpoint-8")
@pytest.mark.parametrize("stop", [False, True])
def test_a_label_that_cannot_be_kept_costs_nothing(box: Sandbox, stop: bool) -> None:
    box.write_file("/srv/f", b"1")
    for label in ("\udcff", "x" * (1 << 17)):
        with pytest.raises(ConfigError, match="label"):
            box.checkpoint(stop=stop, label=label)
    assert box.read_file("/srv/f") == b"1"
    assert box.list_snapshots() == []
