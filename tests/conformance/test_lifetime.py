"""Lifetime: what ends a sandbox, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
from tests.conformance.conftest import Elsewhere, Pace, Sandboxes, finish
from tests.conformance.inside import processes, shell
from tests.roots import make_small_root

from worldfork import AsyncSandbox, NotFound, Sandbox, SandboxDied, SandboxError, SandboxStatus
from worldfork.lineage.place import place
from worldfork.records.sandbox import SandboxFacts


def eventually(true: Callable[[], bool], timeout_s: float = 15) -> bool:
    """Wait for what another process does; nobody tells of it."""
    end_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def listed(sandbox_id: str) -> bool:
    return sandbox_id in {info.sandbox_id for info in Sandbox.list()}


def left_of(sandbox_id: str) -> list[str]:
    """What there still is of a sandbox: its directory and its cgroups."""
    paths = [
        str(place().home.run / sandbox_id),
        *place().driver_of(os.environ["WORLDFORK_DRIVER"]).cgroups_of(sandbox_id),
    ]
    return [path for path in paths if os.path.exists(path)]


@pytest.mark.behaviour("lifetime-1")
def test_terminate_leaves_nothing_and_may_be_called_twice(box: Sandbox, home: Path) -> None:
    box.start_process("sh", ["-c", "setsid sleep 1000 & sleep 1000"])
    assert left_of(box.sandbox_id) != []
    assert box.status is SandboxStatus.RUNNING
    box.terminate()
    box.terminate()
    assert left_of(box.sandbox_id) == []
    assert (box.status, box.info().status) == (SandboxStatus.TERMINATED, SandboxStatus.TERMINATED)
    assert not listed(box.sandbox_id)
    calls: list[Callable[[], object]] = [
        lambda: box.run("true"), lambda: box.sh("true"), lambda: box.read_file("/etc/hostname"),
        lambda: box.write_file("/f", b""), lambda: box.list_processes(), lambda: box.start_process("true"),
        lambda: box.checkpoint(), lambda: box.fork(1),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(SandboxDied, match=r"ended by its owner \(create another") as error:
            call()
        assert error.value.fields["sandbox_id"] == box.sandbox_id


@pytest.mark.behaviour("lifetime-1")
def test_a_block_ends_it(driver: str) -> None:
    with pytest.raises(KeyError):
        with Sandbox.create(driver=driver, network="none") as box:
            raise KeyError
    assert left_of(box.sandbox_id) == []

    async def test() -> None:
        async with await AsyncSandbox.create(driver=driver, network="none") as inner:
            assert (await inner.run("true")).ok
        assert left_of(inner.sandbox_id) == []

    asyncio.run(test())


@pytest.mark.behaviour("lifetime-2")
def test_calls_under_way_learn_of_its_end(box: Sandbox) -> None:
    with ThreadPoolExecutor(2) as threads:
        call = threads.submit(box.run, "sh", ["-c", "touch /srv/begun; sleep 1000"])
        shell(box, "until [ -e /srv/begun ]; do sleep 0.005; done", timeout=20)
        box.terminate()
        with pytest.raises(SandboxDied):
            call.result(timeout=20)


OWNER = """
import sys
from worldfork import Sandbox
box = Sandbox.create(network="none", detached=sys.argv[1] == "detached", timeout_secs=float(sys.argv[2]) or None)
box.start_process("sleep", ["1000"])
box.write_file("/srv/f", b"1")
print(box.sandbox_id, flush=True)
if sys.argv[3] == "wait":
    sys.stdin.read()
elif sys.argv[3] == "crash":
    raise SystemExit("on purpose")
