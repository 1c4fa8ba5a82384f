"""A memory checkpoint of a running machine: its devices, its memory and its disk of one moment, while it stands still.

All that can be done before or after that moment is: files are made before, pages are written to disk after. Whatever
fails in between, the machine goes on, and if this process dies, its `keep` lets it go on (`native/mux.h`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from worldfork.content.failures import naming
from worldfork.core.errors import Corrupt, NotFound, OutOfSpace, SandboxError, WorldforkError
from worldfork.core.shielded import to_its_end
from worldfork.core.whole_file import whole_file
from worldfork.sandbox.bases import IDENTITY_PATHS
from worldfork.sandbox.microvm import inside, wire
from worldfork.sandbox.microvm.connections import OutsideConnection, ask_outside, close_outside
from worldfork.sandbox.microvm.control import Control, control
from worldfork.sandbox.microvm.generations import link_disks, settle, write_ram
from worldfork.sandbox.microvm.machine import SavedBy
from worldfork.sandbox.microvm.manifest import (
    STATE,
    DiskChain,
    Saved,
    digest_state,
    read_running,
    read_saved,
    write_running,
    write_saved,
)
from worldfork.sandbox.microvm.pages import Pages, allocated_bytes
from worldfork.sandbox.microvm.qmp import Qmp, connect
from worldfork.sandbox.microvm.ram import PrivateReader, available_bytes, open_sealed, private_bytes
from worldfork.sandbox.microvm.scratch import Scratch

MONITOR: Final = "qmp"
"""QEMU's socket in the run directory."""
_DEVICES: Final = "xen-save-devices-state"
_STATE_BYTES_MAX: Final = 64 << 20
"""Of devices alone: some 20 KiB each time that it was looked at."""
_MIGRATION_S: Final = 120.0
_POLL_S: Final = 0.002
_FREE_SHARE: Final = 0.8


@dataclass(frozen=True)
class MemorySaved:
    """What a memory checkpoint took."""

    pause_s: float
    """How long the machine stood still."""
    total_s: float
    state_bytes: int
    ram_bytes: int
    """What all page files take on disk, those included that are shared with earlier snapshots."""
    disk_bytes: int
    """The same of what the guest wrote to its disk."""
    added_bytes: int
    """What this snapshot takes that no earlier one has."""
    generation: int
    """Page files below the last one."""
    outside: tuple[OutsideConnection, ...] = ()
    """Connections that left the sandbox shortly before or after that moment."""


async def save_memory(
    run: Path, target: Path, *, drop_outside: bool = False, facts: Mapping[str, Any] | None = None
) -> MemorySaved:
    """Save a running machine. It goes on as if nothing had been, also where this fails or is cancelled.

    One that fails leaves what it made so far in `target`, without a manifest.

    Args:
        run: the sandbox's directory below `run`.
        target: the memory directory, which is made; its files are not synced.
        drop_outside: whether to reset the connections that leave the sandbox before.
        facts: for the manifest.

    Raises:
        SandboxDied: the machine has ended.
        SandboxError: the guest or QEMU refused, or gave no answer in time.
        OutOfSpace: the host has too little memory or disk.
        StoreError: a file cannot be written.
    """
    since_s = time.monotonic()
    with naming(target.name, "made"):
        target.mkdir(mode=0o700, exist_ok=True)
    # Left in this order: QEMU has one monitor at a time, and keep needs it where `control` ends without a GO.
    async with control(run) as client, connect(run / MONITOR) as monitor:
        with _Saver(run, target, client, monitor) as saver:
            await _look(client)
            if drop_outside:
                await close_outside(client)
            before = await ask_outside(client)
            # The guest comes to rest meanwhile: what it has under way, each fork would have to end.
            await saver.prepare()
            await to_its_end(saver.pause())
            after = await ask_outside(client)
            saved = await to_its_end(asyncio.to_thread(saver.write, dict(facts or {})))
    both = tuple(dict.fromkeys((*before, *after)))
    return replace(saved, total_s=time.monotonic() - since_s, outside=both)


