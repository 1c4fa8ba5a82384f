"""From a snapshot to live sandboxes: facts, directories and leases first, then the driver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from worldfork.content.marks import data_xattrs
from worldfork.core import mapped
from worldfork.core.errors import (
    LaunchFailed,
    NotFound,
    WorldforkError,
)
from worldfork.core.ids import new_id
from worldfork.lineage.fitting import check_apart, check_base, check_driver, check_form, check_ids
from worldfork.lineage.identity import command_env, hostname, identity_files
from worldfork.lineage.live import Live
from worldfork.lineage.mounts import POINTS, find_mounts, learn_mounts, make_points, trees_of
from worldfork.lineage.place import Place
from worldfork.lineage.renewing import renewed
from worldfork.lineage.stacks import on_mountable
from worldfork.lineage.upper import make_directory
from worldfork.records.origin import Mount
from worldfork.records.sandbox import Base, Limits, SandboxFacts
from worldfork.records.snapshot import SnapshotRecord
from worldfork.sandbox.driver import Begun, Ground, StartPlan
from worldfork.sandbox.network import HOST_SETTINGS, HostNetwork, host_network
from worldfork.sandbox.remedies import explain
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.leases import GRACE_S
from worldfork.store.store import Holder

_SHM_DEFAULT_BYTES = 64 << 20
_NO_NETWORK = "# this sandbox has no network\n"


@dataclass(frozen=True)
class StartOptions:
    """What a start may change against its snapshot; None inherits."""

    name: str | None = None
    driver: str = "namespace"
    network: str = "none"
    limits: Mapping[str, float | int | None] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    working_dir: str | None = None
    detached: bool = False
    timeout_s: float | None = None
    host_settings: tuple[str, ...] = HOST_SETTINGS
    allow_changed_base: bool = False
    mounts: tuple[Mount, ...] = ()
    """What is shown read-only; never inherited."""


def suited(place: Place, record: SnapshotRecord, options: StartOptions, n: int) -> StartOptions:
    """Return the options by which `n` sandboxes start from a snapshot.

    Raises:
        ConfigError, OutOfSpace: as `machine_options`.
    """
    if options.driver == place.driver.name and record.kind != "memory":
        return options
    from worldfork.lineage.machines import machine_options

    return machine_options(place, record, options, n)


def make_facts(
    place: Place, record: SnapshotRecord, options: StartOptions, *, index: int = 0, seed: int = 0
) -> SandboxFacts:
    """Return the facts of a sandbox to be started from a snapshot.

    Raises:
        DriverUnavailable: the snapshot's layers have a form that this process cannot mount rightly, or the driver
            cannot start what it holds.
        FormatUnsupported: or they hold files of other ids, or it was taken on another userland.
        ConfigError: its base is gone, or would show the store inside.
    """
    driver = place.driver_of(options.driver)
    check_driver(record, driver.name)
    check_form(record, driver.form)
    check_ids(record, driver.ids)
    sandbox_id = new_id("sb")
    stored = record.facts
    woken = record.kind == "memory"
    # A memory needs nothing of its base any more.
    base = Base.from_json(record.base) if woken else check_base(record, options.allow_changed_base)
    if not woken:
        check_apart(place.home, base)
    return SandboxFacts(
        sandbox_id=sandbox_id,
        name=options.name or sandbox_id,
        run=str(place.home.run / sandbox_id),
        form=record.form,
        driver=driver.name,
        base=base,
        snapshot_id=record.snapshot_id,
        layers=record.layers,
        ids=driver.ids,
        cgroups=driver.cgroups_of(sandbox_id),
        network=options.network,
        env={**stored.get("env", {}), **options.env},
        user=stored.get("user", "") if options.user is None else options.user,
        working_dir=options.working_dir or stored.get("working_dir", "/workspace"),
        limits=Limits(**{**stored.get("limits", {}), **options.limits}),
        detached=options.detached,
        created_s=place.clock.now_s(),
        timeout_s=options.timeout_s,
        fork_index=index,
        seed=seed,
        owner_id=place.store.owner_id,
        mounts=find_mounts(place, options.mounts),
        woken=woken,
    )


def holder_of(facts: SandboxFacts) -> Holder:
    """Return the lease that a sandbox has on its snapshot and layers."""
    layers = (facts.moving, *facts.layers, *facts.next_layers) if facts.moving else facts.layers
    if facts.mounts:
        shown = (layer for mount in facts.mounts for layer in mount.layers)
        layers = tuple(dict.fromkeys((*layers, *shown)))
    return Holder(holder_id=facts.sandbox_id, snapshot_id=facts.snapshot_id, layers=layers, facts=facts.to_json())


def ground_of(place: Place, facts: SandboxFacts) -> Ground:
    """Return the directories of a sandbox's present overlay."""
    layers = [str(place.store.layer_path(layer)) for layer in facts.layers]
    if facts.base.path:
        layers.append(facts.base.path)
    if facts.mounts:
        # The places to mount on, below all else, so that none is ever made on the disk of the sandbox.
        layers.append(f"{facts.run}/{POINTS}")
    return Ground(
        layers=tuple(layers),
        upper=f"{facts.run}/upper.{facts.generation}",
        work=f"{facts.run}/work.{facts.generation}",
    )


