"""The `microvm` driver: a virtual machine of its own round every sandbox."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from worldfork.core.errors import DriverUnavailable, LaunchFailed, SandboxDied
from worldfork.core.settings import Settings
from worldfork.core.shielded import to_its_end
from worldfork.core.threads import in_thread
from worldfork.records.sandbox import SandboxFacts
from worldfork.sandbox.cgroups import CgroupLayout, detect_layout
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.driver import Begun, Capabilities, Ground, Started, StartPlan
from worldfork.sandbox.microvm import inside, starting
from worldfork.sandbox.microvm.blank import scratch_mib
from worldfork.sandbox.microvm.connections import OutsideConnection, outside
from worldfork.sandbox.microvm.costs import Costs, costs
from worldfork.sandbox.microvm.disks import chains_in, fresh_disks
from worldfork.sandbox.microvm.exporting import copy_disk
from worldfork.sandbox.microvm.host import Host, file_mark, find_host
from worldfork.sandbox.microvm.keep import Kept, put_down
from worldfork.sandbox.microvm.machine import Network
from worldfork.sandbox.microvm.manifest import read_running, read_saved
from worldfork.sandbox.microvm.memories import Memories
from worldfork.sandbox.microvm.saving import MemorySaved, save_memory
from worldfork.sandbox.microvm.sizes import behind_card, check_memory, group_items
from worldfork.sandbox.microvm.sizes import machine_size as machine_size
from worldfork.sandbox.microvm.standby import Standby
from worldfork.sandbox.microvm.starting import Origin
from worldfork.sandbox.microvm.template import ensure_template
from worldfork.sandbox.microvm.waiting import Kind, Waiting, bring_up, enter_groups, kind_of, put_away, settle
from worldfork.sandbox.namespace import natural_form

START_S: Final = 30.0

_SENT_BEYOND_BYTES: Final = 64 << 20


class MicrovmDriver:
    """Starts every sandbox in a virtual machine of its own.

    Args:
        settings: of this process.
        images: where guest images, templates and images of trees are kept: `home/images`.
    """

    name = "microvm"
    overlay = "new"
    """No directory of the host is mounted; the guest has its own way."""
    ids = ""
    """The map of ids of an ordinary user's range, as of the namespace driver; whoever makes this one sets it."""

    def __init__(self, settings: Settings, images: Path) -> None:
        self.form = settings.form if settings.form != "auto" else natural_form()
        self.layout = detect_layout() if settings.cgroups == "auto" else CgroupLayout({}, None)
        self._images = images
        self._allow_tcg = settings.allow_tcg
        self._host: Host | None = None
        self._finding = threading.Lock()
        self._memories = Memories()
        self._standby = Standby(images)
        self._starting = 0
        self._counting = threading.Lock()
        self._copying: dict[str, asyncio.Future[int | None]] = {}

    def capabilities(self) -> Capabilities:
        """Return what this driver can do here."""
        trusted = self.form == "trusted"
        # Limits are kept by the guest's own kernel, whatever this host allows.
        return Capabilities(
            form=self.form,
            rename_base_dirs=trusted,
            limits=True,
            other_users=trusted or bool(self.ids),
            memory_checkpoint=True,
            disk_on_host=False,
            host_base=False,
            host_network=False,
            live_mounts=False,
            adopts=False,
            host_processes=False,
        )

    def cgroups_of(self, sandbox_id: str) -> tuple[str, ...]:
        """Return the cgroup directories that `start` will make, for its QEMU."""
        return self.layout.directories(sandbox_id)

    def begin(self, network: str) -> Begun:
        """Return a start with nothing under way: a machine cannot begin before its plan is known."""
        del network
        return Begun(0, socket.socket())

    def stock(self) -> None:
        """Do nothing: a machine begins the next one of its kind by itself."""

    def drop_spare(self, unused_s: float = 0.0) -> bool:
        """Let go of the machine that waits and of memories that were not used of late; return whether any is left."""
        waits = self._standby.drop(unused_s)
        return self._memories.drop(unused_s) or waits

    def forget_spare(self) -> None:
        """In a forked child: let go of the parent's."""
        self._finding = threading.Lock()
        self._counting = threading.Lock()
        self._starting = 0
        self._standby.forget()
        self._memories.forget()

    async def abandon(self, begun: Begun) -> None:
        """Take back a start that was begun."""
        begun.sock.close()

    async def start(self, plan: StartPlan, begun: Begun | None = None) -> Started:
        """Start a sandbox in a machine; on failure or cancellation nothing of it is left running."""
        if begun is not None:
            begun.sock.close()
        if plan.facts.base.kind == "host":
            raise DriverUnavailable(
                "the machine's own userland cannot be the ground of a virtual machine",
                remedy="use base='dir:PATH'; `worldfork image build --driver microvm --from debian` makes one",
            )
        host = self._known_host()
        if host is None:
            host = await in_thread(self._find_host)
        check_memory()
        self._count(1)
        try:
            origin = await self._origin(host, plan)
            try:
                kept, generation, stopped = await self._begun(host, plan, origin)
            finally:
                os.close(origin.ram_fd)
            try:
                async with asyncio.timeout(START_S):
                    connection = await self._come_up(kept, plan, host, origin, generation, stopped)
            except BaseException as error:
                told = await _failed(kept, plan, error)
                if told is error:
                    raise
                raise told from error
        finally:
            others = self._count(-1)
        if not others:  # while others start, it would only take their time
            self._begin_next(host, plan, origin)
        return Started(pid=kept.pid, connection=connection, leash=kept.let_go())

    async def reroot(
        self, facts: SandboxFacts, ground: Ground, namespaces: list[int], kept: tuple[int, ...]
    ) -> asyncio.Future[None]:
        """Refuse: what a machine has mounted stays."""
        del ground, namespaces, kept
        raise _keeps_root(facts)

    async def upper_of(self, facts: SandboxFacts, namespaces: list[int]) -> str:
        """Refuse: what a machine writes lies in its own disk."""
        del namespaces
        raise _keeps_root(facts)

    async def outside(self, facts: SandboxFacts) -> tuple[OutsideConnection, ...]:
        """Return the connections that leave a running sandbox; see `connections.outside`."""
        return await outside(Path(facts.run))

    async def copy_disk(self, facts: SandboxFacts, connection: Connection, target: Path, *, idle: bool) -> int | None:
        """Write what a sandbox has changed as a layer, while nothing in it runs; see `exporting.copy_disk`.

        Args:
            facts: of the sandbox.
            connection: the one that holds it.
            target: does not exist yet; made only if something changed.
            idle: whether only init runs in it; else the rest is frozen.
        """
        del connection, idle
        run = Path(facts.run)
        below = read_running(run).below
        copying = asyncio.ensure_future(
            copy_disk(
                run,
                inside.UPPER,
                target,
                facts.form,
                below=Path(below) if below else None,
                # Its disk holds no more; a guest that was broken into might send for ever.
                limit_bytes=(scratch_mib(facts.limits.disk_mb) << 20) + _SENT_BEYOND_BYTES,
            )
        )
        self._copying[facts.sandbox_id] = copying
        try:
            return await copying
        finally:
            del self._copying[facts.sandbox_id]

    def stop_copying(self, facts: SandboxFacts) -> None:
        """Cancel a `copy_disk` that is under way, in the loop that it runs in: a guest may be as slow as it likes."""
        copying = self._copying.get(facts.sandbox_id)
        if copying is not None:
            copying.cancel()

    async def costs(self, facts: SandboxFacts) -> Costs:
        """Return what checkpoints of a running sandbox would take; see `costs.costs`."""
        return await costs(Path(facts.run))

    async def save_memory(self, facts: SandboxFacts, target: Path, *, drop_outside: bool) -> MemorySaved:
        """Save a running sandbox with its memory; it goes on. See `saving.save_memory`."""
        run = Path(facts.run)
        more = {"network": read_running(run).network}
        return await save_memory(run, target, drop_outside=drop_outside, facts=more)

    def _known_host(self) -> Host | None:
        """Return what is known of this machine, unless its QEMU was replaced: another one has memories of its own."""
        host = self._host
        return host if host is not None and host.qemu_file == file_mark(host.qemu.program) else None

    def _find_host(self) -> Host:
        with self._finding:
            found = self._known_host() or find_host(self._images, allow_tcg=self._allow_tcg)
            self._host = found
            return found

    async def _origin(self, host: Host, plan: StartPlan) -> Origin:
        if plan.memory is not None:
            if self._memories.holds(plan.memory):
                return self._saved_origin(host, plan.memory, plan)
            return await _lent(in_thread(self._saved_origin, host, plan.memory, plan))
        ram_bytes, vcpus = machine_size(plan.facts.limits)
        template = await in_thread(ensure_template, self._images, host, ram_bytes, vcpus)
        return await _lent(in_thread(self._fresh_origin, host, template, plan))

    def _saved_origin(self, host: Host, directory: Path, plan: StartPlan) -> Origin:
        saved = read_saved(directory)
        host.check(saved)
        network = behind_card(saved, plan)
        disks = chains_in(directory, saved.disks)
        return Origin(directory, saved, self._memories.lend(directory, saved), disks, network)

    def _fresh_origin(self, host: Host, directory: Path, plan: StartPlan) -> Origin:
        saved = read_saved(directory)
        host.check(saved)
        disks = fresh_disks(self._images, plan)
        network: Network = "host" if plan.facts.network == "host" else "none"
        return Origin(directory, saved, self._memories.lend(directory, saved), disks, network)

    def _count(self, change: int) -> int:
        """Return how many starts are under way, one more or less."""
        with self._counting:
            self._starting += change
            return self._starting

    async def _begun(self, host: Host, plan: StartPlan, origin: Origin) -> tuple[Kept, int, bool]:
        """Take the machine that waits, or start one; return its keep, the generation of its wire, and which it is."""
        kind = kind_of(plan, origin)
        waiting = await self._coming(kind) if self._standby.comes(kind) else self._standby.take(kind)
        if waiting is not None:
            if settle(waiting, plan):
                return waiting.kept, waiting.generation, True
            self._standby.useless = True
        return *starting.restore(host, plan, origin, group_items(self.layout, plan.facts, origin.saved.build)), False

    async def _coming(self, kind: Kind | None) -> Waiting | None:
        """Wait for the machine that is being begun; a caller who is cancelled gives it back."""
        task = asyncio.ensure_future(in_thread(self._standby.take, kind))
        try:
            return await to_its_end(task)
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None and (waiting := task.result()):
                await in_thread(put_away, waiting)
            raise

    async def _come_up(
        self, kept: Kept, plan: StartPlan, host: Host, origin: Origin, generation: int, stopped: bool
    ) -> Connection:
        """Do what `starting.come_up` does; a machine that waited enters the sandbox's groups meanwhile."""
        if not stopped:
            await kept.launched()
            return await starting.come_up(kept, plan, host, origin, generation)
        items = group_items(self.layout, plan.facts, origin.saved.build)
        entering = asyncio.ensure_future(in_thread(enter_groups, items, kept.qemu_pid, plan.facts.sandbox_id))
        try:
            connection = await starting.come_up(kept, plan, host, origin, generation, stopped=True)
        except BaseException:
            await to_its_end(asyncio.gather(entering, return_exceptions=True))
            raise
        try:
            await to_its_end(entering)
        except BaseException:
            connection.close()
            raise
        return connection

    def _begin_next(self, host: Host, plan: StartPlan, origin: Origin) -> None:
        """Let machines like this one wait for the next sandboxes, if that is possible. Not blocking."""
        kind = kind_of(plan, origin)
        if kind is None:
            return

        def begin(planned: StartPlan) -> tuple[Kept, int]:
            memory = self._memories.lend(origin.directory, origin.saved)
            try:
                # It enters groups when it is taken: those of its sandbox.
                kept, generation = starting.restore(host, planned, replace(origin, ram_fd=memory), [], waits=True)
            finally:
                os.close(memory)
            bring_up(kept, Path(planned.facts.run), generation, origin)
            return kept, generation

        self._standby.stock(kind, plan, begin)


