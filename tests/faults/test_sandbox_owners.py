"""Owners of every kind: forked, threaded, interrupted, pooled, and ending in every way.

Items 32, 39 and 43 of the list of what users of such systems hit (`docs/peers-items.md`), and the design's promises on
threads, `os.fork` and the end of the interpreter.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.stores import exit_code_of, start_child
from tests.victims import left_in, start_afresh, wait_clean

from worldfork import Sandbox, SandboxStatus
from worldfork.core.errors import SandboxError, WorldforkError
from worldfork.lineage import place as places

TOP = Path(__file__).parents[2]


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    places.close_places()


@pytest.fixture
def sandbox(own_home: Path, base: str) -> Iterator[Sandbox]:
    with Sandbox.create(base=base, network="none") as made:
        made.write_file("/f", b"first")
        yield made


def in_child_exiting(work: object) -> int:
    """Run `work` in a forked child that ends as a Python program does: atexit, garbage and all."""
    child = os.fork()
    if child:
        return exit_code_of(child)
    try:
        work()  # type: ignore[operator]  # a function of the test
        gc.collect()
        places.close_places()
        gc.collect()
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def test_a_forked_child_has_no_part_in_the_handle(own_home: Path, base: str, sandbox: Sandbox) -> None:
    """The old handle raises with the remedy, connect and create work, and the child's end hurts nobody."""

    def child() -> None:
        with pytest.raises(SandboxError) as caught:
            sandbox.run("true")
        assert "connect" in caught.value.remedy
        sandbox.terminate()
        other = Sandbox.connect(sandbox.sandbox_id)
        assert other.read_file("/f") == b"first"
        assert other.status is SandboxStatus.RUNNING
        with Sandbox.create(base=base, network="none") as own:
            assert own.run("true").ok
        Sandbox.create(base=base, network="none")
        assert len(Sandbox.list()) == 2

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sandbox.run, "sh", ["-c", "sleep 1; echo done"])
        assert in_child_exiting(child) == 0
        assert running.result(timeout=10).stdout == "done\n"
    assert sandbox.checkpoint().snapshot_id
    assert [info.sandbox_id for info in Sandbox.list()] == [sandbox.sandbox_id]