"""


def owned_elsewhere(elsewhere: Elsewhere, *how: str) -> tuple[subprocess.Popen[str], str]:
    owner = elsewhere(OWNER, *how)
    assert owner.stdout is not None
    sandbox_id = owner.stdout.readline().strip()
    assert sandbox_id.startswith("sb-")
    return owner, sandbox_id


@pytest.mark.behaviour("lifetime-3")
@pytest.mark.parametrize("end", ["kill", "interrupt", "exit"])
def test_it_ends_with_its_owner(elsewhere: Elsewhere, end: str) -> None:
    owner, sandbox_id = owned_elsewhere(elsewhere, "owned", "0", "exit" if end == "exit" else "wait")
    if end != "exit":
        assert listed(sandbox_id)
        owner.send_signal(signal.SIGKILL if end == "kill" else signal.SIGINT)
    owner.communicate(timeout=20)
    assert eventually(lambda: not listed(sandbox_id))
    with pytest.raises(NotFound):
        Sandbox.connect(sandbox_id)
    if end == "kill":
        place().sweep()  # as every start does, and `worldfork sweep`
    assert eventually(lambda: left_of(sandbox_id) == [])


@pytest.mark.behaviour("lifetime-4")
def test_what_a_killed_owner_left_is_swept_at_the_next_start(
    fresh_home: Path, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    root = make_small_root(tmp_path / "root")
    program = (
        "import os, sys\n"
        "from worldfork import Sandbox\n"
        "children = Sandbox.create(network='none', base=sys.argv[1]).fork(3).unwrap()\n"
        "os.write(1, b'ready\\n'); sys.stdin.read()\n"
    )
    owner = elsewhere(program, f"dir:{root}", WORLDFORK_HOME=str(fresh_home))
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    assert len(os.listdir(fresh_home / "run")) >= 4
    owner.kill()
    owner.wait()
    again = "import sys; from worldfork import Sandbox; Sandbox.create(network='none', base=sys.argv[1]).terminate()"
    finish(elsewhere(again, f"dir:{root}", WORLDFORK_HOME=str(fresh_home)))
    assert os.listdir(fresh_home / "run") == []


@pytest.mark.behaviour("lifetime-5")
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_a_detached_one_outlives_its_owner(sandboxes: Sandboxes, elsewhere: Elsewhere, end: str) -> None:
    owner, sandbox_id = owned_elsewhere(elsewhere, "detached", "0", "wait" if end == "kill" else "exit")
    if end == "kill":
        owner.kill()
    owner.communicate(timeout=20)
    box = sandboxes.keep(Sandbox.connect(sandbox_id))
    assert box.read_file("/srv/f") == b"1"
    assert processes(box) == 1
    info = box.info()
    assert (info.detached, info.status) == (True, SandboxStatus.RUNNING)
    assert listed(sandbox_id)
    # It can do all that another can.
    child = sandboxes.restore(box.checkpoint())
    assert child.read_file("/srv/f") == b"1"
    box.terminate()
    assert not listed(sandbox_id)
    assert left_of(sandbox_id) == []


@pytest.mark.behaviour("lifetime-6")
def test_it_ends_after_its_time(sandboxes: Sandboxes, pace: Pace) -> None:
    limit_s = pace.seconds(1)
    box = sandboxes.create(timeout_secs=limit_s)
    assert box.info().timeout_secs == limit_s
    assert box.run("true").ok
    with pytest.raises(SandboxDied):
        box.run("sleep", ["30"])
    assert eventually(lambda: box.status is SandboxStatus.TERMINATED)
    assert eventually(lambda: left_of(box.sandbox_id) == [])


@pytest.mark.behaviour("lifetime-6")
def test_a_detached_one_ends_after_its_time_with_nobody_there(elsewhere: Elsewhere) -> None:
    owner, sandbox_id = owned_elsewhere(elsewhere, "detached", "3", "exit")
    owner.communicate(timeout=20)
    assert eventually(lambda: not listed(sandbox_id))
    place().sweep()
    assert eventually(lambda: left_of(sandbox_id) == [])


@pytest.mark.behaviour("lifetime-7")
def test_a_dead_init_is_an_error_and_takes_nobody_along(sandboxes: Sandboxes) -> None:
    one, two = sandboxes.create(), sandboxes.create()
    one.start_process("sleep", ["1000"])
    os.kill(init_of(one), signal.SIGKILL)
    with pytest.raises(SandboxDied):
        one.run("sleep", ["30"])
    assert eventually(lambda: one.status is SandboxStatus.TERMINATED)  # the kernel may still be taking it down
    assert two.run("echo", ["on"]).stdout == "on\n"
    one.terminate()
    assert left_of(one.sandbox_id) == []


@pytest.mark.behaviour("lifetime-7")
def test_who_ends_a_dead_one_waits_for_whoever_clears_it_away(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = sandboxes.create()
    here, live = place(), place().live[box.sandbox_id]
    begun, goes_on = threading.Event(), threading.Event()
    dispose = here.dispose

    def slowly(facts: SandboxFacts) -> bool:
        begun.set()
        assert goes_on.wait(20)
        return dispose(facts)

    monkeypatch.setattr(here, "dispose", slowly)
    os.kill(init_of(box), signal.SIGKILL)
    assert eventually(lambda: not live.alive())
    with ThreadPoolExecutor(3) as threads:
        watch = threads.submit(live.end_now)
        assert begun.wait(20)
        others = [threads.submit(box.terminate), threads.submit(live.end_now)]
        assert wait(others, timeout=0.2).done == set()
        goes_on.set()
        for other in (watch, *others):
            other.result(20)
    assert left_of(box.sandbox_id) == []


def init_of(box: Sandbox) -> int:
    """The pid on the host of a sandbox's first process: the holder of its lock."""
    inode = os.stat(place().store.lock_path(box.sandbox_id)).st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.replace("->", "").split()
        if fields[1] == "POSIX" and int(fields[5].rpartition(":")[2]) == inode:
            return int(fields[4])
    raise AssertionError("nobody holds the lock")