def make_upper(ground: Ground, form: str, ids: str = "") -> None:
    """Make an empty upper and its work directory; the root of a world looks like its topmost layer's root.

    Args:
        ground: the layers, and the directories to make.
        form: whose marks the overlay reads.
        ids: the map of the sandbox's ids, one of which may own the root.
    """
    if ids and not _is_own(os.lstat(ground.layers[0])):
        mapped.run(make_upper, ground, form)
        return
    make_directory(ground.work, 0o700)
    make_directory(ground.upper, 0o700)
    top = os.lstat(ground.layers[0])
    with contextlib.suppress(PermissionError):  # a base of other owners, seen by an ordinary user
        os.chown(ground.upper, top.st_uid, top.st_gid)
    for name, value in data_xattrs(ground.layers[0], form).items():
        if not name.startswith("security."):
            os.setxattr(ground.upper, name, value, follow_symlinks=False)
    os.chmod(ground.upper, stat.S_IMODE(top.st_mode))
    os.utime(ground.upper, ns=(top.st_atime_ns, top.st_mtime_ns))


def may_take_long(place: str | Path, ids: str) -> bool:
    """Whether work on an upper or a layer may need a process that is other ids, which takes long to start.

    Args:
        place: the directory.
        ids: the map of the sandbox's ids.
    """
    if not ids:
        return False
    try:
        return not _is_own(os.lstat(place))
    except OSError:
        return True


def _is_own(info: os.stat_result) -> bool:
    """Whether a directory is this user's own and open to it."""
    return (info.st_uid, info.st_gid) == (os.geteuid(), os.getegid()) and info.st_mode & 0o500 == 0o500


def prepare(place: Place, many: list[SandboxFacts]) -> None:
    """Take the leases and make the directories of sandboxes to be started; all or none. Blocking."""
    place.store.hold([holder_of(facts) for facts in many])
    try:
        for facts in many:
            with typed(f"the directories of {facts.sandbox_id} cannot be made"):
                _make_directories(place, facts)
            fault("start:made")
    except BaseException:
        unprepare(place, many)
        raise


def unprepare(place: Place, many: list[SandboxFacts]) -> None:
    """Take back what `prepare` did, for sandboxes that will not be started. Blocking."""
    for facts in many:
        place.dispose(facts)
    place.tidy_soon()


def _make_directories(place: Place, facts: SandboxFacts) -> None:
    os.mkdir(facts.run, 0o700)
    if facts.mounts:
        make_points(facts)
    if not place.disk_on_host(facts):
        return
    if place.driver.overlay == "legacy":
        os.mkdir(Path(facts.run) / "scratch", 0o700)
    make_upper(ground_of(place, facts), facts.form, facts.ids)


async def start_prepared(
    place: Place, facts: SandboxFacts, network: HostNetwork | None, begun: Begun | None = None, *, since_s: float
) -> Live:
    """Start a sandbox whose leases and directories exist; on failure they are gone again.

    Args:
        since_s: a moment of the monotonic clock before its lease was taken.
    """
    try:
        starting = place.driver_of(facts).start(_plan(place, facts, network), begun)
        # A machine may have to be booted first.
        started = await (starting if place.disk_on_host(facts) else renewed(place, facts, starting))
        try:
            fault("start:answered")
            # Earlier nobody could take it for dead, and no start is to wait for a look.
            if place.clock.monotonic_s() - since_s >= GRACE_S:
                place.quick(lambda: _expect_held(place, facts))
            return Live(place, facts, started)
        except BaseException:
            started.connection.close()
            os.close(started.leash)
            await asyncio.shield(place.work(lambda: _kill(started.pid)))
            raise
    except BaseException as error:
        await asyncio.shield(place.work(lambda: place.dispose(facts)))
        place.tidy_soon()
        if isinstance(error, OSError) and not isinstance(error, WorldforkError):
            raise explain("keeping hold of the sandbox", error.errno or 0, facts.sandbox_id) from error
        raise