def test_a_child_that_leaves_the_block_of_its_parent(own_home: Path, base: str) -> None:
    """sys.exit() in a child unwinds `with Sandbox.create()`; the parent's sandbox is not the child's to end."""
    program = (
        "import os, sys\n"
        "from worldfork import Sandbox\n"
        f"with Sandbox.create(base={base!r}, network='none') as sandbox:\n"
        "    if (child := os.fork()) == 0:\n"
        "        sys.exit(5)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sandbox.run('true').exit_code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=40)
    assert done.stdout == "5 0\n", done.stderr
    assert left_in(own_home) == []


def test_forking_while_threads_are_busy(own_home: Path, base: str, sandbox: Sandbox) -> None:
    """Whatever the other threads hold at that moment, a child works or raises, and never hangs."""
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            with Sandbox.create(base=base, network="none") as one:
                one.run("true")
                one.checkpoint()

    def child() -> None:
        signal.alarm(20)
        with Sandbox.create(base=base, network="none") as own:
            assert own.run("true").ok
        assert Sandbox.connect(sandbox.sandbox_id).run("true").ok

    threads = [threading.Thread(target=keep_busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        children = []
        for _ in range(8):
            children.append(start_child(child))
            time.sleep(0.02)
        assert [exit_code_of(one) for one in children] == [0] * len(children)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    start_afresh()
    for snapshot in Sandbox.list_all_snapshots():
        if snapshot.sandbox_id is not None:
            Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert wait_clean(own_home, living=[sandbox.sandbox_id]) == []


def test_pools_of_processes(own_home: Path, base: str) -> None:
    """multiprocessing by fork, spawn and forkserver: handles travel as ids, workers have sandboxes of their own."""
    command = [sys.executable, "-m", "tests.stories.pools", base]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TOP, timeout=50)
    assert done.returncode == 0, done.stderr
    start_afresh()
    assert left_in(own_home) == []


def test_a_handle_pickles_as_its_id(sandbox: Sandbox) -> None:
    text = pickle.dumps(sandbox)
    assert sandbox.sandbox_id.encode() in text
    assert len(text) < 300
    twin = pickle.loads(text)
    assert twin.read_file("/f") == b"first"
    twin.close()
    assert sandbox.run("true").ok


@pytest.mark.parametrize("call", ["run", "sh", "checkpoint", "create", "follow"])
def test_item_39_an_interrupt(own_home: Path, base: str, sandbox: Sandbox, call: str) -> None:
    """Item 39: Ctrl-C ends the call with what it began, at once, and the sandbox is as usable as before."""
    process = sandbox.start_process("sh", ["-c", "echo line; exec sleep 1000"])
    before = sandbox.info().processes
    stop = threading.Event()

    def interrupt() -> None:
        while call in ("run", "sh") and sandbox.info().commands != 2:
            time.sleep(0.002)
        stop.wait(0.03)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        _call_for_ever(call, sandbox, process.pid, base)
    assert sandbox.info().processes == before
    thread.join()
    assert sandbox.read_file("/f") == b"first"
    snapshot = sandbox.checkpoint()
    with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
        assert restored.read_file("/f") == b"first"


def _call_for_ever(call: str, sandbox: Sandbox, pid: int, base: str) -> None:
    while True:
        if call == "run":
            sandbox.run("sh", ["-c", "setsid sleep 1000 & sleep 1000"])
        elif call == "sh":
            sandbox.sh("sleep 1000 & (sleep 1000 &) ; sleep 1000")
        elif call == "checkpoint":
            sandbox.write_file("/g", b"more")
            sandbox.checkpoint()
        elif call == "create":
            Sandbox.create(base=base, network="none").terminate()
        else:
            for _ in sandbox.follow_output(pid):
                pass


ENDINGS = {"end": 0, "error": 1, "exit": 0, "interrupt": -signal.SIGINT, "loop": 0, "commands": 0}


@pytest.mark.parametrize("way", ENDINGS)
def test_item_39_the_end_of_the_interpreter(own_home: Path, base: str, way: str) -> None:
    """Item 39: it ends the sandboxes, waits until snapshots are durable, and leaves nothing, also after an error."""
    done = _end(base, way)
    assert done.returncode in (ENDINGS[way], 130 if way == "interrupt" else ENDINGS[way]), done.stderr
    assert left_in(own_home) == []
    _expect_kept(done.stdout.strip(), status="completed")


@pytest.mark.parametrize(("way", "code"), [("immediately", 0), ("signal", -signal.SIGTERM)])
def test_item_39_an_end_without_a_goodbye(own_home: Path, base: str, way: str, code: int) -> None:
    """Item 39: os._exit and SIGTERM: the sandboxes end all the same, and the next start clears up and finishes."""
    done = _end(base, way)
    assert done.returncode == code, done.stderr
    start_afresh()
    assert left_in(own_home) == []
    _expect_kept(done.stdout.strip(), status="completed")


def _end(base: str, way: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.stories.ending", base, way]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=TOP, timeout=40)


def _expect_kept(snapshot_id: str, *, status: str) -> None:
    assert Sandbox.get_snapshot(snapshot_id).status.value == status
    with Sandbox.create(snapshot_id=snapshot_id) as restored:
        assert restored.read_file("/f").startswith(b"first")


def test_item_43_two_hundred_at_once(own_home: Path, base: str) -> None:
    """Item 43: 200 sandboxes with a network each, from 200 threads, all with the owner's mark; then nothing."""

    def live(number: int) -> bool:
        with Sandbox.create(base=base, network="none", name=f"one-{number}") as one:
            return one.run("cat", ["/proc/sys/kernel/hostname"]).stdout == f"one-{number}\n"

    with ThreadPoolExecutor(200) as pool:
        assert all(pool.map(live, range(200)))
    assert Sandbox.list() == []
    assert wait_clean(own_home) == []


def test_many_threads_on_one_sandbox(sandbox: Sandbox) -> None:
    """16 threads run, write, read, list, checkpoint and fork through one handle; each gets its own answer."""

    def use(number: int) -> None:
        for turn in range(5):
            text = f"{number} {turn}"
            assert sandbox.run("echo", [text]).stdout == f"{text}\n"
            sandbox.write_file(f"/t{number}", text.encode())
            assert sandbox.read_file(f"/t{number}") == text.encode()
            assert sandbox.info().sandbox_id == sandbox.sandbox_id
            if turn == number % 5:
                with Sandbox.create(snapshot_id=sandbox.checkpoint().snapshot_id) as restored:
                    assert restored.read_file(f"/t{number}") == text.encode()

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(use, number) for number in range(16)]:
            done.result(timeout=50)


def test_many_threads_on_many_sandboxes(own_home: Path, base: str) -> None:
    """16 threads with a sandbox and forks of their own, some inside an event loop."""

    def use(number: int) -> None:
        with Sandbox.create(base=base, network="none") as mine:
            mine.write_file("/n", str(number).encode())
            for child in mine.fork(2).unwrap():
                assert child.read_file("/n") == str(number).encode()
                child.terminate()

    async def use_in_loop(number: int) -> None:
        use(number)

    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(use, number) for number in range(8)]
        jobs += [pool.submit(lambda number=number: asyncio.run(use_in_loop(number))) for number in range(8, 16)]
        for job in jobs:
            job.result(timeout=50)
    assert wait_clean(own_home) == []


def test_a_handle_of_a_sandbox_that_is_over_says_so_everywhere(own_home: Path, sandbox: Sandbox) -> None:
    """Item 32: nothing is done to whoever has its numbers now."""
    sandbox.terminate()
    for call in (
        lambda: sandbox.run("true"),
        lambda: sandbox.read_file("/f"),
        sandbox.checkpoint,
        lambda: sandbox.fork(2),
    ):
        with pytest.raises(WorldforkError):
            call()
    sandbox.terminate()
    assert sandbox.status is SandboxStatus.TERMINATED
