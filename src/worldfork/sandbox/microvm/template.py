"""The template: a guest that has booted and mounted nothing, saved once, from which every fresh sandbox starts."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from worldfork.core.errors import LaunchFailed
from worldfork.core.ids import content_id
from worldfork.core.remove import remove_tree
from worldfork.sandbox.microvm import inside, pages, qmp, ram, wire
from worldfork.sandbox.microvm.blank import new_empty_disk
from worldfork.sandbox.microvm.control import control
from worldfork.sandbox.microvm.host import Host, plug
from worldfork.sandbox.microvm.keep import RAM_FD, Kept, base_items, new_generation, start_keep
from worldfork.sandbox.microvm.machine import Boot, SavedBy, kernel_words, tsc_khz
from worldfork.sandbox.microvm.manifest import MANIFEST, STATE, Build, DiskFile, Saved, digest_state, write_saved
from worldfork.sandbox.microvm.qmp import Qmp
from worldfork.sandbox.microvm.wire import Op

BOOT_S: Final = 90.0
"""How long a guest may take to boot: QEMU's interpreter on a busy machine is slow."""
_TEMPLATES: Final = "templates"
_FORMAT: Final = b"template-5"
_POLL_S: Final = 0.005
_SAVE_S: Final = 60.0
# The memory is a file already, and stays out of the state.
_IGNORING_SHARED: Final = {"capabilities": [{"capability": "x-ignore-shared", "state": True}]}
_IN_MEMORY: Final = "memory"


def ensure_template(images: Path, host: Host, ram_bytes: int, vcpus: int) -> Path:
    """Return the memory directory of a template, made if it is not there yet. Blocking, some seconds the first time.

    Of several that want the same one at once, one makes it and the others wait.

    Raises:
        LaunchFailed: the guest does not boot.
        OutOfSpace: the host has too little memory or disk.
    """
    build = host.build(ram_bytes, vcpus)
    top = images / host.image.id / _TEMPLATES
    directory = top / _key(build)
    if not (directory / MANIFEST).exists():
        top.mkdir(parents=True, exist_ok=True)
        with _alone(top / f"{directory.name}.lock"):
            if not (directory / MANIFEST).exists():
                _make_at(directory, host, build)
    return directory


def _key(build: Build) -> str:
    words = (build.qemu, build.accel, build.cpu, str(build.ram_bytes), str(build.vcpus), *kernel_words(build.accel))
    return content_id(_FORMAT, *(word.encode() for word in words))[:32]


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that also a killed process gives back."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _make_at(directory: Path, host: Host, build: Build) -> None:
    mark = f".part-{directory.name}-"
    for left in directory.parent.glob(f"{mark}*"):
        remove_tree(left)  # of one who was killed; whoever holds the lock is alone
    part = Path(tempfile.mkdtemp(prefix=mark, dir=directory.parent))
    try:
        # A loop of its own: this runs in a thread, which goes on where its caller is cancelled.
        asyncio.run(_make(part, host, build))
        if directory.exists():
            remove_tree(directory)
        os.rename(part, directory)
    finally:
        if part.exists():
            remove_tree(part)


async def _make(part: Path, host: Host, build: Build) -> None:
    memory = ram.new_ram(build.ram_bytes)
    try:
        kept = _boot(part, host, build, memory)
        try:
            async with asyncio.timeout(BOOT_S):
                await kept.launched()
                await kept.ready()
            saved_by = await _save(part)
        except TimeoutError:
            raise LaunchFailed(
                f"the guest did not boot within {BOOT_S:g} s", remedy="try again when the machine is less busy"
            ) from None
        finally:
            # It must not go on: it shares its memory with what is saved.
            kept.put_down()
        remove_tree(part / "run")
        ram.seal(memory)
        pages.write_pages(part / "ram.0", ram.stored_pages(memory))
    finally:
        os.close(memory)
    state = (part / STATE).read_bytes()
    (part / STATE).chmod(0o400)
    write_saved(part, Saved(build, saved_by, ("ram.0",), ((), (), ()), digest_state(state)))


