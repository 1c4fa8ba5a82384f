"""A real guest: booted, saved, forked from sealed memory, forked again while it runs, with disks below it."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests import machines
from tests.machines import Guest

from worldfork.core.errors import SandboxDied
from worldfork.sandbox.microvm import guest_image, pages, qcow2, qmp, ram, trees
from worldfork.sandbox.microvm.guest_image import GuestImage
from worldfork.sandbox.microvm.machine import Disk, Restore, SavedBy

RAM_MIB = 128
DISK_BYTES = 64 << 20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(machines.missing()), reason=machines.missing()),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> GuestImage:
    """The distribution's kernel with a small init."""
    top = tmp_path_factory.mktemp("guest")
    kernel = guest_image.find_kernel(top)
    if kernel is None:
        if shutil.which("apt-get") is None:
            pytest.skip("there is no kernel for guests, and no apt-get to get one")
        kernel = guest_image.fetch_kernel(top)
    return guest_image.build_image(top, kernel, machines.compile_init(top))


@pytest.fixture
def kept() -> Iterator[ExitStack]:
    """Guests and descriptors that end with the test."""
    with ExitStack() as stack:
        yield stack


def ask_qemu(guest: Guest, *orders: tuple[str, dict[str, Any]]) -> list[Any]:
    async def work() -> list[Any]:
        async with qmp.connect(guest.qmp) as monitor:
            return [await monitor.execute(order, arguments) for order, arguments in orders]

    return asyncio.run(work())


def save(guest: Guest, state: Path, saved_by: SavedBy) -> None:
    """Stop a guest and save the state of its devices."""

    async def work() -> None:
        async with qmp.connect(guest.qmp) as monitor:
            await monitor.execute("stop")
            if saved_by == "devices":
                await monitor.execute("xen-save-devices-state", {"filename": str(state), "live": False})
                return
            on = {"capabilities": [{"capability": "x-ignore-shared", "state": True}]}
            await monitor.execute("migrate-set-capabilities", on)
            with state.open("wb") as file:
                await monitor.execute("getfd", {"fdname": "state"}, fds=[file.fileno()])
                await monitor.execute("migrate", {"uri": "fd:state"})
                await finish(monitor)

    asyncio.run(work())


async def finish(monitor: qmp.Qmp) -> None:
    """Wait until a migration has ended; there is nothing that tells but asking."""
    while (found := (await monitor.execute("query-migrate")).get("status")) != "completed":
        assert found not in ("failed", "cancelled")
        await asyncio.sleep(0.005)


def continue_by_orders(guest: Guest, state_fd: int) -> None:
    async def work() -> None:
        async with qmp.connect(guest.qmp) as monitor:
            on = {"capabilities": [{"capability": "x-ignore-shared", "state": True}]}
            await monitor.execute("migrate-set-capabilities", on)
            await monitor.execute("migrate-incoming", {"uri": f"fd:{state_fd}"})
            await finish(monitor)
            await monitor.execute("cont")

    asyncio.run(work())


class World:
    """What the guests of one test stand on."""

    def __init__(self, directory: Path, image: GuestImage, kept: ExitStack) -> None:
        self.directory = directory
        self.image = image
        self.kept = kept
        self.below: dict[str, str] = {}
        layer = directory / "layer"
        layer.mkdir()
        (layer / "small").write_text("of the layer\n")
        with (layer / "sparse").open("wb") as file:
            file.truncate(8 << 20)
            file.seek(5 << 20)
            file.write(b"behind a hole")
        os.mknod(layer / "gone", stat.S_IFCHR, os.makedev(0, 0))
        trees.write_image(directory / "layers.erofs", {"0": layer})
        self.layers = self.opened(directory / "layers.erofs", os.O_RDONLY)

    def opened(self, path: Path, flags: int) -> int:
        fd = os.open(path, flags | os.O_CLOEXEC)
        self.kept.callback(os.close, fd)
        return fd

    def disks(self, name: str, below: str) -> tuple[Disk, ...]:
        """Return the layers and an empty disk over another one."""
        path = self.directory / name
        qcow2.write_overlay(path, DISK_BYTES, below, "qcow2" if below else "raw")
        self.below[name] = below
        backing = self.chain(below)
        scratch = Disk(fd=self.opened(path, os.O_RDWR), format="qcow2", read_only=False, backing=backing)
        return Disk(fd=self.layers), scratch

    def chain(self, name: str) -> Disk | None:
        """Return a disk with all that are below it: QEMU cannot find a path beside a descriptor."""
        if not name:
            return None
        fd = self.opened(self.directory / name, os.O_RDONLY)
        return Disk(fd=fd, format="qcow2", backing=self.chain(self.below[name]))

    def start(self, ram_fd: int, how: Any, disks: tuple[Disk, ...]) -> Guest:
        guest = machines.start(self.directory, ram_fd, how, memory_mib=RAM_MIB, disks=disks)
        self.kept.callback(guest.kill)
        return guest

    def boot(self) -> tuple[int, Guest]:
        memory = ram.new_ram(RAM_MIB << 20)
        self.kept.callback(os.close, memory)
        guest = self.start(memory, machines.booting(self.image.kernel, self.image.initrd), self.disks("d.t", ""))
        assert guest.read_line() == "hello"
        return memory, guest

    def fork(self, ram_fd: int, state: Path, name: str, below: str, saved_by: SavedBy = "devices") -> Guest:
        state_fd = self.opened(state, os.O_RDONLY)
        guest = self.start(ram_fd, Restore(saved_by, state_fd), self.disks(name, below))
        if saved_by == "migration":
            continue_by_orders(guest, state_fd)
        return guest

    def memory(self, *files: Path) -> int:
        fd = ram.assemble(files, RAM_MIB << 20)
        self.kept.callback(os.close, fd)
        return fd


