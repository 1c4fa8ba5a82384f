"""A checkpoint of a machine's memory: what it takes, in which order, and that the machine goes on whatever happens."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sandbox.microvm import stand_ins
from tests.unit.sandbox.microvm.stand_ins import RAM_BYTES, STATE, Refusal, StandIn

from worldfork.core.errors import NotFound, OutOfSpace, SandboxDied, SandboxError, StoreError
from worldfork.sandbox.microvm import generations, manifest, qcow2, ram, saving
from worldfork.sandbox.microvm.pages import PAGE_BYTES
from worldfork.sandbox.microvm.saving import MemorySaved, save_memory

PAUSED = ["QUIESCE", "stop", "xen-save-devices-state", "blockdev-snapshot-sync", "cont", "GO"]
ASKED_BEFORE = ("LOOK", "query-block", "query-commands", "add-fd", "NETWORK", "CLOSE_OUTSIDE", "qmp_capabilities")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[StandIn]:
    with stand_ins.running(tmp_path) as running:
        yield running


def save(machine: StandIn, name: str = "saved", **more: Any) -> MemorySaved:
    return asyncio.run(save_memory(machine.run, machine.run.parent / name, **more))


def in_the_pause(machine: StandIn) -> list[str]:
    return [word for word in machine.asked if word not in ASKED_BEFORE and not word.endswith("closed")]


def content(directory: Path) -> bytes:
    """The whole memory of a directory, by its own files."""
    saved = manifest.read_saved(directory)
    fd = ram.assemble([directory / name for name in saved.ram], RAM_BYTES)
    try:
        return os.pread(fd, RAM_BYTES, 0)
    finally:
        os.close(fd)


def page(byte: int) -> bytes:
    return bytes([byte]) * PAGE_BYTES


EXPECTED = page(0) * 4 + page(1) + page(7) + page(1) * 6 + page(0) * 28 + page(9) + page(0) * 23


def test_all_of_one_moment_is_there(machine: StandIn, tmp_path: Path) -> None:
    result = save(machine, facts={"of": "a test"})
    assert in_the_pause(machine) == PAUSED
    saved = manifest.read_saved(tmp_path / "saved")
    assert content(tmp_path / "saved") == EXPECTED
    os.close(manifest.open_state(tmp_path / "saved", saved))
    assert (tmp_path / "saved" / "state").read_bytes() == STATE
    assert (saved.build, saved.saved_by, saved.ram) == (stand_ins.BUILD, "devices", ("ram.0", "ram.1"))
    assert saved.facts == {"of": "a test"}
    assert [[file.path for file in chain] for chain in saved.disks] == [
        ["disk0.0.raw"],
        [],
        ["disk2.1.qcow2", "disk2.0.raw"],
    ]
    assert result.generation == 1
    assert result.state_bytes == len(STATE)
    assert 0 < result.pause_s < result.total_s
    assert 2 * PAGE_BYTES <= result.added_bytes < result.ram_bytes + result.state_bytes + result.disk_bytes + PAGE_BYTES


def test_what_others_have_already_is_only_linked(machine: StandIn, tmp_path: Path) -> None:
    save(machine)
    pairs = [
        ("memory/ram.0", "saved/ram.0"),
        ("base.erofs", "saved/disk0.0.raw"),
        ("memory/disk2.0.raw", "saved/disk2.0.raw"),
        ("run/settled.0.qcow2", "saved/disk2.1.qcow2"),
    ]
    for one, other in pairs:
        assert os.path.samefile(tmp_path / one, tmp_path / other)
    for name in ("state", "ram.1", "disk2.1.qcow2", "manifest.json"):
        assert (tmp_path / "saved" / name).stat().st_mode & 0o777 == 0o400


def test_the_machine_writes_to_another_file_afterwards(machine: StandIn, tmp_path: Path) -> None:
    save(machine)
    machine.write(6, 3)
    save(machine, "second")
    assert machine.node == "d2n2"
    chain = manifest.read_running(machine.run).disks[-1]
    names = ["scratch.2.qcow2", "settled.1.qcow2", "settled.0.qcow2", "disk2.0.raw"]
    assert [Path(file.path).name for file in chain] == names
    second = manifest.read_saved(tmp_path / "second")
    assert len(second.disks[-1]) == 3
    assert os.path.samefile(tmp_path / "second" / second.disks[-1][0].path, machine.run / "settled.1.qcow2")
    assert second.ram == ("ram.0", "ram.1")
    assert content(tmp_path / "saved") == EXPECTED
    assert content(tmp_path / "second") == EXPECTED[: 6 * PAGE_BYTES] + page(3) + EXPECTED[7 * PAGE_BYTES :]


def test_what_was_written_is_out_of_the_reach_of_whoever_wrote_it(machine: StandIn, tmp_path: Path) -> None:
    with open(machine.run / "scratch.qcow2", "r+b") as of_qemu:
        of_qemu.seek(1 << 20)
        of_qemu.write(b"before")
        of_qemu.flush()
        save(machine)
        of_qemu.seek(1 << 20)
        of_qemu.write(b"after!")
    kept = tmp_path / "saved" / "disk2.1.qcow2"
    assert kept.read_bytes()[1 << 20 :] == b"before"
    assert kept.stat().st_blocks * 512 < 1 << 20
    assert not (machine.run / "scratch.qcow2").exists()


def test_a_disk_is_what_qemu_writes_and_not_what_somebody_dead_wrote_down(machine: StandIn, tmp_path: Path) -> None:
    def refuse(_: object) -> None:
        raise Refusal("no")

    machine.orders["blockdev-snapshot-sync"] = refuse
    with pytest.raises(SandboxError):
        save(machine, "failed")
    # What was written down before the disk was to move is still there.
    assert len(manifest.read_running(machine.run).disks[-1]) == 3
    del machine.orders["blockdev-snapshot-sync"]
    save(machine)
    assert machine.node == "d2n1"
    assert [file.path for file in manifest.read_saved(tmp_path / "saved").disks[-1]] == ["disk2.1.qcow2", "disk2.0.raw"]
    assert len(manifest.read_running(machine.run).disks[-1]) == 3


@pytest.mark.parametrize("order", ["stop", "xen-save-devices-state", "blockdev-snapshot-sync"])
def test_after_a_refusal_the_machine_goes_on(machine: StandIn, tmp_path: Path, order: str) -> None:
    def refuse(_: object) -> None:
        raise Refusal("not today")

    machine.orders[order] = refuse
    with pytest.raises(SandboxError, match="not today"):
        save(machine)
    assert machine.asked.index("QUIESCE") < machine.asked.index(order) < machine.asked.index("cont")
    assert machine.asked.index("cont") < machine.asked.index("GO")
    with pytest.raises(NotFound):
        manifest.read_saved(tmp_path / "saved")


def test_memory_that_cannot_be_read_lets_the_machine_go_on(
    machine: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lost(_: object) -> None:
        raise SandboxDied("QEMU has ended")

    monkeypatch.setattr(saving.PrivateReader, "read", lost)
    with pytest.raises(SandboxDied):
        save(machine)
    assert in_the_pause(machine)[-2:] == ["cont", "GO"]


def test_where_qemu_does_not_go_on_its_keep_is_left_to_see_to_it(tmp_path: Path) -> None:
    def refuse(_: object) -> None:
        raise Refusal("migrating")

    with stand_ins.running(tmp_path) as machine:
        machine.orders["cont"] = refuse
        with pytest.raises(SandboxError, match="migrating"):
            save(machine)
    # With the end of a connection without a GO keep takes over, and needs the monitor for that.
    assert "GO" not in machine.asked
    assert {"monitor closed", "control closed"} < set(machine.asked)


@pytest.mark.parametrize("order", ["stop", "xen-save-devices-state", "blockdev-snapshot-sync", "cont"])
def test_one_who_is_cancelled_leaves_a_machine_that_runs(machine: StandIn, order: str) -> None:
    async def work() -> None:
        reached, released = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        usual = machine.order

        def wait(arguments: dict[str, Any]) -> Any:
            del machine.orders[order]
            loop.call_soon_threadsafe(reached.set)
            released.wait(20)
            return usual(order, arguments, [])

        machine.orders[order] = wait
        saving_it = asyncio.create_task(save_memory(machine.run, machine.run.parent / "saved"))
        await reached.wait()
        saving_it.cancel()
        await asyncio.sleep(0)
        assert not saving_it.done()
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await saving_it

    asyncio.run(work())
    assert in_the_pause(machine) == PAUSED


def test_pages_of_a_parent_that_is_gone_come_from_the_machine(machine: StandIn, tmp_path: Path) -> None:
    os.rename(tmp_path / "memory" / "manifest.json", tmp_path / "gone")
    os.unlink(tmp_path / "memory" / "ram.0")
    result = save(machine)
    assert manifest.read_saved(tmp_path / "saved").ram == ("ram.0",)
    assert content(tmp_path / "saved") == EXPECTED
    assert result.generation == 0


def test_a_chain_that_is_long_becomes_one_file(
    machine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "CHAIN_LIMIT", 1)
    save(machine)
    assert manifest.read_saved(tmp_path / "saved").ram == ("ram.0",)
    assert not os.path.samefile(tmp_path / "saved" / "ram.0", tmp_path / "memory" / "ram.0")
    assert content(tmp_path / "saved") == EXPECTED


def test_a_disk_of_many_files_becomes_one_for_later_checkpoints_too(machine: StandIn, tmp_path: Path) -> None:
    for number in range(generations.CHAIN_LIMIT + 2):
        save(machine, f"saved{number}")
        chain = manifest.read_saved(tmp_path / f"saved{number}").disks[-1]
        assert [file.format for file in chain].count("qcow2") == number % generations.CHAIN_LIMIT + 1
        assert chain[-1].path == "disk2.0.raw"
        assert (tmp_path / f"saved{number}" / chain[0].path).stat().st_mode & 0o777 == 0o400
    assert machine.node == f"d2n{generations.CHAIN_LIMIT + 2}"


def test_a_memory_of_which_most_has_changed_becomes_one_file(machine: StandIn, tmp_path: Path) -> None:
    for number in range(64):
        machine.write(number, number + 1)
    save(machine)
    assert manifest.read_saved(tmp_path / "saved").ram == ("ram.0",)
    assert content(tmp_path / "saved") == b"".join(page(number + 1) for number in range(64))


def test_a_file_that_cannot_be_linked_is_copied(
    machine: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "link", refuse)
    save(machine)
    assert content(tmp_path / "saved") == EXPECTED
    assert not os.path.samefile(tmp_path / "base.erofs", tmp_path / "saved" / "disk0.0.raw")
    assert (tmp_path / "saved" / "disk0.0.raw").read_bytes() == b"base"


def test_a_qemu_that_lacks_the_order_saves_by_migration(machine: StandIn, tmp_path: Path) -> None:
    machine.commands.remove("xen-save-devices-state")
    save(machine)
    assert in_the_pause(machine) == [
        *("QUIESCE", "stop", "blockdev-snapshot-sync", "migrate-set-capabilities", "getfd", "migrate"),
        *("query-migrate", "cont", "GO"),
    ]
    saved = manifest.read_saved(tmp_path / "saved")
    assert saved.saved_by == "migration"
    assert (tmp_path / "saved" / "state").read_bytes() == STATE


def test_a_migration_that_fails_is_an_error_and_the_machine_goes_on(machine: StandIn) -> None:
    machine.commands.remove("xen-save-devices-state")
    machine.orders["query-migrate"] = lambda _: {"status": "failed"}
    with pytest.raises(SandboxError, match="failed"):
        save(machine)
    assert in_the_pause(machine)[-2:] == ["cont", "GO"]


def test_connections_that_leave_are_told_and_closed_as_wished(machine: StandIn) -> None:
    machine.network = b"  sl  local rem st\n 0: 0F02000A:9C40 0202000A:0050 01 0\n"
    (connection,) = save(machine).outside
    assert connection.remote == "10.0.2.2:80"
    assert "CLOSE_OUTSIDE" not in machine.asked
    machine.asked.clear()
    save(machine, "closed", drop_outside=True)
    assert machine.asked.index("CLOSE_OUTSIDE") < machine.asked.index("NETWORK") < machine.asked.index("QUIESCE")


def test_a_machine_that_has_ended_is_a_dead_sandbox(machine: StandIn, tmp_path: Path) -> None:
    machine.process.kill()
    machine.process.wait()
    with pytest.raises(SandboxDied):
        save(machine)
    assert "QUIESCE" not in machine.asked
    with pytest.raises(SandboxDied):
        asyncio.run(save_memory(tmp_path, tmp_path / "none"))


def test_changes_that_do_not_fit_into_the_host_are_refused_beforehand(
    machine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "available_bytes", lambda: 1)
    with pytest.raises(OutOfSpace) as caught:
        save(machine)
    assert caught.value.scope == "host"
    assert "QUIESCE" not in machine.asked


def fails_with(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, OutOfSpace), (errno.EIO, StoreError)])
def test_a_disk_that_does_not_take_the_pages_is_told(
    machine: StandIn, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_ram", fails_with(number))
        with pytest.raises(kind):
            save(machine, "failed")
    assert in_the_pause(machine) == PAUSED
    # What that one left behind is in the next.
    save(machine)
    chain = manifest.read_saved(machine.run.parent / "saved").disks[-1]
    assert [file.path for file in chain] == ["disk2.1.qcow2", "disk2.0.raw"]
    assert sorted(path.name for path in machine.run.glob("*.qcow2")) == ["scratch.2.qcow2", "settled.1.qcow2"]


def test_a_disk_that_does_not_take_the_next_file_is_told_before(
    machine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qcow2, "write_overlay", fails_with(errno.ENOSPC))
    with pytest.raises(OutOfSpace):
        save(machine)
    assert "QUIESCE" not in machine.asked
