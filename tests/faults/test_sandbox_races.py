"""Many processes on the same sandbox, snapshot or world at the same time.

Items 34, 36 and 41 of the list of what users of such systems hit (`docs/peers-items.md`), and building a world once.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.stores import exit_code_of, start_child
from tests.victims import start_afresh, wait_clean

from worldfork import Sandbox, world
from worldfork.core.errors import Locked, NotFound, WorldforkError
from worldfork.lineage import place as places
from worldfork.lineage.snapshots import SnapshotInfo


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    places.close_places()


def closing(work: Callable[[], object]) -> Callable[[], object]:
    """Let a child finish what it promised, as the end of the interpreter would."""

    def whole() -> None:
        work()
        places.close_places()

    return whole


@pytest.mark.parametrize("busy", [False, True], ids=["taken", "copied"])
def test_processes_checkpoint_one_sandbox_at_the_same_time(own_home: Path, base: str, busy: bool) -> None:
    """Each snapshot is whole, and holds at least what its process had written before."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        if busy:
            sandbox.start_process("sleep", ["1000"])

        def take(number: int) -> None:
            mine = Sandbox.connect(sandbox.sandbox_id)
            for turn in range(4):
                mine.write_file(f"/by{number}", str(turn).encode())
                snapshot = mine.checkpoint()
                with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
                    assert restored.read_file("/f") == b"first"
                    assert restored.read_file(f"/by{number}") == str(turn).encode()

        children = [start_child(closing(lambda number=number: take(number))) for number in range(4)]
        take(4)
        assert [exit_code_of(child) for child in children] == [0] * 4
        assert [sandbox.read_file(f"/by{number}") for number in range(5)] == [b"3"] * 5
        assert len(sandbox.list_snapshots()) == 20
        assert wait_clean(own_home, living=[sandbox.sandbox_id]) == []


def test_32_processes_ask_for_one_world(own_home: Path, base: str, tmp_path: Path) -> None:
    """It is built once, and all get the same."""
    built = tmp_path / "built"

    def build(sandbox: Sandbox) -> None:
        with built.open("a") as lines:
            lines.write(f"{os.getpid()}\n")
        sandbox.write_file("/f", b"first")

    def ask(number: int) -> None:
        snapshot = world("the world", build, base=base, network="none")
        (tmp_path / f"asked-{number}").write_text(snapshot.snapshot_id)
        assert Sandbox.get_snapshot(snapshot.snapshot_id).status.value == "completed"

    children = [start_child(closing(lambda number=number: ask(number))) for number in range(32)]
    assert [exit_code_of(child) for child in children] == [0] * 32
    assert len(built.read_text().splitlines()) == 1
    (snapshot_id,) = {path.read_text() for path in tmp_path.glob("asked-*")}
    with Sandbox.create(snapshot_id=snapshot_id) as restored:
        assert restored.read_file("/f") == b"first"
    start_afresh()
    assert wait_clean(own_home) == []


def test_threads_ask_for_one_world_and_another(own_home: Path, base: str) -> None:
    """One flight for each key; a builder that fails frees it, and its error is its caller's alone."""
    builds: list[str] = []

    def ask(key: str) -> SnapshotInfo:
        return world(key, lambda sandbox: builds.append(key), base=base, network="none")

    def fail(sandbox: Sandbox) -> None:
        raise ZeroDivisionError("the builder's own")

    with pytest.raises(ZeroDivisionError, match="own"):
        world("a", fail, base=base, network="none")
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, ["a", "b"] * 8))
    assert sorted(builds) == ["a", "b"]
    assert len({snapshot.snapshot_id for snapshot in found}) == 2
    assert wait_clean(own_home) == []


def test_a_killed_builder_frees_the_key(own_home: Path, base: str) -> None:
    """Whoever waits builds it, and nothing of the first try is left."""
    ready, told = os.pipe()

    def build_for_ever(sandbox: Sandbox) -> None:
        sandbox.write_file("/f", b"half")
        os.write(told, b"x")
        signal.pause()

    def build(sandbox: Sandbox) -> None:
        assert not sandbox.sh("test -e /f").ok
        sandbox.write_file("/f", b"whole")

    first = start_child(lambda: world("key", build_for_ever, base=base, network="none"))
    assert os.read(ready, 1) == b"x"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world, "key", build, base=base, network="none")
        time.sleep(0.1)
        assert not waiting.done()
        os.kill(first, signal.SIGKILL)
        assert exit_code_of(first) == -signal.SIGKILL
        snapshot = waiting.result(timeout=20)
    os.close(ready)
    os.close(told)
    with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
        assert restored.read_file("/f") == b"whole"
    start_afresh()
    assert wait_clean(own_home) == []


