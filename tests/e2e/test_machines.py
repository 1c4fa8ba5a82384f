"""Sandboxes in real machines, as a program uses them: both kinds of snapshots, forks, rest, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import machines
from tests.conformance.world import make_world

from worldfork import AsyncSandbox, Sandbox, SandboxStatus, SnapshotStore
from worldfork.core.errors import (
    ConfigError,
    Corrupt,
    DriverUnavailable,
    Locked,
    NotCapturable,
    NotFound,
    OutOfSpace,
    SandboxDied,
)
from worldfork.lineage.place import drop_spares, place
from worldfork.records.death import DeathCause
from worldfork.records.snapshot import CheckpointType
from worldfork.sandbox.microvm.manifest import read_running
from worldfork.sandbox.microvm.qmp import connect

PROGRAM = str(Path(sys.executable).with_name("worldfork"))
MEMORY_MB = 192
MEMORY = CheckpointType.MEMORY
COUNT = "i=0; while :; do i=$((i+1)); echo $i > /dev/shm/new; mv /dev/shm/new /dev/shm/n; sleep 0.2; done"
WHO = "cat /etc/hostname /etc/machine-id /proc/sys/kernel/random/uuid; date +%s; echo $WORLDFORK_SANDBOX_ID"
LISTING = (
    "cd / && find etc/skel etc/default home opt srv -type d -printf '%p d %m %U %G %T@\\n'"
    " -o -printf '%p %y %m %U %G %s %T@ %l\\n' 2>/dev/null | sort && find srv -type f -exec sha256sum {} + | sort"
)

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(machines.missing()), reason=machines.missing()),
]


@pytest.fixture(scope="module", autouse=True)
def base(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A base for machines, in a home that has a kernel for them."""
    images = machines.prepare_images(home / "images")
    if images != home / "images" and not (home / "images").exists():
        (home / "images").symlink_to(images)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLDFORK_ALLOW_TCG", "1")
        yield f"dir:{make_world(tmp_path_factory.mktemp('world') / 'root')}"


@pytest.fixture
def started() -> Iterator[list[Sandbox]]:
    """Sandboxes that end with the test."""
    boxes: list[Sandbox] = []
    yield boxes
    for box in boxes:
        box.terminate()
    drop_spares()


@pytest.fixture
def machine(base: str, started: list[Sandbox]) -> Callable[..., Sandbox]:
    """Starts machines that end with the test."""

    def start(**options: Any) -> Sandbox:
        if "snapshot_id" not in options:
            options = {"base": base, "driver": "microvm", "memory_mb": MEMORY_MB, **options}
        started.append(Sandbox.create(**options))
        return started[-1]

    return start


@pytest.fixture
def box(machine: Callable[..., Sandbox]) -> Sandbox:
    return machine()


def said(box: Sandbox, line: str) -> str:
    return box.sh(line, check=True).stdout


def counting(box: Sandbox) -> None:
    """Let something run that shows whether it goes on."""
    box.start_process("sh", ["-c", COUNT])
    wait_for(lambda: box.run("test", ["-s", "/dev/shm/n"]).ok)


def count(box: Sandbox) -> int:
    return int(said(box, "cat /dev/shm/n"))


def wait_for(condition: Callable[[], bool], limit_s: float = 60) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def memory_of(snapshot_id: str) -> Path:
    return place().store.memory_path(snapshot_id)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_disk_looks_the_same_under_either_driver(machine: Callable[..., Sandbox], started: list[Sandbox]) -> None:
    first = machine()
    said(
        first,
        "mkdir -p /srv/d/e /srv/gone && echo one > /srv/d/e/f && ln /srv/d/e/f /srv/d/twin && ln -s e /srv/d/l &&"
        " mkfifo /srv/pipe && chown 12:34 /srv/d/e && chmod 4751 /srv/d/twin && touch -d '1999-01-02 03:04:05.6'"
        " /srv/d && truncate -s 6M /srv/hole && printf x | dd of=/srv/hole bs=1 seek=5M conv=notrunc 2>/dev/null &&"
        " rm -r /opt /etc/skel && mkdir /opt && echo new > /opt/new",
    )
    expected = said(first, LISTING)
    snapshot = first.checkpoint()
    assert said(first, LISTING) == expected, "the machine goes on with its disk"
    there = Sandbox.create(snapshot_id=snapshot.snapshot_id, driver="namespace")
    started.append(there)
    assert (there.info().driver, said(there, LISTING)) == ("namespace", expected)
    said(there, "mv /srv/d /srv/renamed && rm /opt/new && echo two >> /srv/renamed/twin && mkdir /srv/gone/again")
    expected = said(there, LISTING)
    back = machine(snapshot_id=there.checkpoint().snapshot_id, driver="microvm")
    assert (back.info().driver, said(back, LISTING)) == ("microvm", expected)


