"""The `microvm` driver: a virtual machine of its own round every sandbox."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

from worldfork.core.errors import ConfigError, DriverUnavailable, LaunchFailed, OutOfSpace, SandboxDied
from worldfork.core.settings import Settings
from worldfork.core.threads import in_thread
from worldfork.records.sandbox import Limits, SandboxFacts
from worldfork.sandbox.cgroups import CgroupLayout, detect_layout
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.driver import Begun, Capabilities, Ground, Started, StartPlan
from worldfork.sandbox.microvm import inside, starting
from worldfork.sandbox.microvm.blank import scratch_mib
from worldfork.sandbox.microvm.connections import OutsideConnection, outside
from worldfork.sandbox.microvm.costs import Costs, costs
from worldfork.sandbox.microvm.disks import chains_in, fresh_disks, write_top
from worldfork.sandbox.microvm.exporting import copy_disk
from worldfork.sandbox.microvm.host import Host, file_mark, find_host
from worldfork.sandbox.microvm.keep import Kept, put_down
from worldfork.sandbox.microvm.machine import Network
from worldfork.sandbox.microvm.manifest import Saved, read_running, read_saved
from worldfork.sandbox.microvm.memories import Memories
from worldfork.sandbox.microvm.ram import available_bytes
from worldfork.sandbox.microvm.saving import MemorySaved, save_memory
from worldfork.sandbox.microvm.shielded import to_its_end
from worldfork.sandbox.microvm.starting import Origin
from worldfork.sandbox.microvm.template import ensure_template
from worldfork.sandbox.namespace import natural_form

OVERHEAD_MIB: Final = 64
"""What a guest's kernel and its init take, besides the memory that a sandbox may use."""
QEMU_MIB: Final = 128
"""What QEMU takes, besides its guest's memory."""
START_BYTES: Final = 64 << 20
"""Of the host's memory that must be free for a start: QEMU's own, and what a guest touches at once."""
START_S: Final = 30.0

