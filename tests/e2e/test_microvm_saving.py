"""Checkpoints of real machines: disk and memory of one moment, a disk taken out as a layer, a saver that dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests import machines
from tests.e2e.test_microvm_driver import World, root, run, said, save, sh, world

from worldfork.sandbox.command import CommandSpec
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.driver import StartPlan
from worldfork.sandbox.microvm import inside, saving, wire
from worldfork.sandbox.microvm.control import control
from worldfork.sandbox.microvm.costs import costs
from worldfork.sandbox.microvm.exporting import copy_disk
from worldfork.sandbox.microvm.generations import CHAIN_LIMIT
from worldfork.sandbox.microvm.manifest import read_saved

__all__ = ["root", "world"]

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(machines.missing()), reason=machines.missing()),
]

WRITER = """
mkdir /data; i=0
while [ ! -e /stop ]; do
  i=$((i+1)); seq $i $((i+500)) > /data/$i
  dd if=/data/$i of=/data/$i.2 conv=fsync 2>/dev/null
  echo $i > /dev/shm/last; sleep 0.1
done
"""
"""Makes files of which the memory knows as soon as they are on the disk."""
CHECKS = """
for i in $(seq $(cat /dev/shm/last) | tail -n 20); do
  seq $i $((i+500)) > /dev/shm/x
  for f in /data/$i /data/$i.2; do [ "$(cat $f)" = "$(cat /dev/shm/x)" ] || echo $f; done
