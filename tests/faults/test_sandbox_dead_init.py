"""A sandbox's own processes die, hang or are stopped under it, and it is ended in whatever state it is.

Items 32, 35, 36, 37 and 53 of the list of what users of such systems hit (`docs/peers-items.md`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.victims import children_of, init_of, wait_clean

from worldfork import CommandExitReason, Sandbox, SandboxStatus
from worldfork.core.errors import SandboxDied
from worldfork.lineage import place as places
from worldfork.store import faultpoints

SOON_S = 1.0


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    places.close_places()


@pytest.fixture
def sandbox(own_home: Path, base: str) -> Iterator[Sandbox]:
    with Sandbox.create(base=base, network="none") as made:
        yield made


@pytest.fixture
def sibling(own_home: Path, base: str) -> Iterator[Sandbox]:
    """Another sandbox, which nothing may happen to."""
    with Sandbox.create(base=base, network="none") as made:
        made.write_file("/mine", b"here")
        made.start_process("sleep", ["1000"])
        yield made
        assert made.read_file("/mine") == b"here"
        assert made.run("true").ok
        assert made.list_processes()[0].status == "running"


def expect_dead(sandbox: Sandbox, home: Path, sibling: Sandbox) -> None:
    """It says so whatever is asked, and `terminate` still clears all of it away."""
    began_s = time.monotonic()
    for call in (lambda: sandbox.run("true"), lambda: sandbox.write_file("/f", b""), lambda: sandbox.checkpoint()):
        with pytest.raises(SandboxDied) as caught:
            call()
        assert sandbox.sandbox_id in str(caught.value)
        assert caught.value.remedy
    _wait_until(lambda: sandbox.status is SandboxStatus.TERMINATED, SOON_S)
    assert sandbox.sandbox_id not in [info.sandbox_id for info in Sandbox.list()]
    assert time.monotonic() - began_s < 2 * SOON_S
    sandbox.terminate()
    assert wait_clean(home, living=[sibling.sandbox_id]) == []


def test_item_37_a_killed_init(own_home: Path, sandbox: Sandbox, sibling: Sandbox) -> None:
    """Item 37: the status is true within 1 s and stopping returns; item 62: it is never replaced silently."""
    os.kill(init_of(own_home, sandbox.sandbox_id), signal.SIGKILL)
    expect_dead(sandbox, own_home, sibling)


def test_item_37_init_killed_under_a_command(own_home: Path, sandbox: Sandbox, sibling: Sandbox) -> None:
    """Item 37: whoever waits hears of it at once."""
    init = init_of(own_home, sandbox.sandbox_id)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sandbox.run, "sleep", ["1000"])
        _wait_until(lambda: sandbox.info().commands == 1)
        began_s = time.monotonic()
        os.kill(init, signal.SIGKILL)
        with pytest.raises(SandboxDied):
            running.result(timeout=10)
        assert time.monotonic() - began_s < SOON_S
    expect_dead(sandbox, own_home, sibling)


def test_item_37_init_killed_under_a_stream(own_home: Path, sandbox: Sandbox, sibling: Sandbox) -> None:
    """Item 37, while input flows in: the command has begun to take it and will not take all."""
    init = init_of(own_home, sandbox.sandbox_id)
    with ThreadPoolExecutor(1) as pool:
        feeding = pool.submit(sandbox.run, "sh", ["-c", "head -c 1000000 > /copy; sleep 1000"], stdin=b"x" * (64 << 20))
        _wait_until(lambda: sandbox.sh("test -s /copy").ok)
        os.kill(init, signal.SIGKILL)
        with pytest.raises(SandboxDied):
            feeding.result(timeout=10)
    expect_dead(sandbox, own_home, sibling)


def test_item_37_init_killed_under_a_write_file(own_home: Path, sandbox: Sandbox, sibling: Sandbox) -> None:
    """Item 37, for write_file: it is killed once a supervisor for it is there."""
    init = init_of(own_home, sandbox.sandbox_id)
    watcher = threading.Thread(target=_kill_when, args=(init, lambda: len(children_of(init)) > 0))
    watcher.start()
    with pytest.raises(SandboxDied):
        _write_for_ever(sandbox)
    watcher.join()
    expect_dead(sandbox, own_home, sibling)


def _write_for_ever(sandbox: Sandbox) -> None:
    while True:
        sandbox.write_file("/large", b"x" * (64 << 20))


@pytest.mark.parametrize("step", ["held", "renamed", "made", "rerooted"])
def test_item_35_init_killed_under_a_checkpoint(own_home: Path, sandbox: Sandbox, sibling: Sandbox, step: str) -> None:
    """Item 35: a checkpoint has no state that it could not leave. Whole, or not there."""
    sandbox.write_file("/f", b"first")
    _checkpoint_with_a_kill(own_home, sandbox, f"checkpoint:{step}")
    sandbox.terminate()
    _expect_whole_snapshots(sandbox)
    expect_dead(sandbox, own_home, sibling)


@pytest.mark.parametrize("step", ["frozen", "copied", "thawed"])
def test_item_35_init_killed_under_a_copying_checkpoint(
    own_home: Path, sandbox: Sandbox, sibling: Sandbox, step: str
) -> None:
    """Item 35, with frozen processes, which a signal alone does not end."""
    sandbox.write_file("/f", b"first")
    sandbox.start_process("sleep", ["1000"])
    _checkpoint_with_a_kill(own_home, sandbox, f"checkpoint:{step}")
    sandbox.terminate()
    _expect_whole_snapshots(sandbox)
    expect_dead(sandbox, own_home, sibling)


def _checkpoint_with_a_kill(home: Path, sandbox: Sandbox, step: str) -> None:
    init = init_of(home, sandbox.sandbox_id)
    passed = []

    def hook(name: str) -> None:
        if name == step:
            passed.append(name)
            os.kill(init, signal.SIGKILL)

    faultpoints.install(hook)
    with contextlib.suppress(SandboxDied):
        sandbox.checkpoint()
    faultpoints.install(None)
    assert passed


def _expect_whole_snapshots(sandbox: Sandbox) -> None:
    """A snapshot that is there at all has everything; then delete it."""
    for snapshot in Sandbox.list_all_snapshots():
        if snapshot.sandbox_id == sandbox.sandbox_id:
            with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
                assert restored.read_file("/f") == b"first"
            Sandbox.delete_snapshot(snapshot.snapshot_id)


@pytest.mark.parametrize("step", ["held", "renamed", "rerooted", "frozen", "copied"])
def test_item_36_terminate_wins_over_a_checkpoint(
    own_home: Path, sandbox: Sandbox, sibling: Sandbox, step: str
) -> None:
    """Items 35 and 36: an end asked for by another thread in any state of a checkpoint takes effect, and is final."""
    sandbox.write_file("/f", b"first")
    if step in ("frozen", "copied"):
        sandbox.start_process("sleep", ["1000"])
    ended = threading.Event()
    enders = []

    def end() -> None:
        sandbox.terminate()
        ended.set()

    def hook(name: str) -> None:
        if name == f"checkpoint:{step}" and not enders:
            enders.append(threading.Thread(target=end))
            enders[0].start()

    faultpoints.install(hook)
    with contextlib.suppress(SandboxDied):
        sandbox.checkpoint()
    faultpoints.install(None)
    assert enders
    assert ended.wait(10)
    enders[0].join()
    sandbox.terminate()
    assert sandbox.status is SandboxStatus.TERMINATED
    _expect_whole_snapshots(sandbox)
    assert wait_clean(own_home, living=[sibling.sandbox_id]) == []


@pytest.mark.parametrize("step", ["held", "renamed", "made", "rerooted"])
def test_item_36_what_another_process_released_is_not_held_again(
    own_home: Path, sandbox: Sandbox, sibling: Sandbox, step: str
) -> None:
    """Item 36: an end in another process comes between any two steps of a checkpoint, with all that it clears away."""
    sandbox.write_file("/f", b"first")
    init = init_of(own_home, sandbox.sandbox_id)
    released = []

    def hook(name: str) -> None:
        if name == f"checkpoint:{step}" and not released:
            released.append(name)
            os.kill(init, signal.SIGKILL)
            places.place().store.release([sandbox.sandbox_id])

    faultpoints.install(hook)
    with contextlib.suppress(SandboxDied):
        sandbox.checkpoint()
    faultpoints.install(None)
    assert released
    sandbox.terminate()
    _expect_whole_snapshots(sandbox)
    assert wait_clean(own_home, living=[sibling.sandbox_id]) == []


def test_item_36_terminate_while_commands_run_and_again(own_home: Path, sandbox: Sandbox, sibling: Sandbox) -> None:
    """Item 36: ending is idempotent, from many threads at once; what waits is told."""
    with ThreadPoolExecutor(12) as pool:
        running = [pool.submit(sandbox.run, "sleep", ["1000"]) for _ in range(4)]
        _wait_until(lambda: sandbox.info().commands == 4)
        for end in [pool.submit(sandbox.terminate) for _ in range(8)]:
            end.result(timeout=10)
        for one in running:
            with pytest.raises(SandboxDied):
                one.result(timeout=10)
    sandbox.terminate()
    assert wait_clean(own_home, living=[sibling.sandbox_id]) == []


def test_item_32_init_reaped_by_somebody_else(own_home: Path, sandbox: Sandbox, sibling: Sandbox) -> None:
    """Item 32: its pid may be a stranger's by now; nothing is signalled by number."""
    init = init_of(own_home, sandbox.sandbox_id)
    os.kill(init, signal.SIGKILL)
    os.waitid(os.P_PID, init, os.WEXITED | os.WNOWAIT)
    try:
        os.waitpid(init, 0)
    except ChildProcessError:
        pass  # the library was faster, which is the same for what follows
    expect_dead(sandbox, own_home, sibling)


