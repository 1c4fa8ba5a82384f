"""What a QEMU that its guest took over would have: its descriptors, a user that is nobody, and nothing to write to."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import machines
from tests.e2e.test_microvm_driver import World, root, run, save, world
from tests.e2e.test_microvm_driver import said as said_of

from worldfork.records.sandbox import Limits
from worldfork.sandbox.driver import StartPlan
from worldfork.sandbox.microvm import qmp, ram, sizes
from worldfork.sandbox.microvm.manifest import read_running

__all__ = ["root", "world"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(machines.missing()), reason=machines.missing()),
]

LIMITS = Limits(memory_mb=192, disk_mb=16)


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return {name: " ".join(value.split()) for name, _, value in (line.partition(":") for line in lines)}


def written_by(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the regular files that a process has open for writing: descriptor, path."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        info = os.stat(f"/proc/{pid}/fd/{number}")
        flags = Path(f"/proc/{pid}/fdinfo/{number}").read_text(encoding="ascii").split("flags:")[1].split()[0]
        if stat.S_ISREG(info.st_mode) and int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
            yield int(number), os.readlink(f"/proc/{pid}/fd/{number}")


def as_machine(pid: int, uid: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program with what a machine's QEMU has: its user and its namespaces, without its filter of system calls."""
    line = ["nsenter", "-t", str(pid), "-m", "-n", "-i", f"--setuid={uid}", f"--setgid={uid}", "--", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)


def expect_walls(plan: StartPlan, pid: int, others: list[Path]) -> None:
    status = status_of(pid)
    uid = status["Uid"].split()[0]
    assert int(uid) >= 0x6000_0000
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {uid}
    assert (status["Groups"], status["CapEff"], status["CapPrm"]) == ("", "0" * 16, "0" * 16)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    for name in ("mnt", "net", "ipc"):
        assert os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}"), name
    for line in Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8").splitlines():
        assert line.split()[5].startswith("ro"), line
    run_at = Path(plan.facts.run)
    for number, path in written_by(pid):
        memory = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY)
        own = path.endswith(" (deleted)") or path.startswith(f"{run_at}/scratch.")
        assert own or ram.is_sealed(memory), path
        os.close(memory)
    for place in ["/tmp", "/var/tmp", "/dev/shm", *map(str, others)]:
        done = as_machine(pid, uid, "/bin/sh", "-c", f"echo x > {place}/planted")
        assert done.returncode, place
        assert not os.path.exists(f"{place}/planted")
    for secret in (run_at / "sock", run_at / "control", run_at / "qmp", run_at / "machine.json"):
        assert as_machine(pid, uid, "/bin/cat", str(secret)).returncode, secret
    assert as_machine(pid, uid, "/bin/cat", "/proc/net/dev").stdout.count(":") == 1, "the loopback alone"
    assert as_machine(pid, uid, "/bin/kill", "-0", str(os.getpid())).returncode


def test_a_machine_and_its_forks_have_nothing_of_anybody_else(world: World) -> None:
    async def scenario() -> None:
        first = world.plan(limits=LIMITS)
        async with world.started(first):
            memory = await save(world, first, "memory")
            expect_walls(first, read_running(Path(first.facts.run)).qemu_pid, [memory, world.images])
            fork = world.plan(limits=LIMITS, memory=memory)
            async with world.started(fork):
                pid = read_running(Path(fork.facts.run)).qemu_pid
                expect_walls(fork, pid, [memory, Path(first.facts.run), world.images])

    run(scenario())


async def fill(run_at: Path, pieces: int) -> None:
    """Write as a guest does whose kernel was broken into: behind the end of its file system."""
    async with qmp.connect(run_at / "qmp") as monitor:
        for piece in range(pieces):
            line = f'qemu-io -d disk2 "write -P 5 {piece + 1}G 64M"'
            await monitor.execute("human-monitor-command", {"command-line": line}, timeout_s=60)


def test_a_disk_grows_no_further_than_its_limit_whatever_the_guest_writes(world: World) -> None:
    plan = world.plan(limits=LIMITS)
    top = Path(plan.facts.run) / "scratch.qcow2"

    async def scenario() -> None:
        async with world.started(plan) as started:
            most = sizes.file_bytes(LIMITS, read_running(Path(plan.facts.run)).build)
            await fill(Path(plan.facts.run), 2 + (most >> 26))
            assert most - (64 << 20) < top.stat().st_size <= most
            assert (await said_of(started.connection, "echo lives")) == "lives"

    run(scenario())
