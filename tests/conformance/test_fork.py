"""Forks: N sandboxes that share what they do not change, each a result of its own."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.conformance.conftest import Elsewhere, Sandboxes, finish
from tests.conformance.inside import SLEEPER, processes, python, shell, told

from worldfork import AsyncSandbox, ConfigError, ForkResult, Sandbox, SandboxInfo, SandboxStatus
from worldfork.core.errors import ForkError


@pytest.mark.behaviour("fork-1")
def test_a_result_for_each_child(sandboxes: Sandboxes, box: Sandbox) -> None:
    box.write_file("/srv/f", b"1")
    results = box.checkpoint().fork(5)
    for child in results.sandboxes:
        sandboxes.keep(child)
    assert len(results) == 5
    assert all(isinstance(result, ForkResult) for result in results)
    assert [result.index for result in results] == [result.unwrap().fork_index for result in results] == list(range(5))
    assert ([result.error for result in results], results.errors) == ([None] * 5, [])
    assert results[3].sandbox is results.unwrap()[3]
    assert results[1].unwrap() is results.sandboxes[1]
    for child in results.unwrap():
        assert child.read_file("/srv/f") == b"1"
    assert len({child.sandbox_id for child in results.unwrap()}) == 5


@pytest.mark.behaviour("fork-2")
def test_the_source_of_a_live_fork_is_untouched(sandboxes: Sandboxes, box: Sandbox) -> None:
    sleeper = box.start_process(*SLEEPER)
    box.write_file("/srv/f", b"1")
    twins = sandboxes.fork(box, 2)
    for number, twin in enumerate(twins):
        assert processes(twin) == 0
        twin.write_file("/srv/f", b"twin %d" % number)
        twin.delete_file("/etc/passwd")
    assert box.read_file("/srv/f") == b"1"
    assert box.get_process(sleeper.pid).status == "running"
    assert box.run("test", ["-e", "/etc/passwd"]).ok
    assert [twin.read_file("/srv/f") for twin in twins] == [b"twin 0", b"twin 1"]
    assert (box.fork_index, box.info().status) == (0, SandboxStatus.RUNNING)


@pytest.mark.behaviour("fork-1")
def test_forks_that_make_no_sense_leave_no_snapshot(box: Sandbox) -> None:
    wrong: list[dict[str, Any]] = [{"n": 0}, {"n": 2, "seeds": [1]}, {"env": {"a=b": "c"}}, {"max_concurrency": 0}]
    for each in wrong:
        with pytest.raises(ConfigError):
            box.fork(**each)
    assert box.list_snapshots() == []


@pytest.mark.behaviour("fork-3")
def test_siblings_never_see_each_other(sandboxes: Sandboxes, box: Sandbox) -> None:
    box.write_file("/srv/shared", b"from the snapshot")
    shell(box, "mkdir /srv/d; touch /srv/d/a /srv/d/b")
    children = sandboxes.fork(box.checkpoint(), 4)
    serve = (
        "import socket, sys\n"
        "server = socket.create_server(('127.0.0.1', 8000))\n"
        "print('ready', flush=True)\n"
        "while True: server.accept()[0].sendall(sys.argv[1].encode())\n"
    )
    for number, child in enumerate(children):
        with_log = child.start_process("python", ["-c", serve, str(number)])
        assert next(child.follow_stdout(with_log.pid)).line == "ready"
        child.write_file("/srv/shared", b"%d" % number)
        shell(child, f"rm /srv/d/a; touch /srv/d/only-{number} /tmp/{number} /dev/shm/{number}; mkfifo /srv/fifo")
    ask = "import socket; print(socket.create_connection(('127.0.0.1', 8000), 5).recv(9).decode())"
    for number, child in enumerate(children):
        assert python(child, ask) == f"{number}\n"
        assert child.read_file("/srv/shared") == b"%d" % number
        assert shell(child, "ls /srv/d /tmp /dev/shm").split() == [
            "/dev/shm:", str(number), "/srv/d:", "b", f"only-{number}", "/tmp:", str(number),
        ]  # fmt: skip
        assert processes(child) == 1
    assert shell(box, "cat /srv/shared; ls /srv/d") == "from the snapshota\nb"
    # What one writes into a FIFO, none of the others reads.
    children[0].start_process("sh", ["-c", "echo secret > /srv/fifo"])
    assert children[1].run("timeout", ["0.3", "cat", "/srv/fifo"]).stdout == ""


@pytest.mark.behaviour("fork-4")
def test_what_cannot_be_forked_is_refused_first(box: Sandbox) -> None:
    snapshot = box.checkpoint()
    before = len(Sandbox.list())
    for n, options in ((0, {}), (-1, {}), (20_000, {}), (2, {"max_concurrency": 0}), (2, {"network": "some"}),
                       (2, {"no_such": 1})):  # fmt: skip
        with pytest.raises((ConfigError, TypeError)):
            snapshot.fork(n, **options)
    assert len(Sandbox.list()) == before


FAILING = """
import json, logging, resource, sys
logging.disable()
from worldfork import Sandbox, WorldforkError
from worldfork.core.errors import ForkError
with Sandbox.create(snapshot_id=sys.argv[1]) as first:
    # Room for some children and not for all: each takes descriptors of its owner.
    resource.setrlimit(resource.RLIMIT_NOFILE, (180, 180))
    results = Sandbox.fork_snapshot(sys.argv[1], 50)
    lived = [r.sandbox.run("cat", ["/srv/f"]).stdout for r in results if r.sandbox is not None][:3]
    typed = all(isinstance(error, WorldforkError) for error in results.errors)
    try:
        results.unwrap()
        raised = False
    except ForkError as error:
        raised = (len(error.sandboxes), len(error.errors)) == (len(results.sandboxes), len(results.errors))
    for child in results.sandboxes:
        child.terminate()
    print(json.dumps([len(results), len(results.sandboxes), len(results.errors), lived, raised, first.run("true").ok,
                      len(Sandbox.list()), typed]))