def test_item_53_a_killed_supervisor(own_home: Path, sandbox: Sandbox) -> None:
    """Item 53: what it looked after goes, sessions of their own and all; the result says so; the sandbox answers."""
    init = init_of(own_home, sandbox.sandbox_id)
    line = "setsid sleep 1000 & (setsid sleep 1000 &) ; echo begun; sleep 1000"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sandbox.run, "sh", ["-c", line])
        _wait_until(lambda: sandbox.info().processes >= 4)
        (supervisor,) = children_of(init)
        began_s = time.monotonic()
        os.kill(supervisor, signal.SIGKILL)
        result = running.result(timeout=10)
        assert time.monotonic() - began_s < SOON_S
    assert result.reason is CommandExitReason.SIGNALED
    assert result.stdout == "begun\n"
    _wait_until(lambda: sandbox.info().processes == 0)
    assert sandbox.run("true").ok


def test_item_53_a_killed_supervisor_of_a_started_process(own_home: Path, sandbox: Sandbox) -> None:
    """Item 53, for a process that outlives its call."""
    init = init_of(own_home, sandbox.sandbox_id)
    process = sandbox.start_process("sleep", ["1000"])
    (supervisor,) = children_of(init)
    os.kill(supervisor, signal.SIGKILL)
    _wait_until(lambda: sandbox.get_process(process.pid).status != "running")
    _wait_until(lambda: sandbox.info().processes == 0)
    assert sandbox.run("true").ok


