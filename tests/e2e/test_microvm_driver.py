"""The `microvm` driver with real machines: fresh sandboxes, forks of memories, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import machines
from tests.roots import make_small_root

from worldfork.core.errors import (
    ConfigError,
    Corrupt,
    DriverUnavailable,
    LaunchFailed,
    NotFound,
    OutOfSpace,
    SandboxDied,
    SandboxError,
)
from worldfork.core.ids import new_id
from worldfork.core.settings import Settings
from worldfork.records.sandbox import Base, Limits, SandboxFacts
from worldfork.sandbox import bases
from worldfork.sandbox.cgroups import remove_groups
from worldfork.sandbox.command import CommandResult, CommandSpec, Reason
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.driver import Ground, ShownTree, Started, StartPlan
from worldfork.sandbox.microvm import qmp, ram, sizes, wire
from worldfork.sandbox.microvm.control import control
from worldfork.sandbox.microvm.driver import MicrovmDriver
from worldfork.sandbox.microvm.manifest import MANIFEST, STATE, read_running

WAIT_S = 240
MEMORY_MB = 192

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(machines.missing()), reason=machines.missing()),
]

_PATH = {"PATH": "/bin:/usr/bin"}


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await work

    asyncio.run(bounded())


class World:
    """A driver, a base, and the sandboxes that a test starts."""

    def __init__(self, home: Path, top: Path, root: Path) -> None:
        self.images = machines.prepare_images(home / "images")
        self.settings = Settings(home=home, allow_tcg=True)
        self.driver = MicrovmDriver(self.settings, self.images)
        self.base = Base(kind="dir", path=str(root))
        self.top = top
        self.groups: list[str] = []
        self.layer = top / "ground"
        bases.write_ground(self.layer, self.base)

    def plan(self, *, layers: tuple[Path, ...] = (), **more: Any) -> StartPlan:
        """Return the plan of one more sandbox; `limits`, `detached` and `timeout_s` are of its facts."""
        sandbox_id = new_id("sb")
        run_at = self.top / sandbox_id
        run_at.mkdir(mode=0o700)
        of_facts = {name: more.pop(name) for name in ("limits", "detached", "timeout_s", "network") if name in more}
        stack = (*layers, self.layer)
        facts = SandboxFacts(
            sandbox_id=sandbox_id, name=sandbox_id, run=str(run_at), form="trusted", driver="microvm", base=self.base,
            snapshot_id=None, layers=tuple(path.name for path in stack), cgroups=self.driver.cgroups_of(sandbox_id),
            **{"limits": Limits(memory_mb=MEMORY_MB), **of_facts},
        )  # fmt: skip
        self.groups += facts.cgroups
        ground = Ground((*map(str, stack), self.base.path), str(run_at / "upper.0"), str(run_at / "work.0"))
        plan = {
            "hostname": f"host-{sandbox_id[-4:]}",
            "identity": (("/etc/hostname", f"host-{sandbox_id[-4:]}\n"), ("/etc/machine-id", f"{sandbox_id}\n")),
            # Directories of this test alone: their names would be ids of another test's.
            "layer_ids": tuple(str(path) for path in stack),
            "env": {**_PATH, "WORLDFORK_SANDBOX_ID": sandbox_id},
            **more,
        }
        return StartPlan(facts=facts, ground=ground, lock=str(run_at / "lock"), **plan)

    def clear(self) -> None:
        """End the machines of a test that failed half-way, and remove the groups of all."""
        self.driver.drop_spare()
        for group in filter(os.path.isdir, self.groups):
            for pid in Path(group, "cgroup.procs").read_text(encoding="ascii").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        assert remove_groups(self.groups) == []

    async def failing(self, plan: StartPlan) -> None:
        """Start a sandbox that is expected to fail, and clear away its groups, as its owner does."""
        try:
            await self.driver.start(plan)
        finally:
            assert remove_groups(plan.facts.cgroups) == []

    @contextlib.asynccontextmanager
    async def started(self, plan: StartPlan) -> AsyncIterator[Started]:
        """Start a sandbox for the block; nothing of it is left after."""
        found = await self.driver.start(plan)
        try:
            yield found
        finally:
            await end(found, plan)


async def end(started: Started, plan: StartPlan) -> int:
    """End a sandbox as its owner does; return the code of its keep."""
    started.connection.close()
    qemu = read_running(Path(plan.facts.run)).qemu_pid
    os.close(started.leash)
    code = await code_of(started)
    assert not os.path.exists(f"/proc/{qemu}"), "QEMU outlives its keep"
    assert remove_groups(plan.facts.cgroups) == []
    return code


async def code_of(started: Started) -> int:
    """Wait for the end of a keep; return its code."""
    _, status = await asyncio.to_thread(os.waitpid, started.pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_root(tmp_path_factory.mktemp("base") / "root")


@pytest.fixture
def world(home: Path, tmp_path: Path, root: Path) -> Iterator[World]:
    found = World(home, tmp_path, root)
    yield found
    found.clear()


async def sh(connection: Connection, text: str, timeout_s: float = 60) -> CommandResult:
    return await connection.run(CommandSpec(("/bin/sh", "-c", text), env=_PATH, timeout_s=timeout_s))


async def said(connection: Connection, text: str) -> str:
    """Return what a command prints; it must succeed."""
    return (await sh(connection, text)).check().stdout.strip()


async def save(world: World, plan: StartPlan, name: str) -> Path:
    target = world.top / name
    await world.driver.save_memory(plan.facts, target, drop_outside=False)
    return target


def test_a_fresh_sandbox_stands_on_its_layers_and_ends_cleanly(world: World, tmp_path: Path) -> None:
    top = tmp_path / "top"
    (top / "etc").mkdir(parents=True)
    (top / "etc" / "mine").write_text("of the top layer\n")
    os.chown(top / "etc" / "mine", 1000, 1000)
    os.utime(top / "etc" / "mine", ns=(1, 1_600_000_000_123_456_789))
    os.setxattr(top, "user.mark", b"1")
    top.chmod(0o751)
    os.utime(top, ns=(1, 1_500_000_000_000_000_001))
    plan = world.plan(layers=(top,))

    async def work() -> None:
        started = await world.driver.start(plan)
        # The root, before anything is written to it.
        assert await said(started.connection, "stat -c '%a %.9Y' /") == "751 1500000000.000000001"
        connection = started.connection
        assert (await connection.run(CommandSpec(("/bin/true",)))).ok
        assert await said(connection, "cat /etc/mine; stat -c '%u %g %.9Y' /etc/mine") == (
            "of the top layer\n1000 1000 1600000000.123456789"
        )
        assert await said(connection, "cat /etc/hostname /etc/machine-id /proc/sys/kernel/hostname") == (
            f"{plan.hostname}\n{plan.facts.sandbox_id}\n{plan.hostname}"
        )
        assert (await said(connection, "tail -n +3 /proc/net/dev")).startswith("lo:")
        assert await said(connection, "echo x > /new && echo y > /usr/bin/new && cat /new /usr/bin/new") == "x\ny"
        running = read_running(Path(plan.facts.run))
        assert running.isolation in ("kvm", "none (tcg)")
        with open(f"/proc/{running.qemu_pid}/fd/{running.ram_fd}", "rb") as memory:  # noqa: ASYNC230
            assert ram.is_sealed(memory.fileno())
        user = os.stat(f"/proc/{running.qemu_pid}").st_uid
        assert 0x6000_0000 <= user < 0x7000_0000
        assert await end(started, plan) == 0

    run(work())


def test_limits_are_kept_inside(world: World) -> None:
    plan = world.plan(limits=Limits(memory_mb=MEMORY_MB, disk_mb=32, pids=40))

    async def work() -> None:
        async with world.started(plan) as started:
            full = await sh(started.connection, "dd if=/dev/zero of=/fill bs=1048576 count=64")
            assert not full.ok
            assert "No space left" in full.stderr
            assert 20 < int(await said(started.connection, "stat -c %s /fill")) >> 20 < 33
            await said(started.connection, "rm /fill; echo fits > /again")
            bomb = await sh(started.connection, "x=a; while true; do x=$x$x; done")
            assert bomb.reason is Reason.OOM_KILLED
            assert await said(started.connection, "cat /again") == "fits"
            many = await sh(started.connection, "for i in $(seq 60); do sleep 5 & done; wait")
            assert "fork" in many.stderr

    run(work())


def test_what_is_shown_is_read_only(world: World, tmp_path: Path) -> None:
    for name in ("data", "low", "high"):
        (tmp_path / name / "in").mkdir(parents=True)
        (tmp_path / name / "in" / "which").write_text(name)
    (tmp_path / "points" / "data").mkdir(parents=True)
    (tmp_path / "points" / "tree").mkdir()
    shown = (
        ShownTree("/data", str(tmp_path / "data")),
        ShownTree("/tree", "/in", (str(tmp_path / "high"), str(tmp_path / "low"))),
    )
    plan = world.plan(shown=shown)
    layers = (*plan.ground.layers, str(tmp_path / "points"))
    plan = dataclasses.replace(plan, ground=dataclasses.replace(plan.ground, layers=layers))

    async def work() -> None:
        async with world.started(plan) as started:
            assert await said(started.connection, "cat /data/in/which /tree/which") == "datahigh"
            refused = await sh(started.connection, "echo x > /data/new; echo x > /tree/new")
            assert refused.stderr.count("Read-only file system") == 2

    run(work())


def test_forks_of_a_memory_go_on_where_it_was(world: World) -> None:
    plan = world.plan()
    counter = "i=0; while true; do i=$((i+1)); echo $i > /dev/shm/count; sleep 0.1; done"

    async def work() -> None:
        async with world.started(plan) as source:
            await said(source.connection, "echo one > /file")
            await source.connection.start(CommandSpec(("/bin/sh", "-c", counter), env=_PATH, keep=True))
            await said(source.connection, "while [ ! -s /dev/shm/count ]; do sleep 0.05; done")
            memory = await save(world, plan, "memory")
            await said(source.connection, "echo two >> /file")
            told = [await look(memory) for _ in range(2)]
            assert await said(source.connection, "cat /file") == "one\ntwo"
        assert len({each["uuid"] for each in told}) == 2

    async def look(memory: Path) -> dict[str, str]:
        fork = world.plan(memory=memory)
        async with world.started(fork) as started:
            connection = started.connection
            assert await said(connection, "cat /file") == "one"
            before = int(await said(connection, "cat /dev/shm/count"))
            await said(connection, f"while [ $(cat /dev/shm/count) -le {before} ]; do sleep 0.05; done")
            names = await said(connection, "cat /proc/sys/kernel/hostname /etc/hostname /etc/machine-id")
            assert names == f"{fork.hostname}\n{fork.hostname}\n{fork.facts.sandbox_id}"
            await said(connection, "echo fork >> /file")
            began_s = time.time()
            clock_s = float(await said(connection, "touch /now; stat -c %.9Y /now"))
            assert began_s - 0.5 < clock_s < time.time() + 0.5
            return {"uuid": await said(connection, "cat /proc/sys/kernel/random/uuid")}

    run(work())


def test_a_fork_of_a_fork_of_a_fork(world: World) -> None:
    async def work() -> None:
        plan = world.plan()
        async with contextlib.AsyncExitStack() as stack:
            started = await stack.enter_async_context(world.started(plan))
            for generation in range(3):
                await said(started.connection, f"echo {generation} >> /disk; echo {generation} >> /dev/shm/memory")
                memory = await save(world, plan, f"memory{generation}")
                plan = world.plan(memory=memory)
                started = await stack.enter_async_context(world.started(plan))
            wanted = "0\n1\n2"
            assert await said(started.connection, "cat /disk") == wanted
            assert await said(started.connection, "cat /dev/shm/memory") == wanted

    run(work())


def test_a_machine_of_two_processors_is_forked_while_both_work(world: World) -> None:
    limits = Limits(memory_mb=MEMORY_MB, cpus=2)
    work_text = "i=0; while true; do i=$((i+1)); echo $i > /dev/shm/{}; done"

    async def work() -> None:
        plan = world.plan(limits=limits)
        async with world.started(plan) as source:
            assert await said(source.connection, "nproc") == "2"
            for name in ("a", "b"):
                command = ("/bin/sh", "-c", work_text.format(name))
                await source.connection.start(CommandSpec(command, env=_PATH, keep=True))
            await said(source.connection, "while [ ! -s /dev/shm/a ] || [ ! -s /dev/shm/b ]; do sleep 0.05; done")
            memory = await save(world, plan, "memory")
        async with world.started(world.plan(memory=memory, limits=limits)) as fork:
            assert await said(fork.connection, "nproc") == "2"
            for name in ("a", "b"):
                seen = await said(fork.connection, f"cat /dev/shm/{name}")
                waits = f'until [ "$(cat /dev/shm/{name})" -gt "{seen or 0}" ] 2>/dev/null; do sleep 0.05; done'
                await said(fork.connection, waits)

    run(work())


def test_a_hook_runs_in_every_fork_and_its_failure_is_the_forks(world: World) -> None:
    hook = "mkdir -p /etc/worldfork; printf '%s\\n' '#!/bin/sh' '{}' > {path}; chmod 755 {path}"
    path = "/etc/worldfork/after-fork"

    async def work() -> None:
        plan = world.plan()
        async with world.started(plan) as source:
            await said(source.connection, hook.format("echo $WORLDFORK_SANDBOX_ID > /told", path=path))
            good = await save(world, plan, "good")
            await said(source.connection, hook.format("echo no luck >&2; exit 3", path=path))
            bad = await save(world, plan, "bad")
        fork = world.plan(memory=good)
        async with world.started(fork) as started:
            assert await said(started.connection, "cat /told") == fork.facts.sandbox_id
        with pytest.raises(LaunchFailed) as caught:
            await world.failing(world.plan(memory=bad))
        assert "no luck" in caught.value.message
        assert caught.value.remedy

    run(work())


Damage = Callable[[Path], None]


def _remove(name: str) -> Damage:
    return lambda memory: (memory / name).unlink()


def _flip(name: str) -> Damage:
    def damage(memory: Path) -> None:
        path = memory / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.unlink()  # a hard link of it may be another's
        path.write_bytes(content)

    return damage


def _saved_under(**other: str) -> Damage:
    def damage(memory: Path) -> None:
        path = memory / MANIFEST
        data = json.loads(path.read_text())
        data["build"].update(other)
        path.chmod(0o600)
        path.write_text(json.dumps(data))

    return damage


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (_remove("ram.0"), NotFound),
        (_remove("ram.1"), NotFound),
        (_remove(STATE), NotFound),
        (_remove(MANIFEST), NotFound),
        (_flip("ram.1"), Corrupt),
        (_flip(STATE), Corrupt),
        (_saved_under(qemu="99.0.0"), DriverUnavailable),
        (_saved_under(cpu="another"), DriverUnavailable),
    ],
    ids=["ram.0", "ram.1", "state", "manifest", "flipped ram", "flipped state", "qemu", "cpu"],
)
def test_a_memory_that_is_not_as_it_was(saved: Path, world: World, damage: Damage, error: type[Exception]) -> None:
    memory = world.top / "copy"
    memory.mkdir()
    for path in saved.iterdir():
        os.link(path, memory / path.name)
    text = (memory / MANIFEST).read_bytes()
    (memory / MANIFEST).unlink()
    (memory / MANIFEST).write_bytes(text)
    damage(memory)

    async def work() -> None:
        with pytest.raises(error) as caught:
            await world.failing(world.plan(memory=memory))
        assert getattr(caught.value, "remedy", "")

    run(work())


@pytest.fixture(scope="module")
def saved(home: Path, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """The memory of one sandbox, for tests that damage copies of it."""
    world = World(home, tmp_path_factory.mktemp("saved"), root)
    plan = world.plan()

    async def work() -> None:
        async with world.started(plan):
            await save(world, plan, "memory")

    try:
        run(work())
    finally:
        world.clear()
    return world.top / "memory"


@pytest.mark.parametrize("how", ["panic", "restart", "killed"])
def test_the_end_of_a_machine_is_the_end_of_its_sandbox(world: World, how: str) -> None:
    plan = world.plan()

    async def work() -> None:
        started = await world.driver.start(plan)
        running = read_running(Path(plan.facts.run))
        waiting = asyncio.create_task(sh(started.connection, "sleep 100", timeout_s=200))
        await said(started.connection, "true")
        if how == "killed":
            os.kill(running.qemu_pid, signal.SIGKILL)
        else:
            await break_guest(Path(plan.facts.run), how)
        async with asyncio.timeout(20):
            with pytest.raises(SandboxDied):
                await waiting
            assert await code_of(started) == 3
        started.connection.close()
        os.close(started.leash)
        assert remove_groups(plan.facts.cgroups) == []

    run(work())


async def break_guest(run_at: Path, how: str) -> None:
    """Let the guest's kernel come to an end from within: nothing in a sandbox may do that."""
    if how == "restart":
        async with qmp.connect(run_at / "qmp") as monitor:
            await monitor.execute("system_reset")
        return
    with contextlib.suppress(SandboxError):
        async with control(run_at) as guest:
            await guest.ask(wire.Op.PREPARE, wire.items(("write", "/proc/sysrq-trigger\tc")), timeout_s=10)


