"""What a checkpoint of a running machine would take, of either kind, so that one is chosen knowingly."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worldfork.core.errors import Corrupt, NotFound
from worldfork.sandbox.microvm import inside
from worldfork.sandbox.microvm.control import control
from worldfork.sandbox.microvm.machine import Accel
from worldfork.sandbox.microvm.manifest import Running, read_running, read_saved
from worldfork.sandbox.microvm.pages import allocated_bytes
from worldfork.sandbox.microvm.ram import open_sealed, private_bytes
from worldfork.sandbox.microvm.wire import Op

_STATE_BYTES: Final = 32 << 10
"""Of a small machine's devices; measured 9 to 22 KiB."""
_PAUSE_S: Final = 0.006
"""Of a machine that changed nothing."""
_PAGES_BYTES_PER_S: Final = 2.5e9
_EXPORT_BYTES_PER_S: Final[dict[Accel, float]] = {"tcg": 13e6, "kvm": 200e6}
"""At which a guest sends its files: measured where QEMU interprets it, a guess where it does not."""


@dataclass(frozen=True)
class Costs:
    """Estimates; what is measured is told by the checkpoint itself."""

    filesystem_bytes: int
    """At most: what the guest has written to its disk, what was removed again included."""
    filesystem_s: float
    """How long what runs would stand still at most; nothing does if nothing runs."""
    memory_bytes: int
    """What a memory snapshot would add: devices, changed pages, and what was written to the disk since the last one."""
    shared_bytes: int
    """What it would share with the snapshot that the machine started from, or with its template."""
    pause_s: float
    """How long the machine would stand still for it."""


async def costs(run: Path) -> Costs:
    """Return what checkpoints of a running machine would take; it goes on meanwhile.

    Args:
        run: the sandbox's directory below `run`.

    Raises:
        SandboxDied: the machine has ended.
        SandboxError: the guest gave no answer, or QEMU is not what was started.
    """
    running = read_running(run)
    async with control(run) as client:
        # Until it is written out, QEMU's files know nothing of it.
        await client.ask(Op.SYNC, os.fsencode(inside.SCRATCH))
    return await asyncio.to_thread(_costs, running)


def _costs(running: Running) -> Costs:
    pid = running.qemu_pid
    ram_fd = open_sealed(pid, running.ram_fd, running.build.ram_bytes)
    try:
        changed_bytes = private_bytes(pid, ram_fd)
    finally:
        os.close(ram_fd)
    written = [_allocated(Path(file.path)) for file in running.disks[-1] if file.format == "qcow2"]
    filesystem_bytes = sum(written)
    return Costs(
        filesystem_bytes=filesystem_bytes,
        filesystem_s=filesystem_bytes / _EXPORT_BYTES_PER_S[running.build.accel],
        memory_bytes=_STATE_BYTES + changed_bytes + sum(written[:1]),
        shared_bytes=sum(written[1:]) + _pages_bytes(Path(running.memory)),
        pause_s=_PAUSE_S + changed_bytes / _PAGES_BYTES_PER_S,
    )


def _pages_bytes(memory: Path) -> int:
    try:
        return sum(_allocated(memory / name) for name in read_saved(memory).ram)
    except (NotFound, Corrupt):
        return 0  # it was removed, and nothing can be shared with it


def _allocated(path: Path) -> int:
    try:
        return allocated_bytes(path)
    except FileNotFoundError:
        return 0
