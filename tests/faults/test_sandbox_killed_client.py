"""Who is killed is not the sandbox's owner, or the sandbox is detached: it lives on with all that it holds.

Items 30, 33 and 36 of the list of what users of such systems hit (`docs/peers-items.md`).
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.stores import exit_code_of, start_child
from tests.victims import Tell, deaths, deepen, start_afresh, wait_clean

from worldfork import Sandbox
from worldfork.lineage import place as places
from worldfork.store import faultpoints


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    places.close_places()


def expect_alive_and_whole(sandbox: Sandbox, where: str, files: dict[str, bytes]) -> None:
    """It answers, holds what it held, takes another checkpoint, and a fork of that has everything."""
    for path, content in files.items():
        assert sandbox.read_file(path) == content, (where, path)
    sandbox.write_file("/after", where.encode())
    snapshot = sandbox.checkpoint()
    sandbox.write_file("/after", b"changed since")
    with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
        for path, content in {**files, "/after": where.encode()}.items():
            assert restored.read_file(path) == content, (where, path)
    assert sandbox.read_file("/after") == b"changed since"


def test_item_33_a_detached_sandbox_outlives_its_killed_owner(own_home: Path, base: str) -> None:
    """Item 33: no split brain. At every step of a detached create there is all of a sandbox or nothing."""
    outcomes = set()

    def work(tell: Tell) -> None:
        sandbox = Sandbox.create(base=base, network="none", detached=True)
        sandbox.write_file("/f", b"first")
        tell(sandbox.sandbox_id)

    for death in deaths(lambda: Sandbox.create(base=base, network="none").terminate(), work, outlive=1):
        start_afresh()
        living = Sandbox.list()
        outcomes.add(len(living))
        assert len(living) <= 1, death
        for sandbox_id in death.told:
            assert Sandbox.connect(sandbox_id).read_file("/f") == b"first"
        for info in living:
            sandbox = Sandbox.connect(info.sandbox_id)
            assert sandbox.run("true").ok, death
            sandbox.terminate()
        assert wait_clean(own_home) == [], death
    assert outcomes == {0, 1}


def _checkpoint_of(found: list[str], tell: Tell) -> None:
    sandbox = Sandbox.connect(found[0])
    tell(sandbox.checkpoint().snapshot_id)
    sandbox.write_file("/g", b"second")
    tell(sandbox.checkpoint().snapshot_id)


def _tell_story(owner: Sandbox, work: Callable[[Tell], object]) -> set[str]:
    steps = set()
    for death in deaths(lambda: places.place(), work):
        steps.add(death.step)
        assert death.code in (0, -signal.SIGKILL), death
        start_afresh()
        expect_alive_and_whole(owner, death.step, {"/f": b"first"})
        for snapshot_id in death.told:
            with Sandbox.create(snapshot_id=snapshot_id) as restored:
                assert restored.read_file("/f") == b"first"
    return steps


@pytest.mark.parametrize("busy", [False, True], ids=["taken", "copied"])
def test_item_36_a_killed_client_of_a_checkpoint(own_home: Path, base: str, busy: bool) -> None:
    """Items 30 and 36: another process checkpoints this one's sandbox and is killed at every step of it."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        if busy:
            sandbox.start_process("sleep", ["1000"])
        found = [sandbox.sandbox_id]
        steps = _tell_story(sandbox, lambda tell: _checkpoint_of(found, tell))
        assert ("checkpoint:frozen" if busy else "checkpoint:rerooted") in steps
        assert wait_clean(own_home, living=found) == []


def test_item_36_a_detached_sandbox_and_a_killed_checkpoint(own_home: Path, base: str) -> None:
    """Items 30 and 36, where nobody but the killed process knew the sandbox."""
    sandbox = Sandbox.create(base=base, network="none", detached=True)
    try:
        sandbox.write_file("/f", b"first")
        found = [sandbox.sandbox_id]
        _tell_story(sandbox, lambda tell: _checkpoint_of(found, tell))
    finally:
        sandbox.terminate()
    assert wait_clean(own_home) == []