async def _look(client: Control) -> None:
    """Let the guest find now what each fork of it will have to change, so that none has to find it.

    Raises:
        SandboxDied: the machine has ended.
    """
    found = wire.items(*(("idfile", path) for path in IDENTITY_PATHS), ("program", inside.HOOK))
    # Where the guest cannot, its forks look by themselves.
    await client.ask_if_able(wire.Op.LOOK, found)


class _Saver:
    """One checkpoint, in three steps."""

    def __init__(self, run: Path, target: Path, client: Control, monitor: Qmp) -> None:
        self._run = run
        self._target = target
        self._client = client
        self._monitor = monitor
        self._running = read_running(run)
        self._fds = contextlib.ExitStack()
        self._how: SavedBy = "devices"
        self._ram_fd = self._state_fd = -1
        self._pause_s = 0.0
        self._reader: PrivateReader
        self._disk: Scratch
        self._pages: Pages

    def __enter__(self) -> _Saver:
        return self

    def __exit__(self, *_: object) -> None:
        self._fds.close()

    async def prepare(self) -> None:
        """Do what can be done while the machine runs."""
        commands = await self._monitor.rows("query-commands")
        self._how = "devices" if any(row.get("name") == _DEVICES for row in commands) else "migration"
        pid = self._running.qemu_pid
        self._ram_fd = open_sealed(pid, self._running.ram_fd, self._running.build.ram_bytes)
        self._fds.callback(os.close, self._ram_fd)
        with naming(self._target.name, "written"):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._state_fd = self._opened(str(self._target / STATE), flags)
        self._disk = await Scratch.find(self._run, self._running, self._monitor)
        with naming(str(self._disk.next), "written"):
            next_fd = self._opened(str(self._disk.make_next()), os.O_RDWR)
            write_running(self._run, self._disk.continued())
        self._next_set = await self._lend(next_fd)
        self._state_set = await self._lend(self._state_fd) if self._how == "devices" else 0
        _expect_room(private_bytes(pid, self._ram_fd))
        self._reader = await asyncio.to_thread(PrivateReader, pid, self._ram_fd)

    async def pause(self) -> None:
        """Take what must be of one moment; the machine stands still meanwhile."""
        await self._client.quiesce()
        since_s = time.monotonic()
        try:
            await self._monitor.execute("stop")
            await self._take()
        except BaseException:
            with contextlib.suppress(WorldforkError):
                await self._go_on()
            raise
        await self._monitor.execute("cont")
        self._pause_s = time.monotonic() - since_s
        await self._client.go()

    async def _go_on(self) -> None:
        await self._monitor.execute("cont")
        await self._client.go()

    async def _take(self) -> None:
        # Whatever QEMU had under way ended with its stop: nothing writes this memory any more.
        pages, ordered = await asyncio.gather(
            asyncio.to_thread(self._reader.read), self._take_from_qemu(), return_exceptions=True
        )
        for outcome in (ordered, pages):
            if isinstance(outcome, BaseException):
                raise outcome
        assert isinstance(pages, Pages)
        self._pages = pages

    async def _take_from_qemu(self) -> None:
        if self._how == "devices":
            await self._monitor.execute(_DEVICES, {"filename": f"/dev/fdset/{self._state_set}", "live": False})
        await self._move_disk()
        if self._how == "migration":
            # Last, for it takes the disks from QEMU until that goes on.
            await _migrate(self._monitor, self._state_fd)

    async def _move_disk(self) -> None:
        await self._monitor.execute(
            "blockdev-snapshot-sync",
            {
                "node-name": self._disk.node,
                "snapshot-node-name": self._disk.next_node,
                "snapshot-file": f"/dev/fdset/{self._next_set}",
                "mode": "existing",
                "format": "qcow2",
            },
        )

    def write(self, facts: dict[str, Any]) -> MemorySaved:
        """Write down what was taken. Blocking; the machine runs."""
        target, running = self._target, self._running
        with naming(target.name, "written"):
            earlier = _page_files(Path(running.memory))
            ram = write_ram(target, Path(running.memory), earlier, self._ram_fd, self._pages)
            disks = link_disks(target, self._settled())
            state = self._settled_state()
            write_saved(target, Saved(running.build, self._how, ram, disks, digest_state(state), facts))
            written = [file.path for file in disks[-1] if file.format == "qcow2"]
            own = (STATE, ram[-1], *written[:1])
            return MemorySaved(
                pause_s=self._pause_s,
                total_s=0.0,
                state_bytes=len(state),
                ram_bytes=sum(allocated_bytes(target / name) for name in ram),
                disk_bytes=sum(allocated_bytes(target / name) for name in written),
                added_bytes=sum(allocated_bytes(target / name) for name in own),
                generation=len(ram) - 1,
            )

    def _settled_state(self) -> bytes:
        """Return the state, put into a file that QEMU has no part in: it could go on writing the one that it got."""
        most = _STATE_BYTES_MAX + (self._running.build.ram_bytes if self._how == "migration" else 0)
        with (self._target / STATE).open("rb") as file:
            state = file.read(most + 1)
        if len(state) > most:
            raise SandboxError(f"QEMU saved more than the {most} bytes that its devices can take", step="state")
        with whole_file(self._target / STATE) as part:
            part.write_bytes(state)
        (self._target / STATE).chmod(0o400)
        return state

    def _settled(self) -> tuple[DiskChain, ...]:
        """Return the disks in files that QEMU cannot write, and let the next checkpoint begin with those too."""
        disk = self._disk
        written = disk.written
        disk = replace(disk, chains=(*disk.chains[:-1], settle(disk.chains[-1], len(written), disk.settled)))
        write_running(self._run, disk.continued())
        for path in written:
            path.unlink()  # QEMU has it open as long as it needs it
        return disk.chains

    def _opened(self, path: str, flags: int) -> int:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._fds.callback(os.close, fd)
        return fd

    async def _lend(self, fd: int) -> int:
        """Give QEMU a file under a number; it may not be able to open the path."""
        lent = await self._monitor.row("add-fd", fds=[fd])
        number = lent.get("fdset-id")
        if not isinstance(number, int):
            raise SandboxError("QEMU does not say which number it gave a file", step="qmp")
        return number