def _expect_held(place: Place, facts: SandboxFacts) -> None:
    """Make sure that nobody took a sandbox for dead before it came alive.

    Raises:
        LaunchFailed: somebody did, and cleared its lease away.
    """
    with contextlib.suppress(NotFound):
        place.store.holder(facts.sandbox_id)
        if place.store.is_alive(facts.sandbox_id):
            return
    raise LaunchFailed(
        f"{facts.sandbox_id} took more than {GRACE_S:g} s to start, and was cleared away as dead meanwhile",
        remedy="try again; start fewer sandboxes at a time where that happens often",
        sandbox_id=facts.sandbox_id,
    )


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


Ready = tuple[list[SandboxFacts], HostNetwork | None]
"""Sandboxes whose leases and directories exist, and the network that they share."""


async def begin_one(
    place: Place, record: SnapshotRecord, options: StartOptions, get_ready: Callable[[SnapshotRecord], Ready]
) -> tuple[Ready, Begun]:
    """Begin the start of one sandbox while its lease is taken and its directories are made.

    Args:
        options: which driver, and which network.
        get_ready: takes and makes them, of a record. Blocking.
    """
    driver = place.driver_of(options.driver)
    begun = driver.begin(options.network)
    try:
        if place.driver.ids and may_take_long(place.store.layer_path(record.layers[0]), place.driver.ids):
            return await place.work(lambda: get_ready(record), undo=lambda ready: unprepare(place, ready[0])), begun
        return place.quick(lambda: get_ready(record)), begun
    except BaseException:
        await driver.abandon(begun)
        raise


async def start(place: Place, record: SnapshotRecord, options: StartOptions, *, index: int = 0, seed: int = 0) -> Live:
    """Restore one sandbox from a snapshot."""
    options = suited(place, record, options, 1)

    def get_ready(found: SnapshotRecord) -> Ready:
        facts, network = with_network(make_facts(place, found, options, index=index, seed=seed), options)
        prepare(place, [facts])
        return [facts], network

    await learn_mounts(place, options.mounts)
    since_s = place.clock.monotonic_s()
    ready, begun = await on_mountable(place, record, lambda found: begin_one(place, found, options, get_ready))
    [facts], network = ready
    return await start_prepared(place, facts, network, begun, since_s=since_s)


def with_network(facts: SandboxFacts, options: StartOptions) -> tuple[SandboxFacts, HostNetwork | None]:
    """Add to the facts what a sandbox on the host's network takes from the host."""
    if facts.network != "host":
        return facts, None
    network = host_network(os.environ, options.host_settings)
    if facts.driver != "namespace":
        network = without_directories(network)
    return replace(facts, network_env=network.env), network


def without_directories(network: HostNetwork) -> HostNetwork:
    """Leave out what names whole directories, such as a package index: a machine would have to be given a copy."""
    gone = [target for source, target in network.binds if os.path.isdir(source)]
    return HostNetwork(
        env={name: value for name, value in network.env.items() if not any(target in value for target in gone)},
        binds=[(source, target) for source, target in network.binds if target not in gone],
        resolv_conf=network.resolv_conf,
    )


def _plan(place: Place, facts: SandboxFacts, network: HostNetwork | None) -> StartPlan:
    plan = StartPlan(
        facts=facts,
        ground=ground_of(place, facts),
        lock=str(place.store.lock_path(facts.sandbox_id)),
        hostname=hostname(facts),
        identity=identity_files(facts, network.resolv_conf if network else _NO_NETWORK),
        binds=tuple(network.binds) if network else (),
        shown=trees_of(place, facts),
        layer_ids=facts.layers,
        shm_bytes=(facts.limits.memory_mb << 20) // 2 if facts.limits.memory_mb else _SHM_DEFAULT_BYTES,
    )
    if not facts.woken:
        return plan
    return replace(plan, memory=place.store.memory_path(facts.snapshot_id or ""), env=command_env(facts))