def test_item_53_a_killed_supervisor_of_a_frozen_command(own_home: Path, sandbox: Sandbox) -> None:
    """Item 53, at the worst moment: the checkpoint is right or an error, and the sandbox goes on."""
    init = init_of(own_home, sandbox.sandbox_id)
    sandbox.write_file("/f", b"first")
    sandbox.start_process("sleep", ["1000"])

    def hook(name: str) -> None:
        if name == "checkpoint:frozen":
            for supervisor in children_of(init):
                os.kill(supervisor, signal.SIGKILL)

    faultpoints.install(hook)
    try:
        snapshot = sandbox.checkpoint()
    finally:
        faultpoints.install(None)
    with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
        assert restored.read_file("/f") == b"first"
    assert sandbox.run("true").ok
    _wait_until(lambda: sandbox.info().processes == 0)


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0], ids=["forward", "back"])
def test_a_clock_that_jumps(
    own_home: Path, base: str, sibling: Sandbox, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """Time limits, leases and sweeps do not depend on the wall clock, which an operator or NTP may move."""
    real, moved_s = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: real() + moved_s)
    sandbox = Sandbox.create(base=base, network="none", timeout_secs=1000)
    moved_s += jump_s
    began_s = time.monotonic()
    result = sandbox.run("sleep", ["1000"], timeout=0.3)
    assert result.reason is CommandExitReason.TIMED_OUT
    assert 0.25 < time.monotonic() - began_s < 10
    sandbox.write_file("/f", b"first")
    snapshots = []
    for number in range(3):
        sandbox.write_file("/n", str(number).encode())
        snapshots.append(sandbox.checkpoint().snapshot_id)
        moved_s += jump_s
    assert [one.snapshot_id for one in sandbox.list_snapshots()] == snapshots
    places.place().sweep()
    assert {info.sandbox_id for info in Sandbox.list()} == {sandbox.sandbox_id, sibling.sandbox_id}
    (child,) = Sandbox.fork_snapshot(snapshots[1], 1).unwrap()
    assert child.read_file("/n") == b"1"
    child.terminate()
    sandbox.terminate()
    assert wait_clean(own_home, living=[sibling.sandbox_id]) == []


def _kill_when(pid: int, condition: Callable[[], bool]) -> None:
    _wait_until(condition)
    os.kill(pid, signal.SIGKILL)


def _wait_until(condition: Callable[[], bool], deadline_s: float = 10.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.002)