def test_item_36_deleted_while_forks_start(own_home: Path, base: str) -> None:
    """Item 36: a fork is a sandbox that has everything or NotFound; a deletion succeeds or says who is in the way."""
    outcomes: set[str] = set()

    def fork(snapshot: SnapshotInfo) -> None:
        try:
            results = snapshot.fork(2)
        except NotFound:
            outcomes.add("not found")
            return
        for child in results.unwrap():
            assert child.read_file("/f") == b"first"
            child.terminate()
        outcomes.add("forked")

    def delete(snapshot: SnapshotInfo, delay_s: float) -> None:
        time.sleep(delay_s)
        try:
            Sandbox.delete_snapshot(snapshot.snapshot_id)
        except Locked as error:
            outcomes.add("locked" if error.holders else "locked by nobody")
        else:
            outcomes.add("deleted")

    with Sandbox.create(base=base, network="none") as sandbox, ThreadPoolExecutor(8) as pool:
        for turn in range(40):
            sandbox.write_file("/f", b"changed")
            sandbox.write_file("/f", b"first")
            snapshot = sandbox.checkpoint()
            # The deletion comes before the forks, or among them.
            jobs = [pool.submit(delete, snapshot, max(turn - 20, 0) / 4000)]
            jobs += [pool.submit(fork, snapshot) for _ in range(2)]
            for job in jobs:
                job.result(timeout=20)
        assert {"forked", "deleted"} <= outcomes
        assert outcomes & {"not found", "locked"}
        assert "locked by nobody" not in outcomes
        assert wait_clean(own_home, living=[sandbox.sandbox_id]) == []


def test_item_36_deleted_by_another_process_while_forks_start(own_home: Path, base: str) -> None:
    """Item 36, across processes, with a sweep and a collection going on beside."""
    with Sandbox.create(base=base, network="none") as sandbox:
        for turn in range(12):
            sandbox.write_file("/f", str(turn).encode())
            snapshot = sandbox.checkpoint()

            def delete(snapshot: SnapshotInfo = snapshot) -> None:
                try:
                    Sandbox.delete_snapshot(snapshot.snapshot_id)
                except Locked:
                    pass
                places.place().sweep()

            child = start_child(closing(delete))
            time.sleep(turn * 0.004)
            try:
                results = snapshot.fork(3)
            except NotFound:
                results = None
            if results is not None:
                for one in results.unwrap():
                    assert one.read_file("/f") == str(turn).encode()
                    one.terminate()
            assert exit_code_of(child) == 0
        start_afresh()
        assert wait_clean(own_home, living=[sandbox.sandbox_id]) == []


def test_item_34_any_order_of_deletions(own_home: Path, base: str) -> None:
    """Item 34: a random tree of snapshots, random deletions, some killed: what is left restores."""
    rng = random.Random(34)
    kept: dict[str, dict[str, bytes]] = {}
    with Sandbox.create(base=base, network="none") as first:
        kept[first.checkpoint(wait_until="completed").snapshot_id] = {}
    for number in range(24):
        parent = rng.choice(list(kept))
        with Sandbox.create(snapshot_id=parent) as sandbox:
            path = f"/file{number}"
            sandbox.write_file(path, str(number).encode())
            snapshot = sandbox.checkpoint()
        kept[snapshot.snapshot_id] = {**kept[parent], path: str(number).encode()}
    while len(kept) > 6:
        chosen = rng.choice(list(kept))
        if rng.random() < 0.3:
            child = start_child(lambda chosen=chosen: Sandbox.delete_snapshot(chosen))
            time.sleep(rng.random() * 0.05)
            os.kill(child, signal.SIGKILL)
            exit_code_of(child)
            start_afresh()
        _delete_if_there(chosen)
        del kept[chosen]
    for snapshot_id, files in kept.items():
        with Sandbox.create(snapshot_id=snapshot_id) as restored:
            for path, content in files.items():
                assert restored.read_file(path) == content
    places.place().store.collect()
    assert wait_clean(own_home) == []
    for snapshot_id in kept:
        Sandbox.delete_snapshot(snapshot_id)
    assert wait_clean(own_home) == []


def _delete_if_there(snapshot_id: str) -> None:
    try:
        Sandbox.delete_snapshot(snapshot_id)
    except WorldforkError as error:
        if not isinstance(error, NotFound):
            raise