def test_item_36_a_client_killed_at_any_moment_of_a_checkpoint(own_home: Path, base: str) -> None:
    """Items 30 and 36, between the named steps: the program that changes the root goes on without its caller.

    A deep chain makes that last for some milliseconds, and commands that wait for the checkpoint's end must go on
    waiting for that program: one that starts between two roots would keep the sandbox on the wrong one.
    """
    with Sandbox.create(base=base, network="none") as first:
        first.write_file("/f", b"first")
        chain = deepen(first.checkpoint(), 300)
    for moment in range(30):
        with Sandbox.create(snapshot_id=chain) as sandbox, ThreadPoolExecutor(8) as pool:
            child, ready = _start_checkpoint(sandbox.sandbox_id)
            os.read(ready, 1)
            waiting = [pool.submit(sandbox.sh, f"echo {n} > /w{n}; sleep 0.00{n}") for n in range(8)]
            time.sleep(moment * 0.0002)
            os.kill(child, signal.SIGKILL)
            exit_code_of(child)
            os.close(ready)
            assert all(one.result(timeout=20).ok for one in waiting)
            files = {"/f": b"first", "/g": b"second", **{f"/w{n}": f"{n}\n".encode() for n in range(8)}}
            expect_alive_and_whole(sandbox, f"moment {moment}", files)
    start_afresh()
    assert wait_clean(own_home) == []


def _start_checkpoint(sandbox_id: str) -> tuple[int, int]:
    """Let a child checkpoint a sandbox; return its pid, and a descriptor that tells when it is about to move it."""
    ready, told = os.pipe()

    def tell(name: str) -> None:
        if name == "checkpoint:made":
            os.write(told, b"x")

    def checkpoint() -> None:
        other = Sandbox.connect(sandbox_id)
        other.write_file("/g", b"second")
        faultpoints.install(tell)
        other.checkpoint()

    child = start_child(checkpoint)
    os.close(told)
    return child, ready


class Injected(Exception):
    """Raised in place of a step."""


@pytest.mark.parametrize("busy", [False, True], ids=["taken", "copied"])
def test_item_36_a_checkpoint_that_fails_at_any_step(own_home: Path, base: str, busy: bool) -> None:
    """Item 36, and 6: an error instead of a kill. The sandbox answers, goes on and loses nothing."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        if busy:
            sandbox.start_process("sleep", ["1000"])
        for step in itertools.count(1):
            sandbox.write_file("/g", str(step).encode())
            passed = _fail_at(step)
            try:
                sandbox.checkpoint()
            except Injected:
                pass
            finally:
                faultpoints.install(None)
            where = passed[step - 1] if len(passed) >= step else ""
            expect_alive_and_whole(sandbox, where, {"/f": b"first", "/g": str(step).encode()})
            if not where:
                break
        assert step > 6
        assert wait_clean(own_home, living=[sandbox.sandbox_id]) == []


def test_item_36_a_fork_that_fails_at_any_step(own_home: Path, base: str) -> None:
    """Item 36: each child is a sandbox or an error, the source answers, and nothing of a failed child is left."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        snapshot = sandbox.checkpoint()
        for step in itertools.count(1):
            passed = _fail_at(step)
            children: list[Sandbox] = []
            try:
                results = snapshot.fork(2)
                children = results.sandboxes
                assert len(children) + len(results.errors) == 2
                assert all(isinstance(error, Injected) for error in results.errors)
            except Injected:
                pass
            finally:
                faultpoints.install(None)
            for child in children:
                assert child.read_file("/f") == b"first"
            assert wait_clean(own_home, living=[one.sandbox_id for one in [sandbox, *children]]) == [], passed
            for child in children:
                child.terminate()
            assert sandbox.run("true").ok
            if len(passed) < step:
                break
        assert step > 3


def _fail_at(step: int) -> list[str]:
    """Raise at the step-th named step of the work; returns the names passed, which grows."""
    passed: list[str] = []

    def hook(name: str) -> None:
        # After a commit there is nothing left that could fail.
        if name.startswith(("checkpoint:", "start:", "begin_layer:", "publish:")) and not name.endswith(":committed"):
            passed.append(name)
            if len(passed) == step:
                raise Injected(name)

    faultpoints.install(hook)
    return passed