def test_the_end_of_its_time_ends_a_machine(world: World) -> None:
    plan = world.plan(timeout_s=4.0, detached=True)

    async def work() -> None:
        started = await world.driver.start(plan)
        started.connection.close()
        os.close(started.leash)
        assert await code_of(started) == 2
        assert remove_groups(plan.facts.cgroups) == []

    run(work())


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3, 0.8])
def test_a_start_that_is_cancelled_leaves_nothing(world: World, after_s: float) -> None:
    plan = world.plan()

    async def work() -> None:
        async with world.started(world.plan()):
            pass  # what is made once, and is not this start's, is there
        task = asyncio.create_task(world.driver.start(plan))
        # No event tells of a moment half-way; wherever it is cancelled, nothing may be left.
        await asyncio.sleep(after_s)
        task.cancel()
        try:
            started = await task
        except asyncio.CancelledError:
            assert remove_groups(plan.facts.cgroups) == []
        else:
            await end(started, plan)

    run(work())


def test_the_hosts_network_reaches_a_machine_that_asks_for_it(world: World, tmp_path: Path) -> None:
    (tmp_path / "certificate").write_text("trusted")
    identity = (("/etc/resolv.conf", "search here\nnameserver 127.0.0.53\n"),)
    plan = world.plan(
        network="host", identity=identity, binds=((str(tmp_path / "certificate"), "/dev/.worldfork/host-0"),)
    )

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello " + await reader.readline())
        writer.close()

    async def work() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            ask = f"exec 3<>/dev/tcp/10.0.2.2/{port}; echo {{}} >&3; cat <&3"
            async with world.started(plan) as started:
                assert await bash(started.connection, ask.format("guest")) == "hello guest"
                assert await said(started.connection, "cat /etc/resolv.conf") == "nameserver 10.0.2.3\nsearch here"
                assert await said(started.connection, "cat /dev/.worldfork/host-0") == "trusted"
                memory = await save(world, plan, "memory")
            alone = world.plan(memory=memory)
            async with world.started(alone) as started:
                refused = await sh(started.connection, f"timeout 10 bash -c '{ask.format('fork')}'")
                assert not refused.ok
                again = await save(world, alone, "again")
            async with world.started(world.plan(memory=again, network="host", identity=identity)) as started:
                assert await bash(started.connection, ask.format("third")) == "hello third"

    run(work())