@pytest.mark.behaviour("lifetime-8")
def test_live_ones_are_listed(sandboxes: Sandboxes, driver: str, base: str) -> None:
    one, two = sandboxes.create(name="first-of-two"), sandboxes.create(cpus=0.5)
    infos = {info.sandbox_id: info for info in Sandbox.list()}
    assert list(infos).index(one.sandbox_id) < list(infos).index(two.sandbox_id)
    assert (infos[one.sandbox_id].name, infos[two.sandbox_id].limits.cpus) == ("first-of-two", 0.5)
    assert infos[one.sandbox_id].id == one.sandbox_id
    assert infos[one.sandbox_id].created_at == pytest.approx(time.time(), abs=60)
    one.terminate()
    assert not listed(one.sandbox_id)
    info = two.info()
    assert (info.driver, info.base, info.network, info.commands, info.processes) == (
        driver, base, "none", 0, 0,
    )  # fmt: skip


@pytest.mark.behaviour("lifetime-9")
def test_one_is_made_however_many_ask(sandboxes: Sandboxes, driver: str, elsewhere: Elsewhere) -> None:
    arguments = {"driver": driver, "network": "none"}
    program = (
        "import sys\n"
        "from worldfork import Sandbox\n"
        "with Sandbox.get_or_create('the one', network='none', detached=True) as box:\n"
        "    print(box.sandbox_id, box.bind_outcome)\n"
        "    sys.stdout.flush()\n"
        "    if box.bind_outcome == 'created': sys.stdin.read()\n"
    )
    first = sandboxes.keep(Sandbox.get_or_create("the one", **arguments))
    assert first.bind_outcome == "created"
    with ThreadPoolExecutor(4) as threads:
        mine = list(threads.map(lambda _: Sandbox.get_or_create("the one", **arguments), range(6)))
    assert {box.sandbox_id for box in mine} == {first.sandbox_id}
    assert {box.bind_outcome for box in mine} == {"attached"}
    others = [elsewhere(program) for _ in range(2)]
    assert [finish(other).split() for other in others] == [[first.sandbox_id, "attached"]] * 2
    assert first.run("true").ok
    first.terminate()
    again = sandboxes.keep(Sandbox.get_or_create("the one", **arguments))
    assert (again.bind_outcome, again.sandbox_id != first.sandbox_id) == ("created", True)


@pytest.mark.behaviour("lifetime-10")
def test_after_a_fork_of_the_process_handles_raise_and_connect_works(box: Sandbox) -> None:
    program = (
        "import os, sys\n"
        "from worldfork import Sandbox, SandboxError\n"
        "box = Sandbox.create(network='none')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        box.run('true')\n"
        "        os._exit(10)\n"
        "    except SandboxError:\n"
        "        pass\n"
        "    other = Sandbox.connect(box.sandbox_id)\n"
        "    good = other.run('echo', ['child']).stdout == 'child\\n'\n"
        "    with Sandbox.create(network='none') as own:\n"
        "        good = good and own.run('true').ok\n"
        "    sys.exit(0 if good else 11)\n"
        "status = os.waitpid(pid, 0)[1]\n"
        "print(os.waitstatus_to_exitcode(status), box.run('echo', ['parent']).stdout.strip())\n"
        "box.terminate()\n"
    )
    # Python itself warns of forking with threads about; the library has one.
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=40, check=False)
    assert done.stdout == "0 parent\n", done.stderr


@pytest.mark.behaviour("lifetime-11")
def test_it_works_inside_a_running_event_loop(driver: str) -> None:
    async def cell() -> str:
        with Sandbox.create(driver=driver, network="none") as box:
            return box.run("echo", ["notebook"]).stdout

    assert asyncio.run(cell()) == "notebook\n"


@pytest.mark.behaviour("lifetime-11")
def test_event_loops_come_and_go(box: Sandbox) -> None:
    async def one() -> str:
        attached = await AsyncSandbox.connect(box.sandbox_id)
        return (await attached.run("echo", ["x"])).stdout

    assert [asyncio.run(one()) for _ in range(5)] == ["x\n"] * 5
    assert box.run("true").ok


@pytest.mark.behaviour("lifetime-12")
def test_handles_travel_as_their_id(box: Sandbox) -> None:
    box.write_file("/srv/f", b"1")
    twin = pickle.loads(pickle.dumps(box))
    assert twin.sandbox_id == box.sandbox_id
    assert twin.read_file("/srv/f") == b"1"
    twin.close()
    assert box.run("true").ok
    box.terminate()
    with pytest.raises((NotFound, SandboxError)):
        pickle.loads(pickle.dumps(box))