@pytest.fixture
def world(tmp_path: Path, image: GuestImage, kept: ExitStack) -> World:
    return World(tmp_path, image, kept)


@pytest.fixture(params=["devices", "migration"])
def saved_by(request: pytest.FixtureRequest) -> SavedBy:
    found: SavedBy = request.param
    return found


def test_a_template_is_forked_from_memory_that_nothing_alters(world: World, saved_by: SavedBy) -> None:
    memory, template = world.boot()
    commands = {row["name"] for row in ask_qemu(template, ("query-commands", {}))[0]}
    if saved_by == "devices" and "xen-save-devices-state" not in commands:
        pytest.skip("this QEMU saves the state of devices by migration alone")
    assert template.ask("m /dev/vda erofs") == "mount done"
    assert template.ask("r /mnt/0/small") == "read of the layer"
    assert template.ask("w /dev/vdb first") == "wrote 512"
    total = template.ask("f 1000")
    save(template, world.directory / "state", saved_by)
    template.kill()
    ram.seal(memory)
    pages.write_pages(world.directory / "base", ram.stored_pages(memory))

    sealed = world.memory(world.directory / "base")
    before = os.pread(sealed, 1 << 20, 16 << 20)
    one = world.fork(sealed, world.directory / "state", "d.1", "d.t", saved_by)
    assert one.ask("p alive") == "pong alive"
    assert ram.private_bytes(one.process.pid, sealed) < 2 << 20
    two = world.fork(sealed, world.directory / "state", "d.2", "d.t", saved_by)
    assert one.ask("w /dev/vdb of-one") == "wrote 512"
    assert two.ask("r /dev/vdb") == "read first"
    assert one.ask("r /dev/vdb") == "read of-one"
    assert one.ask("f 1000") == two.ask("f 1000") == total
    assert os.pread(sealed, 1 << 20, 16 << 20) == before


def test_forks_of_forks_of_a_running_guest(world: World) -> None:
    memory, template = world.boot()
    assert template.ask("m /dev/vda erofs") == "mount done"
    save(template, world.directory / "state", "devices")
    template.kill()
    ram.seal(memory)
    files = [world.directory / "base"]
    pages.write_pages(files[0], ram.stored_pages(memory))
    parent = world.fork(memory, world.directory / "state", "d.0", "d.t")
    sealed = memory
    for generation in (1, 2, 3):
        assert parent.ask(f"w /dev/vdb generation-{generation}") == "wrote 512"
        parent.ask("f 300")
        state, disk = world.directory / f"state{generation}", f"d.{generation - 1}"
        over = world.directory / f"d.{generation - 1}.on"
        save(parent, state, "devices")
        changed = ram.private_pages(parent.process.pid, sealed)
        qcow2.write_overlay(over, DISK_BYTES, disk, "qcow2")
        swap = {"node-name": "d1", "snapshot-file": str(over), "mode": "existing", "format": "qcow2"}
        ask_qemu(parent, ("blockdev-snapshot-sync", {**swap, "snapshot-node-name": "d1n"}), ("cont", {}))
        files.append(world.directory / f"pages.{generation}")
        pages.write_pages(files[-1], changed)
        assert pages.allocated_bytes(files[-1]) < 8 << 20

        assert parent.ask("w /dev/vdb goes-on") == "wrote 512"
        sealed = world.memory(*files)
        child = world.fork(sealed, state, f"d.{generation}", disk)
        assert child.ask("p child") == "pong child"
        assert child.ask("r /mnt/0/small") == "read of the layer"
        assert child.ask("r /dev/vdb") == f"read generation-{generation}"
        assert parent.ask("p parent") == "pong parent"
        parent = child


def test_sixteen_forks_at_once(world: World) -> None:
    memory, template = world.boot()
    save(template, world.directory / "state", "devices")
    template.kill()
    ram.seal(memory)
    guests = [world.fork(memory, world.directory / "state", f"d.{number}", "d.t") for number in range(16)]
    asking: Callable[[int], str] = lambda number: guests[number].ask(f"p {number}")  # noqa: E731
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(asking, range(16))) == [f"pong {number}" for number in range(16)]


def test_a_killed_qemu_is_a_dead_sandbox(world: World) -> None:
    _, guest = world.boot()
    monitor = guest.qmp
    guest.process.kill()
    guest.process.wait()

    async def work() -> None:
        async with qmp.connect(monitor) as orders:
            await orders.execute("stop")

    with pytest.raises(SandboxDied):
        asyncio.run(work())