async def bash(connection: Connection, text: str) -> str:
    return (await connection.run(CommandSpec(("bash", "-c", text), env=_PATH, timeout_s=60))).check().stdout.strip()


def test_a_memory_without_a_network_gets_none(world: World, saved: Path) -> None:
    async def work() -> None:
        with pytest.raises(ConfigError):
            await world.failing(world.plan(memory=saved, network="host"))

    run(work())


def test_the_userland_of_this_machine_is_no_ground(world: World) -> None:
    world.base = bases.host_base()

    async def work() -> None:
        with pytest.raises(DriverUnavailable) as caught:
            await world.driver.start(world.plan())
        assert "dir:" in caught.value.remedy

    run(work())


def test_too_little_memory_is_told_before_anything_starts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "available_bytes", lambda: 1 << 20)

    async def work() -> None:
        with pytest.raises(OutOfSpace) as caught:
            await world.driver.start(world.plan())
        assert caught.value.scope == "host"

    run(work())


def test_guests_that_are_interpreted_take_consent(home: Path, world: World) -> None:
    if world.driver._find_host().decision.accel == "kvm":
        pytest.skip("a guest runs under KVM here")
    world.driver = MicrovmDriver(Settings(home=home), world.images)

    async def work() -> None:
        with pytest.raises(DriverUnavailable) as caught:
            await world.driver.start(world.plan())
        assert "WORLDFORK_ALLOW_TCG" in caught.value.remedy

    run(work())
