"""A machine that waits: what kind it is, how it comes so far, how it becomes that of a sandbox, how it goes.

It has gone on from its memory until its guest answered, and was stopped there: most of what a start takes goes before
that. It has a directory and a lock of its own; they become those of the sandbox that takes it, which is a matter of
names. It is in no group until then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worldfork.core.errors import LaunchFailed
from worldfork.core.remove import remove_tree
from worldfork.sandbox.driver import StartPlan
from worldfork.sandbox.microvm import qmp
from worldfork.sandbox.microvm.control import control
from worldfork.sandbox.microvm.keep import STATE_FD, Kept, is_readable
from worldfork.sandbox.microvm.manifest import MANIFEST, DiskChain
from worldfork.sandbox.microvm.starting import Origin, resume
from worldfork.sandbox.microvm.template import continue_from
from worldfork.sandbox.microvm.wire import Op
from worldfork.sandbox.remedies import explain

LOCK: Final = "lock"
"""In its place, held by its keep."""
BEGIN_S: Final = 10.0
"""So long one may take until it waits, and so long others wait for that."""


@dataclass(frozen=True)
class Kind:
    """What two machines must have in common for one to take the other's place."""

    directory: str
    mark: tuple[int, int]
    """Of the manifest there: a directory that was made again is another."""
    disks: tuple[DiskChain, ...]
    cpus: float | None
    """The limit of its group; that of its memory comes with the directory."""


@dataclass(frozen=True)
class Waiting:
    """A machine that waits."""

    kept: Kept
    place: Path
    """Its run directory, until it is taken."""
    generation: int


def kind_of(plan: StartPlan, origin: Origin) -> Kind | None:
    """Return what a machine for this plan must be; None if it can only be made for it."""
    facts = plan.facts
    if facts.detached or facts.timeout_s or origin.network != "none":
        return None
    try:
        info = os.stat(origin.directory / MANIFEST)
    except OSError:
        return None
    return Kind(str(origin.directory), (info.st_ino, info.st_mtime_ns), origin.disks, facts.limits.cpus)


def bring_up(kept: Kept, run: Path, generation: int, origin: Origin) -> None:
    """Let a machine that waits for orders go on until its guest is no twin of another, and stop it there. Blocking.

    Its guest has randomness of its own from here on; it gets its names from whoever takes it.

    Raises:
        LaunchFailed: it does not come so far; it is ended.
    """
    try:
        asyncio.run(_bring_up(kept, run, generation, origin))
    except BaseException as error:
        kept.put_down()
        if isinstance(error, TimeoutError):
            raise LaunchFailed(f"a machine did not go on within {BEGIN_S:g} s", step="standby") from error
        raise


async def _bring_up(kept: Kept, run: Path, generation: int, origin: Origin) -> None:
    async with asyncio.timeout(BEGIN_S):
        await kept.launched()
        async with qmp.connect(run / "qmp") as monitor:
            await continue_from(monitor, STATE_FD, origin.saved.saved_by)
            await kept.ready()
            async with control(run) as guest:
                await resume(guest, generation)
                # The first program that a guest runs takes far more than others.
                await guest.ask_if_able(Op.REHEARSE)
            await monitor.execute("stop")


def settle(waiting: Waiting, plan: StartPlan) -> bool:
    """Make a machine that waits that of a sandbox; False, and it is gone, if that cannot be done here.

    Raises:
        LaunchFailed: it failed half-way; the machine is gone.
    """
    run = Path(plan.facts.run)
    try:
        # The first step tells whether the places are on one file system.
        os.rename(waiting.place / LOCK, plan.lock)
    except OSError:
        put_away(waiting)
        return False
    try:
        for name in os.listdir(run):
            os.rename(run / name, waiting.place / name)
        # Its keep stands in this directory, wherever that is.
        os.rename(waiting.place, run)
    except OSError as error:
        put_away(waiting)
        raise explain("taking a machine that waited", error.errno or 0, plan.facts.sandbox_id) from error
    return True


def enter_groups(items: Iterable[tuple[str, str]], pid: int, sandbox_id: str) -> None:
    """Make the groups of a sandbox, and put a QEMU that runs into them. Blocking: the kernel takes its time.

    Args:
        items: as a keep's plan has them for one that starts.
        pid: of the QEMU.
        sandbox_id: for messages.

    Raises:
        LaunchFailed: that failed.
    """
    directory = ""
    try:
        for key, value in items:
            if key == "cgdir":
                directory = value
                os.mkdir(directory, 0o755)
            elif key == "cgset":
                name, _, text = value.partition("\t")
                Path(directory, name).write_text(text)
            elif key == "cgjoin":
                Path(directory, "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise explain(f"the cgroup {directory}", error.errno or 0, sandbox_id) from error


def put_away(waiting: Waiting) -> None:
    """End a machine that waits; nothing of it is left. Blocking."""
    waiting.kept.put_down()
    if waiting.place.exists():
        remove_tree(waiting.place)


def has_ended(pid: int) -> bool:
    """Whether a keep's process has ended."""
    try:
        keep = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return is_readable(keep)
    finally:
        os.close(keep)