async def _lent(work: Coroutine[Any, Any, Origin]) -> Origin:
    """Wait for what a machine starts from; a caller who is cancelled waits too, and gives the memory back."""
    task = asyncio.ensure_future(work)
    try:
        return await to_its_end(task)
    except asyncio.CancelledError:
        if task.done() and not task.cancelled() and task.exception() is None:
            os.close(task.result().ram_fd)
        raise


async def _failed(kept: Kept, plan: StartPlan, error: BaseException) -> BaseException:
    """End a machine that did not start; return the error to raise."""
    died = isinstance(error, SandboxDied) or isinstance(error.__cause__, SandboxDied)
    try:
        words = await kept.last_words() if died else None
    finally:
        await put_down(kept)
    if isinstance(error, TimeoutError):
        return LaunchFailed(
            f"the machine did not answer within {START_S:.0f} s",
            remedy="start fewer at a time",
            sandbox_id=plan.facts.sandbox_id,
        )
    if words is not None or isinstance(error, SandboxDied):
        return words or LaunchFailed(
            f"the machine ended while it started: {error}", sandbox_id=plan.facts.sandbox_id, step="machine"
        )
    return error


def _keeps_root(facts: SandboxFacts) -> DriverUnavailable:
    return DriverUnavailable(
        f"{facts.sandbox_id} runs in a machine, whose root stays as it is",
        remedy="take a checkpoint, and start a sandbox from that",
        sandbox_id=facts.sandbox_id,
    )