def test_an_unchanged_disk_adds_no_layer_and_a_busy_one_stands_still_meanwhile(box: Sandbox) -> None:
    assert box.checkpoint().layers == 1
    counting(box)
    said(box, "echo here > /srv/file")
    snapshot = box.checkpoint()
    assert (snapshot.layers, bool(snapshot.warnings)) == (2, True)
    assert SnapshotStore().read_file(snapshot.snapshot_id, "/srv/file") == b"here\n"
    before = count(box)
    wait_for(lambda: count(box) > before)


def test_the_last_checkpoint_of_a_machine_ends_it(machine: Callable[..., Sandbox]) -> None:
    box = machine()
    said(box, "echo last > /srv/file")
    snapshot = box.checkpoint(stop=True)
    assert box.status is SandboxStatus.TERMINATED
    assert SnapshotStore().read_file(snapshot.snapshot_id, "/srv/file") == b"last\n"


def test_forks_of_a_memory_go_on_each_for_itself(box: Sandbox, started: list[Sandbox]) -> None:
    counting(box)
    said(box, "echo disk > /srv/file")
    forks = box.fork(3, memory=True, seeds="common")
    boxes = forks.unwrap()
    started += boxes
    names = [said(each, WHO).split() for each in boxes]
    for lines, each in zip(names, boxes, strict=True):
        assert lines[0] == lines[4] == each.sandbox_id
        assert abs(int(lines[3]) - time.time()) < 60
    assert len({lines[1] for lines in names}) == len({lines[2] for lines in names}) == 3
    assert len({said(each, "echo $WORLDFORK_SEED") for each in boxes}) == 1
    assert sorted(said(each, "echo $WORLDFORK_FORK_INDEX").strip() for each in boxes) == ["0", "1", "2"]
    for each in (box, *boxes):
        before = count(each)
        wait_for(lambda each=each, before=before: count(each) > before)  # type: ignore[misc]  # binds the loop's value
    said(boxes[0], "echo other > /srv/file")
    assert [said(each, "cat /srv/file").strip() for each in (box, *boxes)] == ["disk", "other", "disk", "disk"]
    assert box.status is SandboxStatus.RUNNING


def test_a_fork_of_a_fork_of_a_fork(box: Sandbox, machine: Callable[..., Sandbox]) -> None:
    each = box
    for depth in range(3):
        said(each, f"echo {depth} >> /srv/depths; echo {depth} >> /dev/shm/depths")
        each = machine(snapshot_id=each.checkpoint(checkpoint_type=MEMORY).snapshot_id)
    assert said(each, "cat /srv/depths /dev/shm/depths").split() == ["0", "1", "2"] * 2
    disk = each.checkpoint()
    assert SnapshotStore().read_file(disk.snapshot_id, "/srv/depths") == b"0\n1\n2\n"


def test_memory_goes_with_its_snapshot_but_not_from_under_a_fork(box: Sandbox, machine: Callable[..., Sandbox]) -> None:
    snapshot = box.checkpoint(checkpoint_type=MEMORY, wait_until="completed")
    assert (snapshot.status.value, snapshot.snapshot_type) == ("completed", MEMORY)
    fork = machine(snapshot_id=snapshot.snapshot_id)
    with pytest.raises(Locked):
        Sandbox.delete_snapshot(snapshot.snapshot_id)
    fork.terminate()
    Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not memory_of(snapshot.snapshot_id).exists()
    assert SnapshotStore().check(read_data=True).sound
    assert box.run("true").ok


def test_what_rests_goes_on_as_it_was(machine: Callable[..., Sandbox], started: list[Sandbox]) -> None:
    box = machine(name="sleeper", seed=77)
    counting(box)
    who = said(box, WHO).split()
    snapshot_id = box.suspend()
    assert box.status is SandboxStatus.SUSPENDED
    assert (box.sandbox_id, SandboxStatus.SUSPENDED) in [(one.sandbox_id, one.status) for one in Sandbox.list()]
    with pytest.raises(NotFound, match="suspended"):
        Sandbox.connect("sleeper")
    again = Sandbox.resume("sleeper")
    started.append(again)
    assert (again.sandbox_id, again.name, again.seed) == (box.sandbox_id, "sleeper", 77)
    lines = said(again, WHO).split()
    assert (lines[0], lines[1], lines[4]) == (who[0], who[1], who[4])
    assert lines[2] != who[2], "random numbers are new ones"
    before = count(again)
    wait_for(lambda: count(again) > before)
    with pytest.raises(NotFound):
        Sandbox.resume("sleeper")
    second = again.suspend()
    third = Sandbox.get_or_create("sleeper")
    started.append(third)
    assert (third.sandbox_id, third.bind_outcome) == (box.sandbox_id, "resumed")
    third.terminate()
    left = {one.snapshot_id for one in Sandbox.list_all_snapshots()}
    assert left.isdisjoint({snapshot_id, second})