"""


@pytest.mark.behaviour("fork-5")
def test_a_child_that_fails_does_not_touch_its_siblings(box: Sandbox, elsewhere: Elsewhere) -> None:
    box.write_file("/srv/f", b"1")
    snapshot = box.checkpoint()
    out = json.loads(finish(elsewhere(FAILING, snapshot.snapshot_id)))
    count, lived, failed, contents, raised, first_lives, listed, typed = out
    assert count == lived + failed == 50
    assert lived >= 1
    assert failed >= 1
    assert (set(contents), raised, first_lives) == ({"1"}, True, True)
    assert listed == 2  # this test's own and the program's
    assert typed


@pytest.mark.behaviour("fork-6")
def test_ten_forks_deep(sandboxes: Sandboxes, box: Sandbox) -> None:
    at = box
    shell(at, "mkdir /srv/d; echo base > /srv/base")
    grown = []
    for depth in range(10):
        shell(at, f"echo {depth} >> /srv/log; echo {depth} > /srv/d/{depth}; rm -f /srv/d/{depth - 3}; "
                  f"rm -rf /srv/now; mkdir /srv/now; touch /srv/now/{depth}")  # fmt: skip
        at = sandboxes.fork(at, 1)[0]
        grown.append(at.info().layers)
    assert at.read_file("/srv/log").decode().split() == [str(depth) for depth in range(10)]
    assert shell(at, "ls /srv/d; ls /srv/now; cat /srv/base").split() == ["7", "8", "9", "9", "base"]
    assert grown == list(range(grown[0], grown[0] + 10))
    # The first one saw nothing of it.
    assert shell(box, "ls /srv/d; cat /srv/log").split() == ["0", "0"]


@pytest.mark.behaviour("fork-7")
def test_many_at_once(sandboxes: Sandboxes, box: Sandbox) -> None:
    box.write_file("/srv/f", b"1")
    children = sandboxes.fork(box.checkpoint(), 32, memory_mb=64, pids=32)
    line = "cat /srv/f; echo; echo $WORLDFORK_FORK_INDEX"
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda child: shell(child, line), children))
    assert answers == [f"1\n{index}" for index in range(32)]
    one_by_one = sandboxes.fork(box.checkpoint(), 4, max_concurrency=1)
    assert [child.run("true").exit_code for child in one_by_one] == [0] * 4


@pytest.mark.behaviour("fork-8")
def test_from_many_threads_and_processes(sandboxes: Sandboxes, box: Sandbox, elsewhere: Elsewhere) -> None:
    box.write_file("/srv/f", b"1")
    snapshot = box.checkpoint()
    program = (
        "import sys\n"
        "from worldfork import Sandbox\n"
        "children = Sandbox.fork_snapshot(sys.argv[1], 3).unwrap()\n"
        "print(*[child.run('cat', ['/srv/f']).stdout for child in children])\n"
        "[child.terminate() for child in children]\n"
    )
    others = [elsewhere(program, snapshot.snapshot_id) for _ in range(3)]
    with ThreadPoolExecutor(4) as threads:
        mine = [child for group in threads.map(lambda _: snapshot.fork(2).unwrap(), range(4)) for child in group]
    for child in mine:
        sandboxes.keep(child)
    assert [child.read_file("/srv/f") for child in mine] == [b"1"] * 8
    assert [finish(other) for other in others] == ["1 1 1\n"] * 3


@pytest.mark.behaviour("fork-9")
def test_a_cancelled_fork_leaves_nothing(box: Sandbox) -> None:
    snapshot = box.checkpoint()

    async def test() -> None:
        before = await AsyncSandbox.list()
        for pause_s in (0.0, 0.002, 0.01, 0.03, 0.06):
            work = asyncio.ensure_future(AsyncSandbox.fork_snapshot(snapshot.snapshot_id, 80))
            await asyncio.sleep(pause_s)  # so that it is cancelled at another point each time
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert [info.sandbox_id for info in await AsyncSandbox.list()] == [info.sandbox_id for info in before]

    asyncio.run(test())


@pytest.mark.behaviour("fork-10")
def test_forks_as_coroutines(driver: str) -> None:
    async def test() -> None:
        async with await AsyncSandbox.create(driver=driver, network="none") as box:
            await box.write_file("/srv/f", b"1")
            snapshot = await box.checkpoint()
            children = (await snapshot.fork_async(3)).unwrap() + (await box.fork(2)).unwrap()
            assert [await child.read_file("/srv/f") for child in children] == [b"1"] * 5
            infos: list[SandboxInfo] = [await child.info() for child in children]
            assert [info.fork_index for info in infos] == [0, 1, 2, 0, 1]
            await asyncio.gather(*(child.terminate() for child in children))

    asyncio.run(test())


@pytest.mark.behaviour("fork-11")
def test_a_fork_can_have_other_options_than_its_snapshot(sandboxes: Sandboxes, box: Sandbox) -> None:
    children = sandboxes.fork(box.checkpoint(), 2, env={"A": "1"}, working_dir="/srv", memory_mb=100, name="kid")
    look = "import json, os; print(json.dumps([os.environ['A'], os.getcwd()]))"
    assert [told(child, look) for child in children] == [["1", "/srv"]] * 2
    assert [child.name for child in children] == ["kid-0", "kid-1"]
    assert [child.info().limits.memory_mb for child in children] == [100, 100]
    with pytest.raises(ForkError):
        ForkResult(0, None, ForkError("as told")).unwrap()