_UNLIMITED_MIB: Final = 4096
"""For a sandbox without a memory limit: a machine has some size."""
_STEP_MIB: Final = 64
_SENT_BEYOND_BYTES: Final = 64 << 20
_QEMU_THREADS: Final = 128
_MIB: Final = 1 << 20


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

    def __init__(self, settings: Settings, images: Path) -> None:
        self.form = settings.form if settings.form != "auto" else natural_form()
        self.layout = detect_layout() if settings.cgroups == "auto" else CgroupLayout({}, None)
        self._images = images
        self._allow_tcg = settings.allow_tcg
        self._host: Host | None = None
        self._finding = threading.Lock()
        self._memories = Memories()

    def capabilities(self) -> Capabilities:
        """Return what this driver can do here."""
        trusted = self.form == "trusted"
        # Limits are kept by the guest's own kernel, whatever this host allows.
        return Capabilities(
            form=self.form,
            rename_base_dirs=trusted,
            limits=True,
            other_users=trusted,
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
        """Do nothing: no start can be begun before its plan is known."""

    def drop_spare(self, unused_s: float = 0.0) -> bool:
        """Let go of saved memories that were not used of late; return whether one is still held. Blocking."""
        return self._memories.drop(unused_s)

    def forget_spare(self) -> None:
        """In a forked child: let go of the parent's."""
        self._finding = threading.Lock()
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
        host = await in_thread(self._find_host)
        _check_memory()
        origin = await self._origin(host, plan)
        try:
            kept, generation = starting.restore(host, plan, origin, self._group_items(plan.facts, origin))
        finally:
            os.close(origin.ram_fd)
        try:
            async with asyncio.timeout(START_S):
                await starting.come_ready(kept, plan, host, origin, generation)
                connection = await starting.enter(plan, generation)
        except BaseException as error:
            told = await _failed(kept, plan, error)
            if told is error:
                raise
            raise told from error
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
        return await copy_disk(
            run,
            inside.UPPER,
            target,
            facts.form,
            below=Path(below) if below else None,
            # Its disk holds no more; a guest that was broken into might send for ever.
            limit_bytes=(scratch_mib(facts.limits.disk_mb) << 20) + _SENT_BEYOND_BYTES,
        )

    async def costs(self, facts: SandboxFacts) -> Costs:
        """Return what checkpoints of a running sandbox would take; see `costs.costs`."""
        return await costs(Path(facts.run))

    async def save_memory(self, facts: SandboxFacts, target: Path, *, drop_outside: bool) -> MemorySaved:
        """Save a running sandbox with its memory; it goes on. See `saving.save_memory`."""
        run = Path(facts.run)
        more = {"network": read_running(run).network}
        return await save_memory(run, target, drop_outside=drop_outside, facts=more)

    def _find_host(self) -> Host:
        with self._finding:
            # An upgrade while this process runs makes it another QEMU, whose memories are its own.
            if self._host is None or self._host.qemu_file != file_mark(self._host.qemu.program):
                self._host = find_host(self._images, allow_tcg=self._allow_tcg)
            return self._host

    async def _origin(self, host: Host, plan: StartPlan) -> Origin:
        if plan.memory is not None:
            return await _lent(in_thread(self._saved_origin, host, plan.memory, plan))
        ram_bytes, vcpus = machine_size(plan.facts.limits)
        template = await in_thread(ensure_template, self._images, host, ram_bytes, vcpus)
        return await _lent(in_thread(self._fresh_origin, host, template, plan))

    def _saved_origin(self, host: Host, directory: Path, plan: StartPlan) -> Origin:
        saved = read_saved(directory)
        host.check(saved)
        network = _behind_card(saved, plan)
        disks = chains_in(directory, saved.disks)
        written = (write_top(Path(plan.facts.run)), *disks[-1])
        memory = self._memories.lend(directory, saved)
        return Origin(directory, saved, memory, (*disks[:-1], written), network)

    def _fresh_origin(self, host: Host, directory: Path, plan: StartPlan) -> Origin:
        saved = read_saved(directory)
        host.check(saved)
        disks = fresh_disks(self._images, plan)
        network: Network = "host" if plan.facts.network == "host" else "none"
        return Origin(directory, saved, self._memories.lend(directory, saved), disks, network)

    def _group_items(self, facts: SandboxFacts, origin: Origin) -> list[tuple[str, str]]:
        if not self.layout.limited:
            return []
        build = origin.saved.build
        # A page that nobody used before is granted twice: in the memory that all forks share, and, once it is written,
        # for this one alone. The kernel counts both to who comes first.
        memory_mib = 2 * build.ram_bytes // _MIB + QEMU_MIB
        limits = Limits(facts.limits.cpus, memory_mib, None, _QEMU_THREADS + build.vcpus)
        return self.layout.items(facts.sandbox_id, limits)


def machine_size(limits: Limits) -> tuple[int, int]:
    """Return the bytes of memory and the number of processors of the machine for a sandbox with such limits."""
    wanted = limits.memory_mb if limits.memory_mb is not None else _UNLIMITED_MIB
    # Few sizes: each has a template of its own.
    memory_mib = -(-(wanted + OVERHEAD_MIB) // _STEP_MIB) * _STEP_MIB
    cpus = limits.cpus if limits.cpus is not None else float(os.cpu_count() or 1)
    return memory_mib * _MIB, max(1, math.ceil(cpus))


def _behind_card(saved: Saved, plan: StartPlan) -> Network:
    """Return what to put behind the card of a machine that goes on from a saved memory.

    Raises:
        ConfigError: it is to have a network, and was saved without one.
    """
    wanted, had = plan.facts.network == "host", saved.facts.get("network", "none") == "host"
    if wanted and not had:
        raise ConfigError(
            "what was saved without a network cannot be given one",
            remedy="fork it without a network, or start from a filesystem snapshot",
            field="network",
        )
    return "host" if wanted else "cut" if had else "none"


def _check_memory() -> None:
    free = available_bytes()
    if free is not None and free < START_BYTES:
        raise OutOfSpace(
            f"a machine needs {START_BYTES >> 20} MiB of memory to start, and the host has {free >> 20} MiB left",
            remedy="end other sandboxes first",
            scope="host",
        )


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
