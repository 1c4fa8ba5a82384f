"""`AsyncSandbox`: the life of a sandbox, as coroutines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from worldfork.core.errors import ConfigError, Locked, NotFound
from worldfork.lineage.arguments import OWN_EXTRAS, check_foreign, choose_base, start_options
from worldfork.lineage.commands import Commands
from worldfork.lineage.fitting import expect_base
from worldfork.lineage.fork import expect_forks, fork_snapshot
from worldfork.lineage.freezing import Freezing
from worldfork.lineage.grounds import base_snapshot
from worldfork.lineage.identity import choose_seeds
from worldfork.lineage.listing import all_infos, all_suspended, find_live, info_of, is_suspended
from worldfork.lineage.live import Live
from worldfork.lineage.place import Place, is_open, place
from worldfork.lineage.processes import Processes
from worldfork.lineage.snapshots import ForkResult, ForkResults, SnapshotInfo, snapshot_info
from worldfork.lineage.starting import start
from worldfork.lineage.transfers import Transfers
from worldfork.records.cpu import CpuUse
from worldfork.records.death import Death, LimitHits
from worldfork.records.sandbox import SandboxFacts, SandboxInfo, SandboxStatus
from worldfork.records.shown import Shown
from worldfork.records.snapshot import CheckpointType, SnapshotRecord


class AsyncSandbox(Commands, Freezing, Processes, Transfers):
    """A live, isolated place that runs commands. Made by `create`, `connect` or a fork, never directly.

    It ends with `terminate`, with its `async with` block, or with this process, unless it was made detached.
    """

    def __init__(self, live: Live, *, owned: bool) -> None:
        self._live = live
        self._owned = owned
        self.bind_outcome = "created" if owned else "attached"
        """How `get_or_create` came by it."""

    @classmethod
    async def create(
        cls,
        image: str | None = None,
        cpus: float | None = None,
        memory_mb: int | None = None,
        disk_mb: int | None = None,
        *,
        timeout_secs: float | None = None,
        allow_internet_access: bool | None = None,
        snapshot_id: str | None = None,
        name: str | None = None,
        wait: bool = True,
        base: str | None = None,
        network: str | None = None,
        pids: int | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        working_dir: str | None = None,
        detached: bool = False,
        seed: int | None = None,
        driver: str | None = None,
        **foreign: Any,
    ) -> Self:
        """Start a sandbox: a fresh one on a base, or a restore of `snapshot_id`.

        Args:
            image, base: `host` (this machine's userland, private) or `dir:PATH` (a root file system); by default
                WORLDFORK_BASE, which is `host` where it is not set.
            cpus, memory_mb, disk_mb, pids: limits; a fresh one has 1 core, 1024 MiB and 1024 processes, a restore
                its snapshot's.
            timeout_secs: the sandbox ends by itself after so many seconds.
            network, allow_internet_access: "host" or "none". A fresh one has the host's network by default, but for a
                machine; a restore never inherits it.
            driver: "namespace" or "microvm" (a virtual machine); by default WORLDFORK_DRIVER. A snapshot with memory
                always goes on under the driver that it was taken of.
            name: shown in lists, and its host name; `get_or_create` finds it.
            detached: it outlives this process, until `terminate`.
            mounts: `records.origin.Mount`s, shown read-only; no checkpoint of the sandbox has them, no fork inherits
                them. What runs in it can still talk to sockets and FIFOs that lie in such a directory.
            seed: WORLDFORK_SEED inside; random by default.

        Raises:
            ConfigError: an argument is wrong; nothing was started.
            NotFound: no such snapshot.
            DriverUnavailable, LaunchFailed, OutOfSpace: with the remedy.
        """
        del wait  # a sandbox here is ready when it exists
        extra = {key: foreign.pop(key) for key in OWN_EXTRAS if key in foreign}
        check_foreign(foreign)
        here = await _here()
        options = start_options(
            fresh=snapshot_id is None, driver=driver or here.settings.driver, name=name, network=network,
            allow_internet_access=allow_internet_access, cpus=cpus, memory_mb=memory_mb, disk_mb=disk_mb, pids=pids,
            env=env, user=user, working_dir=working_dir, detached=detached, timeout_secs=timeout_secs, **extra,
        )  # fmt: skip
        record = await _starting_point(here, snapshot_id, image, base, options.driver)
        chosen = choose_seeds(None if seed is None else [seed], 1)[0]
        return cls(await start(here, record, options, seed=chosen), owned=True)

    @classmethod
    async def connect(cls, sandbox_id: str, **foreign: Any) -> Self:
        """Attach to a live sandbox by id or name, of this process or another.

        Raises:
            NotFound: no live sandbox is called so.
        """
        check_foreign(foreign)
        here = await _here()
        known = here.live.get(sandbox_id)
        if known is not None and known.alive():
            return cls(known, owned=False)
        holder = await here.work(lambda: find_live(here, sandbox_id))
        known = here.live.get(holder.holder_id)
        if known is None or not known.alive():
            known = Live(here, SandboxFacts.from_json(holder.facts))
        return cls(known, owned=False)

    @classmethod
    async def get_or_create(cls, name: str, **arguments: Any) -> Self:
        """Attach to the live sandbox of this name, or create it. One is made, however many ask at once.

        A suspended one of this name is resumed, unless `resume=False`.
        """
        resumes = arguments.pop("resume", True)
        here = await _here()
        async with here.single_flight(f"sandbox:{name}"):
            with contextlib.suppress(NotFound):
                return await cls.connect(name)
            if resumes and await here.work(lambda: all_suspended(here)):
                with contextlib.suppress(NotFound, Locked):
                    return await cls.resume(name, detached=arguments.get("detached"))
                # Somebody may have resumed it since the first look, without asking for it by this method.
                with contextlib.suppress(NotFound):
                    return await cls.connect(name)
            return await cls.create(name=name, **arguments)

    @classmethod
    async def resume(cls, sandbox_id: str, *, detached: bool | None = None) -> Self:
        """Let a suspended sandbox go on, called by its id or name: with the processes, the id and the seed that it had.

        Args:
            sandbox_id: which; the id of the snapshot in which it rests will do.
            detached: whether it outlives this process; as it was by default.

        Raises:
            NotFound: no suspended sandbox is called so. Locked: it goes on already.
            DriverUnavailable, LaunchFailed, OutOfSpace, Corrupt: it rests on.
        """
        from worldfork.lineage.suspending import resume

        found = cls(await resume(await _here(), sandbox_id, detached=detached), owned=True)
        found.bind_outcome = "resumed"
        return found

    @classmethod
    async def list(cls, **foreign: Any) -> Sequence[SandboxInfo]:
        """Return the live sandboxes of this home, of all processes, oldest first; then those that are suspended."""
        check_foreign(foreign)
        here = await _here()
        return await here.work(lambda: all_infos(here))

    @classmethod
    async def get_snapshot(cls, snapshot_id: str, **foreign: Any) -> SnapshotInfo:
        """Return a snapshot.

        Raises:
            NotFound: there is none of this id.
        """
        check_foreign(foreign)
        here = await _here()
        return snapshot_info(await here.work(lambda: here.store.snapshot(snapshot_id)))

    @classmethod
    async def delete_snapshot(cls, snapshot_id: str, **foreign: Any) -> None:
        """Delete a snapshot, and the layers that nothing else uses.

        Raises:
            NotFound: there is none of this id. Locked: live sandboxes started from it; `holders` names them.
        """
        check_foreign(foreign)
        here = await _here()
        await here.work(lambda: here.store.delete_snapshot(snapshot_id))
        await here.work(here.store.collect)
        here.tidy_soon()
        here.upkeep.want()

    @classmethod
    async def list_all_snapshots(cls) -> Sequence[SnapshotInfo]:
        """Return every snapshot of this home, oldest first."""
        here = await _here()
        return [snapshot_info(record) for record in await here.work(here.store.snapshots)]

    @classmethod
    async def fork_snapshot(
        cls,
        snapshot_id: str,
        n: int = 1,
        *,
        seeds: Sequence[int] | str | None = None,
        max_concurrency: int | None = None,
        **options: Any,
    ) -> ForkResults[Self]:
        """Start `n` sandboxes from a snapshot: for each child a sandbox or its error.

        Args:
            seeds: "independent" (default), "common", or one for each.
            max_concurrency: how many start at a time; by default twice the processors.
            options: as for `create`, where they make sense for a restore.

        Raises:
            NotFound: no such snapshot. ConfigError: an argument is wrong.
        """
        here = await _here()
        chosen = start_options(fresh=False, **{**options, "driver": options.get("driver") or here.settings.driver})
        children = await fork_snapshot(here, snapshot_id, n, chosen, seeds=seeds, max_concurrency=max_concurrency)
        return ForkResults([
            ForkResult(index, None, child) if isinstance(child, Exception) else
            ForkResult(index, cls(child, owned=True), None)
            for index, child in enumerate(children)
        ])  # fmt: skip

    async def fork(
        self, n: int = 1, *, memory: bool = False, outside: str = "refuse", **options: Any
    ) -> ForkResults[Self]:
        """Checkpoint this live sandbox and start `n` from the snapshot; it goes on untouched.

        Args:
            n: how many.
            memory: with the processes that run in it, each where it is. Commands that somebody waits for end in the
                forks, whose callers wait elsewhere; what `start_process` began, or went to the background, lives on.
            outside: as of `checkpoint`.
            options: as of `fork_snapshot`; the driver is the sandbox's own by default.

        Raises:
            ConfigError, OutOfSpace: these forks cannot come about; no snapshot was taken. Else as `checkpoint`.
        """
        options["driver"] = options.get("driver") or self._live.facts.driver
        asked = {name: options[name] for name in ("seeds", "max_concurrency") if name in options}
        wanted = {name: value for name, value in options.items() if name not in asked}
        expect_forks(self._live, n, start_options(fresh=False, **wanted), memory=memory, **asked)
        kind = CheckpointType.MEMORY if memory else CheckpointType.FILESYSTEM
        snapshot = await self.checkpoint(checkpoint_type=kind, outside=outside)
        return await type(self).fork_snapshot(snapshot.snapshot_id, n, **options)

    async def info(self) -> SandboxInfo:
        """Return what this sandbox is and does now."""
        if not self._live.alive():
            return info_of(self._live.facts, SandboxStatus.TERMINATED)
        told = await (await self._live.connection()).info()
        return info_of(
            self._live.facts, SandboxStatus.RUNNING, commands=told.running_commands, processes=told.processes
        )

    async def status(self) -> SandboxStatus:
        """Return RUNNING, SUSPENDED or TERMINATED."""
        if self._live.alive():
            return SandboxStatus.RUNNING
        here = self._live.place
        rests = await here.work(lambda: is_suspended(here, self.sandbox_id))
        return SandboxStatus.SUSPENDED if rests else SandboxStatus.TERMINATED

    async def cause_of_death(self) -> Death | None:
        """Return how this sandbox ended; None while it lives. Waits a moment for the last of its processes to go."""
        return await self._live.cause_of_death()

    async def limit_hits(self) -> LimitHits:
        """Return how often its processes met its limits, and how often the host's memory ended one of them."""
        return await self._live.limit_hits()

    async def cpu_use(self) -> CpuUse | None:
        """Return the CPU seconds of all that ever ran in it, and its threads, counted on the host by its cgroup.

        Nothing inside takes part in that, nor sees it. None where the host has no group that counts: no writable
        cpuacct of version 1, no version 2. None too once the sandbox is gone.
        """
        return self._live.cpu_use()

    async def terminate(self) -> None:
        """End the sandbox: every process, mount, cgroup and file of it is gone afterwards. Idempotent."""
        await self._live.end()

    def close(self) -> None:
        """Let go of a sandbox that this handle only attached to; it lives on."""
        if not self._owned:
            self._live.close()

    @property
    def sandbox_id(self) -> str:
        """Its id."""
        return self._live.sandbox_id

    @property
    def name(self) -> str:
        """Its name; its id where it was given none."""
        return self._live.facts.name

    @property
    def fork_index(self) -> int:
        """Which child of its fork it is, from 0."""
        return self._live.facts.fork_index

    @property
    def seed(self) -> int:
        """WORLDFORK_SEED inside."""
        return self._live.facts.seed

    @property
    def mounts(self) -> Sequence[Shown]:
        """What it shows read-only besides its disk, in the order of the targets, each with its fingerprint."""
        return self._live.facts.mounts

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._owned:
            await self.terminate()
        else:
            self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sandbox_id!r})"


async def _here() -> Place:
    # Opening takes disk; once it is open, asking for it costs nothing.
    return place() if is_open() else await asyncio.get_running_loop().run_in_executor(None, place)


async def _starting_point(
    here: Place, snapshot_id: str | None, image: str | None, base: str | None, driver: str
) -> SnapshotRecord:
    if snapshot_id is None:
        chosen = choose_base(image, base, here.settings.base)
        expect_base(chosen, driver)
        return await base_snapshot(here, chosen)
    if image is not None or base is not None:
        raise ConfigError("a snapshot brings its own base", remedy="leave out image and base")
    return await here.work(lambda: here.store.snapshot(snapshot_id))
