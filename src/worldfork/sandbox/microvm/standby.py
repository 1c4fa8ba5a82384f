"""One machine begun beforehand, so that the next one of its kind finds that done.

It has gone on from its memory until its guest answered, and was stopped there: most of what a start takes goes before
that. It has a directory and a lock of its own; they become those of the sandbox that takes it, which is a matter of
names. It is in no group until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from worldfork.core.errors import LaunchFailed, WorldforkError
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

_PREFIX: Final = ".standby-"
_LOCK: Final = "lock"
_YOUNG_S: Final = 60.0
"""So long nobody takes a place without a lock for one that was left behind."""
_BEGIN_S: Final = 10.0
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

    kind: Kind
    kept: Kept
    place: Path
    """Its run directory, until it is taken."""
    generation: int


Begin = Callable[[StartPlan], tuple[Kept, int]]
"""Starts a machine and brings it to where it waits (`bring_up`), from a plan in which it is a sandbox of its own;
returns its generation too. Blocking."""


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


class Standby:
    """At most one machine that waits; safe for many threads.

    Args:
        top: the directory in which its place is made, on the file system of run directories.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        self._changed = threading.Condition()
        self._waiting: Waiting | None = None
        self._begun: Kind | None = None
        """Of the one that is being begun."""
        self._awaited = False
        """Whether somebody waits for that one."""
        self._since_s = 0.0
        self._tidied = False
        self.useless = False
        """Whether none is begun any more: what cannot be renamed cannot be taken."""

    def stock(self, kind: Kind, plan: StartPlan, begin: Begin) -> None:
        """Begin a machine like that of `plan`, if none of its kind waits; one of another kind goes. Blocking.

        Raises:
            WorldforkError, OSError: it cannot be begun.
        """
        with self._changed:
            if self.useless or self._begun is not None or (self._waiting is not None and self._waiting.kind == kind):
                return
            self._put_down()
            self._begun = kind
        waiting = None
        try:
            self._tidy()
            waiting = self._begin(kind, plan, begin)
        finally:
            with self._changed:
                self._waiting, self._since_s = waiting, time.monotonic()
                self._begun, self._awaited = None, False
                self._changed.notify_all()

    def _begin(self, kind: Kind, plan: StartPlan, begin: Begin) -> Waiting:
        name = f"{_PREFIX.lstrip('.')}{os.urandom(8).hex()}"
        place = self._top / f".{name}"
        place.mkdir(mode=0o700)
        facts = replace(plan.facts, sandbox_id=name, run=str(place), cgroups=())
        try:
            kept, generation = begin(replace(plan, facts=facts, lock=str(place / _LOCK)))
        except BaseException:
            remove_tree(place)
            raise
        return Waiting(kind, kept, place, generation)

    def comes(self, kind: Kind | None) -> bool:
        """Whether one of this kind is being begun that nobody waits for: `take` does."""
        with self._changed:
            return kind is not None and self._begun == kind and not self._awaited

    def take(self, kind: Kind | None) -> Waiting | None:
        """Hand out the machine that waits, if it is of this kind and has not ended; then `settle` it.

        Blocking where `comes`: that one is there sooner than another could be.
        """
        with self._changed:
            if self.comes(kind):
                self._awaited = True
                self._changed.wait_for(lambda: self._begun is None, _BEGIN_S)
            if kind is None or self._waiting is None or self._waiting.kind != kind:
                return None
            waiting, self._waiting = self._waiting, None
        if _has_ended(waiting.kept.pid):
            put_away(waiting)
            return None
        return waiting

    def drop(self, unused_s: float) -> bool:
        """End the one that waits if it has done so for `unused_s`; return whether one remains. Blocking."""
        with self._changed:
            if not unused_s:
                self._changed.wait_for(lambda: self._begun is None, _BEGIN_S)
            if self._waiting is not None and time.monotonic() - self._since_s >= unused_s:
                self._put_down()
            return self._waiting is not None or self._begun is not None

    def forget(self) -> None:
        """In a forked child: close our copies of what is the parent's."""
        self._changed = threading.Condition()
        self._begun, self._awaited = None, False
        if self._waiting is not None:
            fd = self._waiting.kept.let_go()
            if fd >= 0:
                os.close(fd)
            self._waiting = None

    def _put_down(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            put_away(waiting)

    def _tidy(self) -> None:
        """Remove places whose process was killed, once."""
        if self._tidied:
            return
        self._tidied = True
        for left in self._top.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError, WorldforkError):
                if _is_left(left):
                    remove_tree(left)


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
            raise LaunchFailed(f"a machine did not go on within {_BEGIN_S:g} s", step="standby") from error
        raise


async def _bring_up(kept: Kept, run: Path, generation: int, origin: Origin) -> None:
    async with asyncio.timeout(_BEGIN_S):
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
        os.rename(waiting.place / _LOCK, plan.lock)
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


def _has_ended(pid: int) -> bool:
    try:
        keep = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return is_readable(keep)
    finally:
        os.close(keep)


def _is_left(place: Path) -> bool:
    """Whether nobody holds the lock of a place."""
    try:
        fd = os.open(place / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # It may have been made just before.
        return time.time_ns() / 1e9 - place.stat().st_mtime > _YOUNG_S
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)