done
"""
SAVER = """
import asyncio, os, signal, sys
from pathlib import Path
from worldfork.sandbox.microvm import saving
def die(_):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(*({"memory": (saving.PrivateReader, "read"), "disk": (saving._Saver, "_move_disk")}[sys.argv[3]]), die)
asyncio.run(saving.save_memory(Path(sys.argv[1]), Path(sys.argv[2])))
"""


async def let_run(connection: Connection, script: str) -> None:
    await connection.start(CommandSpec(("/bin/sh", "-c", script), env={"PATH": "/bin:/usr/bin"}, keep=True))


async def forget(plan: StartPlan) -> None:
    """Let a guest read its disk again: what it knew of it is gone."""
    async with control(Path(plan.facts.run)) as guest:
        await guest.ask(wire.Op.PREPARE, wire.items(("drop", "1")))


async def checked(connection: Connection, plan: StartPlan) -> int:
    """Compare what the writer wrote of late with what it must be; return the number of the last file."""
    last = int(await said(connection, "touch /stop; cat /dev/shm/last"))
    await forget(plan)
    assert (await sh(connection, CHECKS)).check().stdout == ""
    return last


def test_the_disk_and_the_memory_are_of_one_moment(world: World) -> None:
    async def work() -> None:
        plan = world.plan()
        async with world.started(plan) as source:
            await let_run(source.connection, WRITER)
            await said(source.connection, "while [ ! -s /dev/shm/last ]; do sleep 0.05; done")
            memories = [await save(world, plan, f"memory{number}") for number in range(3)]
            found = []
            for memory in memories:
                fork = world.plan(memory=memory)
                async with world.started(fork) as started:
                    found.append(await checked(started.connection, fork))
                    await said(started.connection, "echo more > /data/more; cat /data/more")
            assert found == sorted(found)
            assert await checked(source.connection, plan) > found[-1]

    run(work())


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_saver_that_is_killed_leaves_a_machine_that_goes_on(world: World, where: str) -> None:
    async def work() -> None:
        plan = world.plan()
        async with world.started(plan) as source:
            await said(source.connection, "echo before > /file")
            argv = [sys.executable, "-c", SAVER, plan.facts.run, str(world.top / "dead"), where]
            died = await asyncio.to_thread(subprocess.run, argv, check=False, timeout=60)
            assert died.returncode == -signal.SIGKILL
            assert await said(source.connection, "echo after >> /file; cat /file") == "before\nafter"
            memory = await save(world, plan, "memory")
            await said(source.connection, "rm /file")
            fork = world.plan(memory=memory)
            async with world.started(fork) as started:
                await forget(fork)
                assert await said(started.connection, "cat /file") == "before\nafter"

    run(work())


def test_a_machine_that_is_saved_again_and_again(world: World) -> None:
    count = CHAIN_LIMIT + 2

    async def work() -> None:
        plan = world.plan()
        async with world.started(plan) as source:
            for number in range(count):
                text = f"seq {number} 5000 > /file{number}; dd if=/file{number} of=/copy{number} conv=fsync"
                await said(source.connection, text)
                memory = await save(world, plan, f"memory{number}")
            assert len(read_saved(memory).disks[-1]) < CHAIN_LIMIT
        fork = world.plan(memory=memory)
        async with world.started(fork) as started:
            await forget(fork)
            for number in range(count):
                said_here = await said(started.connection, f"cat /file{number} /copy{number} | wc -l")
                assert int(said_here) == 2 * (5001 - number)

    run(work())


def test_a_qemu_without_the_order_saves_and_goes_on_by_migration(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_DEVICES", "no-such-order")

    async def work() -> None:
        plan = world.plan()
        async with world.started(plan) as source:
            await said(source.connection, "echo disk > /file; echo memory > /dev/shm/file")
            memory = await save(world, plan, "memory")
            assert read_saved(memory).saved_by == "migration"
            await said(source.connection, "rm /file /dev/shm/file; echo > /other")
        fork = world.plan(memory=memory)
        async with world.started(fork) as started:
            assert await said(started.connection, "cat /file /dev/shm/file") == "disk\nmemory"

    run(work())


CALLER = """
exec 3<>/dev/tcp/10.0.2.2/{port}; echo hello >&3; echo > /dev/shm/open
read -u 3 answer; echo "$answer." > /dev/shm/told; sleep 100
"""
"""Calls this host, at the address that it has for a guest."""


def test_connections_that_leave_are_found_and_closed_as_wished(world: World) -> None:
    async def work() -> None:
        ended = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.readline() == b"hello\n"
            with contextlib.suppress(ConnectionError):
                await reader.read()
            ended.set()
            writer.close()

        serving = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = serving.sockets[0].getsockname()[1]
        plan = world.plan()
        plan = dataclasses.replace(plan, facts=dataclasses.replace(plan.facts, network="host"))
        async with serving, world.started(plan) as source:
            await source.connection.start(
                CommandSpec(("/bin/bash", "-c", CALLER.format(port=port)), env={"PATH": "/bin:/usr/bin"}, keep=True)
            )
            await said(source.connection, "while [ ! -e /dev/shm/open ]; do sleep 0.05; done")
            (found,) = await world.driver.outside(plan.facts)
            assert (found.protocol, found.remote, found.state) == ("tcp", f"10.0.2.2:{port}", "established")
            kept = await world.driver.save_memory(plan.facts, world.top / "kept", drop_outside=False)
            assert kept.outside == (found,)
            assert not ended.is_set()
            closed = await world.driver.save_memory(plan.facts, world.top / "closed", drop_outside=True)
            assert closed.outside == ()
            await ended.wait()
            assert (
                await said(source.connection, "while [ ! -e /dev/shm/told ]; do sleep 0.05; done; cat /dev/shm/told")
                == "."
            )
        for name, told in (("kept", "no"), ("closed", ".")):
            fork = world.plan(memory=world.top / name)
            async with world.started(fork) as started:
                shown = "sleep 1; cat /dev/shm/told 2>/dev/null || echo no"
                assert await said(started.connection, shown) == told
                assert await said(started.connection, "echo fine") == "fine"

    run(work())


CHANGES = """
set -e
mkdir -p /workspace/new/deep; cd /workspace/new
seq 100000 > file; ln file deep/link; ln -s ../file deep/symbolic; mkfifo pipe
chmod 4751 file; chown 1234:99 deep; truncate -s 100000000 sparse; echo end >> sparse
touch -d @1600000000.123456789 file
mv /usr/tree /usr/moved; echo more > /usr/moved/in/more
rm -r /usr/again; mkdir /usr/again; echo new > /usr/again/other
rm /usr/gone; chmod 700 /usr/mode
chmod 751 /
"""
LISTING = """
cd /; ls -lARn --time-style=+%s.%N /usr /workspace; stat -c '%a %u %g %.9Y' /
cat /workspace/new/file | wc -c; tail -c 4 /workspace/new/sparse
"""


def listing(text: str) -> str:
    """Leave out what another file system has of its own: sizes and link counts of directories."""
    text = re.sub(r" +", " ", re.sub(r"total \d+\n", "", text))
    return re.sub(r"^(d\S+) \d+ (\d+ \d+) \d+", r"\1 \2", text, flags=re.MULTILINE)


def test_what_a_machine_wrote_is_a_layer_that_shows_the_same(world: World, tmp_path: Path) -> None:
    below = tmp_path / "below"
    for name in ("tree/in", "again/old", "mode"):
        (below / "usr" / name).mkdir(parents=True)
    (below / "usr" / "tree" / "in" / "it").write_text("of the layer below")
    (below / "usr" / "gone").touch()
    layer = tmp_path / "layer"

    async def work() -> None:
        plan = world.plan(layers=(below,))
        async with world.started(plan) as source:
            run_at = Path(plan.facts.run)
            assert await copy_disk(run_at, inside.UPPER, layer, "trusted") is None
            await said(source.connection, CHANGES)
            shown = listing((await sh(source.connection, LISTING)).stdout)
            size = await copy_disk(run_at, inside.UPPER, layer, "trusted")
            assert size is not None
            assert 500_000 < size < 5_000_000
            assert (await costs(run_at)).filesystem_bytes > size
            assert listing((await sh(source.connection, LISTING)).stdout) == shown
        again = world.plan(layers=(layer, below))
        async with world.started(again) as started:
            assert listing((await sh(started.connection, LISTING)).stdout) == shown
            assert "of the layer below" in await said(started.connection, "cat /usr/moved/in/it")

    run(work())
    assert os.lstat(layer).st_mode & 0o7777 == 0o751
    assert (layer / "workspace" / "new" / "sparse").stat().st_blocks * 512 < 1 << 20
