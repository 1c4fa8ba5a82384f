"""What a QEMU that its guest broke into can do to a checkpoint: it fails with an error of ours, and nothing more."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.sandbox.microvm import stand_ins
from tests.unit.sandbox.microvm.stand_ins import STATE, StandIn

from worldfork.core.errors import Corrupt, SandboxError, WorldforkError
from worldfork.sandbox.microvm import manifest, qcow2, qmp, ram, saving
from worldfork.sandbox.microvm.connections import outside_connections
from worldfork.sandbox.microvm.costs import costs
from worldfork.sandbox.microvm.disks import DISK_BYTES
from worldfork.sandbox.microvm.flatten import flatten
from worldfork.sandbox.microvm.manifest import read_saved
from worldfork.sandbox.microvm.pages import PAGE_BYTES
from worldfork.sandbox.microvm.qcow2 import CLUSTER_BYTES
from worldfork.sandbox.microvm.saving import save_memory

pytestmark = pytest.mark.slow

MEMORY_BYTES = 4 * PAGE_BYTES
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "inserted", "status"]), inner),
    max_leaves=6,
)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[StandIn]:
    with stand_ins.running(tmp_path) as running:
        yield running


def fifo(directory: Path) -> int:
    os.mkfifo(directory / "fifo")
    return os.open(directory / "fifo", os.O_RDWR | os.O_CLOEXEC)


def other_file(directory: Path) -> int:
    # Right in size, and opened without a right to read it, which whoever opens it once more may have.
    (directory / "secret").write_bytes(bytes(MEMORY_BYTES))
    return os.open(directory / "secret", os.O_PATH | os.O_CLOEXEC)


def unsealed(_: Path) -> int:
    return ram.new_ram(MEMORY_BYTES)


def larger(_: Path) -> int:
    fd = ram.new_ram(1 << 40)
    ram.seal(fd)
    return fd


@pytest.mark.parametrize("make", [fifo, other_file, unsealed, larger])
def test_only_the_memory_that_it_was_given_is_opened(make: Callable[[Path], int], tmp_path: Path) -> None:
    fd = make(tmp_path)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            ram.open_sealed(os.getpid(), fd, MEMORY_BYTES)
        except SandboxError as error:
            caught.append(error)

    opening = threading.Thread(target=work, daemon=True)  # what waits for a FIFO cannot be stopped
    opening.start()
    opening.join(10)
    os.close(fd)
    assert [error.args[0] for error in caught if "has not got the memory" in str(error)]


def test_its_memory_itself_is_opened() -> None:
    fd = ram.new_ram(MEMORY_BYTES)
    ram.seal(fd)
    again = ram.open_sealed(os.getpid(), fd, MEMORY_BYTES)
    assert os.fstat(again).st_ino == os.fstat(fd).st_ino
    os.close(again)
    os.close(fd)


def test_a_state_without_end_is_refused_and_not_read_whole(machine: StandIn, tmp_path: Path) -> None:
    def grow(arguments: dict[str, Any]) -> dict[str, Any]:
        os.ftruncate(machine.sets[int(arguments["filename"].removeprefix("/dev/fdset/"))], 1 << 40)
        return {}

    machine.orders["xen-save-devices-state"] = grow
    with pytest.raises(SandboxError, match="more than the"):
        asyncio.run(save_memory(machine.run, tmp_path / "saved"))
    assert machine.asked.index("stop") < machine.asked.index("cont") < machine.asked.index("GO")


def test_a_state_that_is_written_on_after_its_checkpoint_is_not_the_one_that_was_saved(
    machine: StandIn, tmp_path: Path
) -> None:
    asyncio.run(save_memory(machine.run, tmp_path / "saved"))
    for fd in machine.sets.values():
        os.pwrite(fd, b"forged", 0)
    assert (tmp_path / "saved" / "state").read_bytes() == STATE
    os.close(manifest.open_state(tmp_path / "saved", read_saved(tmp_path / "saved")))


def test_no_file_of_a_saved_memory_is_one_that_qemu_had_for_writing(machine: StandIn, tmp_path: Path) -> None:
    asyncio.run(save_memory(machine.run, tmp_path / "saved"))
    lent = {os.fstat(fd).st_ino for fd in machine.sets.values()}
    assert lent
    assert not lent & {path.stat().st_ino for path in (tmp_path / "saved").iterdir()}


@pytest.mark.parametrize("order", ["query-commands", "query-block", "add-fd", "query-migrate", "stop"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=JSON)
def test_whatever_its_monitor_answers_is_an_error_of_ours(
    order: str, said: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("machine")
    with stand_ins.running(place) as machine:
        if order == "query-migrate":
            machine.commands.clear()
        usual = machine.order

        def answer(name: str, arguments: dict[str, Any], fds: list[int]) -> Any:
            found = usual(name, arguments, fds)
            return said if name == order else found

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(WorldforkError):
            patch.setattr(machine, "order", answer)
            patch.setattr(saving, "_MIGRATION_S", 0.2)
            asyncio.run(save_memory(machine.run, place / "saved"))


def test_a_line_of_a_million_brackets_is_no_answer() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            theirs.sendall(b"[" * 100_000 + b"\n")
            with pytest.raises(SandboxError, match="no object"):
                await qmp.Qmp(ours).greet(5)
        ours.close()

    asyncio.run(scenario())


def test_what_it_maps_more_than_once_is_not_read_without_end(machine: StandIn) -> None:
    fd = ram.new_ram(MEMORY_BYTES)
    ram.seal(fd)
    maps = [mmap.mmap(fd, MEMORY_BYTES, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) for _ in range(3)]
    with pytest.raises(SandboxError, match="does not map this memory"):
        ram.private_bytes(os.getpid(), fd)
    for each in maps:
        each.close()
    os.close(fd)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["sl", "-1234567", "0100007F:0016", "0A00020F:-123", "01", "-1", "x", "drops", "\n"])))
def test_a_list_of_connections_is_one_or_nonsense(words: list[str]) -> None:
    with contextlib.suppress(SandboxError):
        outside_connections(" ".join(["sl x\n0:", *words]).encode())


def test_an_address_below_zero_is_nonsense() -> None:
    with pytest.raises(SandboxError, match="does not tell"):
        outside_connections(b"sl x\n0: -1234567:0016 0100007F:0016 01")


def test_a_disk_that_shows_one_part_over_and_over_is_not_written_out(tmp_path: Path) -> None:
    forged = tmp_path / "forged.qcow2"
    qcow2.write_overlay(forged, DISK_BYTES, "")
    with forged.open("r+b") as file:
        table = file.seek(0, os.SEEK_END)
        shown = struct.pack(">Q", table | 1 << 63)
        file.write(shown * (CLUSTER_BYTES // 8))
        file.seek(3 * CLUSTER_BYTES)
        file.write(shown)
    with pytest.raises(Corrupt, match="more than it holds"):
        flatten(tmp_path / "whole.qcow2", [forged])
    assert not (tmp_path / "whole.qcow2").exists()


def test_a_disk_that_shows_one_table_over_and_over_is_not_read_out(tmp_path: Path) -> None:
    forged = tmp_path / "forged.qcow2"
    qcow2.write_overlay(forged, DISK_BYTES, "")
    rows = DISK_BYTES // CLUSTER_BYTES // (CLUSTER_BYTES // 8)
    with forged.open("r+b") as file:
        table = file.seek(0, os.SEEK_END)
        file.write(struct.pack(">Q", 1) * (CLUSTER_BYTES // 8))
        file.seek(3 * CLUSTER_BYTES)
        file.write(struct.pack(">Q", table | 1 << 63) * rows)
    with pytest.raises(Corrupt, match="more than it holds"):
        flatten(tmp_path / "whole.qcow2", [forged])


def test_a_disk_full_of_zeros_takes_little_memory(tmp_path: Path) -> None:
    forged = tmp_path / "forged.qcow2"
    qcow2.write_overlay(forged, DISK_BYTES, "")
    rows = 64
    with forged.open("r+b") as file:
        first = file.seek(0, os.SEEK_END)
        file.write(struct.pack(">Q", 1) * (CLUSTER_BYTES // 8 * rows))
        file.seek(3 * CLUSTER_BYTES)
        file.write(b"".join(struct.pack(">Q", first + row * CLUSTER_BYTES | 1 << 63) for row in range(rows)))
    tracemalloc.start()
    try:
        flatten(tmp_path / "whole.qcow2", [forged])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < rows * 2 * CLUSTER_BYTES + (4 << 20)


def test_costs_of_a_machine_that_has_other_memory_are_not_told(machine: StandIn) -> None:
    running = manifest.read_running(machine.run)
    running = replace(running, build=replace(running.build, ram_bytes=PAGE_BYTES))
    manifest.write_running(machine.run, running)
    with pytest.raises(SandboxError, match="has not got the memory"):
        asyncio.run(costs(machine.run))