def _boot(part: Path, host: Host, build: Build, memory: int) -> Kept:
    run = part / "run"
    run.mkdir(mode=0o700)
    khz = tsc_khz(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    boot = Boot(str(host.image.kernel), str(host.image.initrd), tsc_khz=khz)
    scratch = new_empty_disk()
    try:
        disks, numbers = plug(((), (), (DiskFile(_IN_MEMORY, "qcow2"),)), {_IN_MEMORY: scratch})
        machine = host.machine(build, boot, disks, share_ram=True)
        items = base_items("template", run, str(run / "lock"))
        return start_keep(items, machine.arguments(), {RAM_FD: memory, **numbers}, new_generation())
    finally:
        os.close(scratch)


async def _save(part: Path) -> SavedBy:
    """Prepare a booted guest for every sandbox that there may be, and save it."""
    async with control(part / "run") as guest:
        await guest.ask(
            Op.PREPARE,
            wire.items(
                *(("mkdir", path) for path in (inside.BASE, inside.LAYERS, inside.SCRATCH, inside.LINKS)),
                ("write", f"{inside.CGROUPS}/cgroup.subtree_control\t+memory +pids +cpu"),
                *_quick_disks(),
                # A thread would look twice a second for memory to move together, another one count each second.
                ("write", "/proc/sys/vm/compaction_proactiveness\t0"),
                ("write", "/proc/sys/vm/stat_interval\t60"),
                # What the kernel read of the disks while it looked for partitions is not what the next one finds there.
                ("drop", "1"),
            ),
        )
    # It is not quieted first: nothing is under way, and keep would let it run again once this connection ends.
    async with qmp.connect(part / "run" / "qmp") as monitor:
        return await _save_state(monitor, part / STATE)


def _quick_disks() -> Iterator[tuple[str, str]]:
    """Yield the items that let a guest hand what it wants of its disks to the host as it is: that orders it anyway."""
    for disk in ("vda", "vdb", "vdc"):
        for knob, value in (("scheduler", "none"), ("wbt_lat_usec", "0"), ("add_random", "0"), ("iostats", "0")):
            yield "write", f"/sys/block/{disk}/queue/{knob}\t{value}"


async def _save_state(monitor: Qmp, target: Path) -> SavedBy:
    """Stop a machine that shares its memory, and save the state of its devices; it stays stopped."""
    known = {row["name"] for row in await monitor.execute("query-commands")}
    await monitor.execute("stop")
    if "xen-save-devices-state" in known:
        await monitor.execute("xen-save-devices-state", {"filename": str(target), "live": False}, timeout_s=_SAVE_S)
        return "devices"
    await monitor.execute("migrate-set-capabilities", _IGNORING_SHARED)
    with target.open("wb") as file:
        await monitor.execute("getfd", {"fdname": "state"}, fds=[file.fileno()])
        await monitor.execute("migrate", {"uri": "fd:state"})
        await _migrated(monitor)
    return "migration"


async def continue_from(monitor: Qmp, state_fd: int, saved_by: SavedBy) -> None:
    """Let a QEMU that waits for orders go on from a state."""
    if saved_by == "devices":  # it runs by itself then
        await monitor.execute("migrate-incoming", {"uri": f"fd:{state_fd}"})
        return
    await monitor.execute("migrate-set-capabilities", _IGNORING_SHARED)
    await monitor.execute("migrate-incoming", {"uri": f"fd:{state_fd}"})
    await _migrated(monitor)
    await monitor.execute("cont")


async def _migrated(monitor: Qmp) -> None:
    """Wait until QEMU has written or read a state; nothing tells but asking.

    Raises:
        LaunchFailed: it could not, or not in time.
    """
    try:
        async with asyncio.timeout(_SAVE_S):
            while (found := (await monitor.execute("query-migrate")).get("status")) != "completed":
                if found in ("failed", "cancelled"):
                    raise LaunchFailed(f"QEMU could not carry a machine's state over: {found}", step="migrate")
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise LaunchFailed(f"QEMU did not carry a machine's state over within {_SAVE_S:g} s", step="migrate") from None