def _page_files(parent: Path) -> tuple[str, ...]:
    try:
        return read_saved(parent).ram
    except (NotFound, Corrupt):
        return ()  # what QEMU maps was checked when it was read


def _expect_room(changed_bytes: int) -> None:
    free = available_bytes()
    if free is not None and changed_bytes > free * _FREE_SHARE:
        raise OutOfSpace(
            f"the {changed_bytes} bytes that this machine has changed do not fit into the {free} bytes of memory that "
            "the host has free",
            remedy="end other sandboxes first",
            scope="host",
        )


async def _migrate(monitor: Qmp, state_fd: int) -> None:
    """Save devices in the way of migration. Memory that is mapped privately goes along, and takes its time."""
    ignoring = {"capabilities": [{"capability": "x-ignore-shared", "state": True}]}
    await monitor.execute("migrate-set-capabilities", ignoring)
    await monitor.execute("getfd", {"fdname": "state"}, fds=[state_fd])
    await monitor.execute("migrate", {"uri": "fd:state"})
    end_s = time.monotonic() + _MIGRATION_S
    # There is nothing that tells but asking.
    while (status := (await monitor.row("query-migrate")).get("status")) != "completed":
        if status in ("failed", "cancelled") or time.monotonic() > end_s:
            raise SandboxError(f"QEMU could not save its devices: {status}", step="state")
        await asyncio.sleep(_POLL_S)
