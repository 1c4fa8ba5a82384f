"""Limits: what a sandbox may take, and what happens when it takes more."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conformance.conftest import NO_CGROUPS, Elsewhere, Pace, Sandboxes, finish
from tests.conformance.inside import processes, python, shell, told
from tests.roots import make_small_root

from worldfork import CommandExitReason, ConfigError, Sandbox, SandboxError
from worldfork.core.errors import OutOfSpace
from worldfork.sandbox.driver import Capabilities

Needs = Callable[[str], None]
EAT = "data = []\nwhile True:\n    data.append(bytearray(1 << 20))\n"


@pytest.mark.behaviour("limit-1")
def test_a_memory_bomb_takes_itself_alone(sandboxes: Sandboxes, needs: Needs) -> None:
    needs("limits")
    box = sandboxes.create(memory_mb=96)
    quiet = box.start_process("sleep", ["1000"])
    result = box.run("python", ["-c", "print('begun', flush=True)\n" + EAT], timeout=40)
    assert (result.reason, result.signal, result.stdout) == (CommandExitReason.OOM_KILLED, signal.SIGKILL, "begun\n")
    assert result.exit_code == -signal.SIGKILL
    assert box.run("echo", ["on"]).stdout == "on\n"
    assert box.get_process(quiet.pid).status == "running"
    # Also where it is not the command itself that is killed.
    assert box.run("sh", ["-c", f"python -c '{EAT}'; echo survived $?"], timeout=40).stdout == "survived 137\n"
    assert box.read_file("/etc/hostname")


@pytest.mark.behaviour("limit-1")
def test_a_started_process_that_is_killed_for_memory_says_so(sandboxes: Sandboxes, needs: Needs) -> None:
    needs("limits")
    box = sandboxes.create(memory_mb=64)
    info = box.start_process("python", ["-c", EAT])
    assert list(box.follow_output(info.pid)) == []
    assert box.get_process(info.pid).status == "oom_killed"


@pytest.mark.behaviour("limit-2")
def test_a_fork_bomb_meets_its_limit_and_the_sandbox_answers(sandboxes: Sandboxes, needs: Needs) -> None:
    needs("limits")
    box = sandboxes.create(pids=40)
    program = (
        "import os, time\n"
        "made = 0\n"
        "while True:\n"
        "    try:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(1000)\n"
        "        made += 1\n"
        "    except BlockingIOError:\n"
        "        print(made, flush=True); time.sleep(1000)\n"
    )
    bomb = box.start_process("python", ["-c", program])
    made = int(next(box.follow_stdout(bomb.pid)).line)
    assert made == 39
    # Every place is taken. A command still starts, since somebody must be able to look, and nothing can be added.
    assert box.run("echo", ["on"]).stdout == "on\n"
    result = box.run("sh", ["-c", "/bin/true; echo $?"])
    assert (result.exit_code != 0, "fork" in result.stderr) == (True, True)
    assert processes(box) == 40
    assert box.read_file("/etc/hostname")
    box.kill_process(bomb.pid)
    assert processes(box) == 0
    assert box.run("echo", ["on"]).stdout == "on\n"
    # One that never stops trying.
    assert box.sh("f() { f | f & f; }; f", timeout=1).reason is not CommandExitReason.OUTPUT_LIMIT
    assert box.run("echo", ["on"], timeout=20).stdout == "on\n"


@pytest.mark.behaviour("limit-3")
def test_cpu_time_is_shared_out(sandboxes: Sandboxes, needs: Needs) -> None:
    needs("limits")
    box = sandboxes.create(cpus=0.25)
    program = (
        "import os, time\n"
        "end = time.monotonic() + 1.5\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        while time.monotonic() < end: pass\n"
        "        os._exit(0)\n"
        "for _ in range(3): os.wait()\n"
        "t = os.times(); print((t.children_user + t.children_system) / 1.5)\n"
    )
    # A quarter, and what one period of 100 ms may go over.
    assert float(python(box, program)) < 0.45


@pytest.mark.behaviour("limit-4")
def test_a_sandbox_that_fills_its_disk_is_ended(sandboxes: Sandboxes) -> None:
    box, other = sandboxes.create(disk_mb=24), sandboxes.create(disk_mb=24)
    with pytest.raises(OutOfSpace) as full:
        box.sh("for i in $(seq 200); do head -c 1M /dev/urandom > f$i; sleep 0.02; done; sleep 60", timeout=50)
    assert (full.value.scope, full.value.fields["sandbox_id"]) == ("sandbox", box.sandbox_id)
    assert "disk_mb" in full.value.remedy
    with pytest.raises(SandboxError):
        box.run("true")
    assert other.run("true").ok


@pytest.mark.behaviour("limit-4")
def test_a_disk_of_its_own_is_full_at_its_limit(sandboxes: Sandboxes, capabilities: Capabilities) -> None:
    if capabilities.disk_on_host:
        pytest.skip("what sandboxes of this driver write lies on the host's disk")
    box, other = sandboxes.create(disk_mb=24), sandboxes.create(disk_mb=24)
    full = box.sh("for i in $(seq 30); do head -c 1M /dev/urandom > f$i || exit 3; done")
    assert (full.exit_code, "No space left" in full.stdout) == (3, True)
    # What is removed can be written again, and nobody was ended for it.
    assert box.sh("rm f1 f2 && head -c 1M /dev/urandom > again").ok
    assert shell(other, "head -c 8M /dev/urandom > f && stat -c %s f") == str(8 << 20)
    assert box.limit_hits().pids == 0


@pytest.mark.behaviour("limit-4")
def test_one_file_cannot_pass_the_disk_limit_at_all(sandboxes: Sandboxes) -> None:
    box = sandboxes.create(disk_mb=16)
    result = box.run("sh", ["-c", "ulimit -f; exec truncate -s 100M /workspace/big"])
    assert result.exit_code != 0
    assert int(shell(box, "stat -c %s /workspace/big 2>/dev/null || echo 0")) <= 16 << 20
    assert box.run("true").ok


FILL = """
import sys
from worldfork import Sandbox
from worldfork.core.errors import OutOfSpace
with Sandbox.create(network="none", base=sys.argv[1]) as box, Sandbox.create(network="none", base=sys.argv[1]) as small:
    small.write_file("/workspace/f", b"x" * 100_000)
    try:
        box.run(sys.argv[2], sys.argv[3:], check=True)
        box.run("sleep", ["40"])
    except OutOfSpace as error:
        print(error.scope, bool(error.remedy), small.run("true").ok)