def test_what_was_resumed_and_died_leaves_the_state_that_it_rested_in(
    machine: Callable[..., Sandbox], started: list[Sandbox]
) -> None:
    box = machine()
    said(box, "echo kept > /srv/f")
    snapshot_id = box.suspend()
    again = Sandbox.resume(box.sandbox_id)
    os.kill(read_running(place().home.run / box.sandbox_id).qemu_pid, signal.SIGKILL)
    with pytest.raises(SandboxDied):
        again.run("true")
    again.terminate()
    [fork] = Sandbox.fork_snapshot(snapshot_id).unwrap()
    started.append(fork)
    assert said(fork, "cat /srv/f") == "kept\n"
    fork.terminate()
    Sandbox.delete_snapshot(snapshot_id)


def test_a_sandbox_whose_process_was_killed_leaves_nothing(base: str) -> None:
    program = (
        "import sys; from worldfork import Sandbox\n"
        f"box = Sandbox.create(base={base!r}, driver='microvm', memory_mb={MEMORY_MB})\n"
        "fork = box.fork(1, memory=True).unwrap()[0]\n"
        "print(box.sandbox_id, fork.sandbox_id, flush=True); sys.stdin.read()\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    ids = owner.stdout.readline().split()
    here = place()
    machines_of = [read_running(here.home.run / each).qemu_pid for each in ids]
    owner.kill()
    owner.communicate()
    wait_for(lambda: not any(map(is_running, machines_of)))
    wait_for(lambda: not any(here.store.is_alive(each) for each in ids))
    groups = [group for each in ids for group in here.driver_of("microvm").cgroups_of(each)]
    assert all(map(os.path.isdir, groups)), "nobody removes them but a sweep"
    assert set(ids) <= set(here.sweep().holders)
    assert not any(map(os.path.exists, groups))
    assert not [path for path in here.home.run.iterdir() if path.name in ids]


@pytest.mark.parametrize("end", ["killed", "quit"])
def test_a_machine_that_ends_hangs_nobody(machine: Callable[..., Sandbox], end: str) -> None:
    box = machine()
    pid = read_running(place().home.run / box.sandbox_id).qemu_pid

    async def work() -> None:
        mine = await AsyncSandbox.connect(box.sandbox_id)
        sleeping = asyncio.ensure_future(mine.run("sleep", ["600"]))
        await mine.run("true")
        if end == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            async with connect(place().home.run / box.sandbox_id / "qmp") as monitor:
                await monitor.execute("quit")
        async with asyncio.timeout(30):
            with pytest.raises(SandboxDied):
                await sleeping
            with pytest.raises(SandboxDied):
                await mine.run("true")

    asyncio.run(work())
    death = box.cause_of_death()
    assert death is not None
    assert death.cause is DeathCause.CRASHED
    with pytest.raises(SandboxDied):
        box.checkpoint(checkpoint_type=MEMORY)


def test_more_forks_than_the_host_has_memory_for_start_none(box: Sandbox) -> None:
    snapshot = box.checkpoint(checkpoint_type=MEMORY)
    before = sorted(os.listdir(place().home.run))
    with pytest.raises(OutOfSpace) as caught:
        Sandbox.fork_snapshot(snapshot.snapshot_id, 10_000)
    assert (caught.value.scope, bool(caught.value.remedy)) == ("host", True)
    assert sorted(os.listdir(place().home.run)) == before


def test_damaged_memory_is_an_error_of_each_fork(box: Sandbox) -> None:
    snapshot = box.checkpoint(checkpoint_type=MEMORY, wait_until="completed")
    drop_spares()
    [*_, newest] = sorted(memory_of(snapshot.snapshot_id).glob("ram.*"))
    whole = newest.read_bytes()
    newest.unlink()
    newest.write_bytes(whole[:-5000] + bytes(byte ^ 1 for byte in whole[-5000:]))
    assert not SnapshotStore().check(read_data=True).sound
    forks = Sandbox.fork_snapshot(snapshot.snapshot_id, 2)
    assert [type(each) for each in forks.errors] == [Corrupt, Corrupt]
    newest.unlink()
    [error] = Sandbox.fork_snapshot(snapshot.snapshot_id).errors
    assert isinstance(error, (NotFound, Corrupt))
    shutil.rmtree(memory_of(snapshot.snapshot_id))
    with pytest.raises(NotFound) as caught:
        Sandbox.create(snapshot_id=snapshot.snapshot_id)
    assert caught.value.remedy
    assert box.run("true").ok
    Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_what_a_machine_or_its_memory_cannot_do_is_refused(
    box: Sandbox, machine: Callable[..., Sandbox], base: str, tmp_path: Path
) -> None:
    memory = box.checkpoint(checkpoint_type=MEMORY).snapshot_id
    store = SnapshotStore()
    disk = box.checkpoint().snapshot_id
    with pytest.raises(ConfigError, match="memory"), (tmp_path / "archive").open("wb") as archive:
        store.export(memory, archive)
    for refused in (
        lambda: store.push([memory], str(tmp_path / "remote")),
        lambda: store.list_directory(memory),
        lambda: store.diff(disk, memory),
        lambda: store.digest(memory),
        lambda: Sandbox.create(snapshot_id=memory, memory_mb=512),
        lambda: Sandbox.create(snapshot_id=memory, disk_mb=512),
        lambda: box.checkpoint(checkpoint_type=MEMORY, level="exported"),
        lambda: box.checkpoint(checkpoint_type=MEMORY, outside="perhaps"),
        lambda: box.checkpoint(checkpoint_type=MEMORY, verify="true"),
    ):
        with pytest.raises(ConfigError):
            refused()
    with pytest.raises(NotCapturable):
        box.adopt(disk)
    with pytest.raises(DriverUnavailable, match="userland"):
        Sandbox.create(base="host", driver="microvm")
    with Sandbox.create(base=base, network="none") as plain, pytest.raises(NotCapturable):
        plain.checkpoint(checkpoint_type=MEMORY)


def test_a_checkpoint_that_is_given_up_leaves_the_machine_running(box: Sandbox) -> None:
    counting(box)
    before = {one.snapshot_id for one in Sandbox.list_all_snapshots()}

    async def work(delay_s: float) -> None:
        mine = await AsyncSandbox.connect(box.sandbox_id)
        taking = asyncio.ensure_future(mine.checkpoint(checkpoint_type=MEMORY))
        await asyncio.sleep(delay_s)
        if taking.cancel():
            with pytest.raises(asyncio.CancelledError):
                await taking
        else:  # it was done before this loop had a turn
            await AsyncSandbox.delete_snapshot((await taking).snapshot_id)

    for delay_s in (0, 0.01, 0.05):
        asyncio.run(work(delay_s))
    assert {one.snapshot_id for one in Sandbox.list_all_snapshots()} == before
    at = count(box)
    wait_for(lambda: count(box) > at)
    assert box.checkpoint(checkpoint_type=MEMORY).pause_s is not None


@pytest.mark.timeout(600)
def test_the_command_line(base: str) -> None:
    def worldfork(*line: str) -> Any:
        done = subprocess.run(
            [PROGRAM, line[0], "--json", *line[1:]], capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    sandbox = worldfork("create", "--base", base, "--driver", "microvm", "--memory-mb", str(MEMORY_MB))
    sandbox_id = sandbox["sandbox_id"]
    left = [sandbox_id]
    try:
        assert (sandbox["driver"], sandbox["network"], sandbox["isolation"]) == ("microvm", "none", "none (tcg)")
        costs = worldfork("checkpoint", "--explain", sandbox_id)
        assert costs["memory_bytes"] > 0
        assert costs["memory_pause_s"] > 0
        snapshot = worldfork("checkpoint", "--memory", sandbox_id)
        assert snapshot["snapshot_type"] == "memory"
        shown = worldfork("show", snapshot["snapshot_id"])
        assert shown["memory"]["driver"] == "microvm"
        assert shown["memory"]["stored_bytes"] > shown["memory"]["added_bytes"] > 0
        text = subprocess.run([PROGRAM, "show", snapshot["snapshot_id"]], capture_output=True, text=True, check=True)
        assert "none left the sandbox" in text.stdout
        [fork] = worldfork("fork", "--memory", sandbox_id)
        left.append(fork["sandbox_id"])
        assert worldfork("exec", fork["sandbox_id"], "true")["exit_code"] == 0
        rest = worldfork("suspend", sandbox_id)
        assert [one["status"] for one in worldfork("ls") if one["sandbox_id"] == sandbox_id] == ["suspended"]
        assert worldfork("show", rest["snapshot_id"])["suspended"] == sandbox_id
        assert worldfork("resume", sandbox_id)["sandbox_id"] == sandbox_id
        assert worldfork("df")["memory_bytes"] > 0
    finally:
        worldfork("rm", *left)