"""


@pytest.mark.behaviour("limit-5")
def test_the_host_s_reserve_is_kept(
    fresh_home: Path, elsewhere: Elsewhere, tmp_path: Path, capabilities: Capabilities
) -> None:
    fallocate = shutil.which("fallocate")
    assert fallocate is not None
    root = make_small_root(tmp_path / "root")
    shutil.copy(fallocate, root / "bin")
    free = os.statvfs(fresh_home)
    # A reserve that is just not there any more; who took a small part of it is left alone.
    reserve_bytes = free.f_bavail * free.f_frsize + (1 << 20)
    settings = {"WORLDFORK_RESERVE_BYTES": str(reserve_bytes), "WORLDFORK_HOME": str(fresh_home)}
    takes_bytes = reserve_bytes // 32
    fill = ["fallocate", "-l", str(takes_bytes), "/workspace/f"]
    if not capabilities.disk_on_host:
        # What a guest only reserves takes nothing of the host.
        fill = ["dd", "if=/dev/zero", "of=/workspace/f", "bs=1M", f"count={(takes_bytes >> 20) + 64}"]
    assert finish(elsewhere(FILL, f"dir:{root}", *fill, **settings)) == "host True True\n"


@pytest.mark.behaviour("limit-6")
def test_limits_that_nothing_could_run_under_are_refused(driver: str) -> None:
    for name in ("cpus", "memory_mb", "disk_mb", "pids"):
        for value in (0, -1):
            with pytest.raises(ConfigError):
                Sandbox.create(driver=driver, **{name: value})
    with pytest.raises(ConfigError):
        Sandbox.create(driver=driver, memory_mb=1)


@pytest.mark.behaviour("limit-6")
def test_limits_are_told(sandboxes: Sandboxes) -> None:
    fresh = sandboxes.create().info().limits
    assert (fresh.cpus, fresh.memory_mb, fresh.disk_mb, fresh.pids) == (1.0, 1024, None, 1024)
    box = sandboxes.create(None, 0.5, 256, 512, pids=99)
    mine = box.info().limits
    assert (mine.cpus, mine.memory_mb, mine.disk_mb, mine.pids) == (0.5, 256, 512, 99)


@pytest.mark.behaviour("limit-7")
def test_a_command_can_have_limits_of_its_own(box: Sandbox, pace: Pace) -> None:
    program = "import json, resource; print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))"
    assert told(box, program, rlimits=((resource.RLIMIT_NOFILE, 50, 60),)) == [50, 60]
    result = box.run("python", ["-c", "while True: pass"], rlimits=((resource.RLIMIT_CPU, 1, 1),), timeout=50)
    assert result.reason is CommandExitReason.SIGNALED
    assert result.signal in (signal.SIGXCPU, signal.SIGKILL)
    # The kernel's limit counts by ticks.
    assert 0.5 < result.cpu_s < pace.seconds(2)


WITHOUT = """
import sys, warnings
warnings.simplefilter("ignore")
from worldfork import Sandbox
from worldfork.lineage.place import place
with Sandbox.create(network="none", base=sys.argv[1], memory_mb=64) as box:
    print(place().driver.capabilities().limits)
    print(box.sh("x=x; while :; do x=$x$x; done", timeout=25).exit_code != 0)
    print(box.sh("echo on").stdout.strip())
"""


@pytest.mark.behaviour("limit-8")
def test_without_cgroups_each_process_is_limited(fresh_home: Path, elsewhere: Elsewhere, tmp_path: Path) -> None:
    root = make_small_root(tmp_path / "root")
    out = finish(elsewhere(WITHOUT, f"dir:{root}", WORLDFORK_CGROUPS="off", WORLDFORK_HOME=str(fresh_home)))
    assert out.split() == ["False", "True", "on"]


@pytest.mark.behaviour("limit-8")
def test_a_host_without_cgroups_is_told_so(capabilities: Capabilities) -> None:
    from worldfork.core.settings import load_settings
    from worldfork.sandbox.namespace import NamespaceDriver

    if capabilities.limits:
        pytest.skip("this host has cgroups to write")
    with pytest.warns(RuntimeWarning, match=NO_CGROUPS.split(":")[1]):
        NamespaceDriver(load_settings())


@pytest.mark.behaviour("limit-9")
def test_a_sandbox_at_its_limits_ends_as_any_other(sandboxes: Sandboxes, needs: Needs) -> None:
    needs("limits")
    box = sandboxes.create(memory_mb=64, pids=20)
    box.start_process("python", ["-c", "import time; data = bytearray(40 << 20); time.sleep(1000)"])
    box.start_process("sh", ["-c", "while :; do sleep 1000 & done"])
    began = time.monotonic()
    box.terminate()
    assert time.monotonic() - began < 10
