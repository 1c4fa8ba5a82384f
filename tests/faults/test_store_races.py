"""Many processes on one store."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores import add_snapshot, exit_code_of, home_at, in_child, problems, start_child

from worldfork.core.errors import Locked, NotFound
from worldfork.core.ids import new_id
from worldfork.store.leases import Holder
from worldfork.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(home_at(tmp_path / "home"))
    yield opened
    opened.close()


def test_one_of_32_processes_at_a_time(store: Store, tmp_path: Path) -> None:
    inside, count = tmp_path / "inside", tmp_path / "count"
    count.write_text("0")

    def enter() -> None:
        for _ in range(3):
            with store.single_flight("world: a/b\n"):
                os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
                count.write_text(str(int(count.read_text()) + 1))
                inside.unlink()

    children = [start_child(enter) for _ in range(32)]
    assert [exit_code_of(child) for child in children] == [0] * 32
    assert count.read_text() == "96"
    assert os.listdir(store.home.locks) == []


def test_one_thread_at_a_time_and_other_keys_pass(store: Store) -> None:
    inside = 0
    most = 0

    def enter(key: str) -> None:
        nonlocal inside, most
        for _ in range(20):
            with store.single_flight(key):
                inside += 1
                most = max(most, inside)
                time.sleep(0.0002)
                inside -= 1

    threads = [threading.Thread(target=enter, args=("same",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    with store.single_flight("another"):
        pass
    for thread in threads:
        thread.join()
    assert most == 1


def test_an_error_inside_frees_the_key_and_passes_as_it_is(store: Store) -> None:
    with pytest.raises(OSError, match="the builder's own"):
        with store.single_flight("key"):
            raise OSError("the builder's own")
    with store.single_flight("key"):
        pass


def test_a_killed_holder_frees_the_key(store: Store) -> None:
    ready, told = os.pipe()

    def build_forever() -> None:
        with store.single_flight("key"):
            os.write(told, b"x")
            signal.pause()

    def build() -> None:
        with store.single_flight("key"):
            os.write(told, b"y")

    first = start_child(build_forever)
    assert os.read(ready, 1) == b"x"
    second = start_child(build)
    os.set_blocking(ready, False)
    time.sleep(0.1)
    with pytest.raises(BlockingIOError):
        os.read(ready, 1)
    os.kill(first, signal.SIGKILL)
    assert exit_code_of(first) == -signal.SIGKILL
    assert exit_code_of(second) == 0
    assert os.read(ready, 1) == b"y"
    os.close(ready)
    os.close(told)


def test_either_held_or_deleted_never_both(store: Store) -> None:
    outcomes = set()
    for _ in range(25):
        record = add_snapshot(store)
        sandbox = new_id("sb")
        start, go = os.pipe()
        lasting, over = os.pipe()

        def hold(record=record, sandbox=sandbox, start=start, go=go, lasting=lasting, over=over) -> None:  # type: ignore[no-untyped-def]
            os.close(go)
            os.close(over)
            os.read(start, 1)
            try:
                store.hold([Holder(sandbox, snapshot_id=record.snapshot_id)])
            except NotFound:
                os._exit(3)
            # As its sandbox, this process outlives the attempt of the other.
            os.read(lasting, 1)

        def delete(record=record, start=start, go=go, over=over) -> None:  # type: ignore[no-untyped-def]
            os.close(go)
            os.close(over)
            os.read(start, 1)
            try:
                store.delete_snapshot(record.snapshot_id)
                store.collect()
            except Locked:
                os._exit(4)

        holding, deleting = start_child(hold), start_child(delete)
        os.close(go)
        os.close(start)
        deleted = exit_code_of(deleting)
        os.close(over)
        os.close(lasting)
        outcomes.add((exit_code_of(holding), deleted))
    assert outcomes <= {(0, 4), (3, 0)}


def test_thrash(store: Store) -> None:
    """Writers, readers, deleters and collectors at once: nobody ever reads what is not whole."""

    def work(seed: int) -> None:
        chance = random.Random(seed)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            known = store.snapshots()
            verb = chance.choice(["add", "fork", "fork", "delete", "collect", "durable", "sweep"])
            with contextlib.suppress(NotFound, Locked):
                if verb == "add" or len(known) < 3:
                    add_snapshot(store, below=chance.choice(known).layers if known and chance.random() < 0.5 else ())
                elif verb == "fork":
                    read_as_a_fork(store, chance.choice(known).snapshot_id)
                elif verb == "delete":
                    store.delete_snapshot(chance.choice(known).snapshot_id)
                elif verb == "collect":
                    assert store.collect().failures == []
                elif verb == "durable":
                    store.make_durable(chance.choice(known).snapshot_id)
                else:
                    assert store.sweep().failures == []

    children = [start_child(lambda seed=seed: work(seed)) for seed in range(5)]  # type: ignore[misc]
    time.sleep(0.5)
    os.kill(children[0], signal.SIGKILL)
    codes = [exit_code_of(child) for child in children]
    assert codes == [-signal.SIGKILL, 0, 0, 0, 0]
    store.sweep()
    store.collect()
    assert problems(store) == []


def read_as_a_fork(store: Store, snapshot_id: str) -> None:
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, snapshot_id=snapshot_id)])
    for layer_id in store.snapshot(snapshot_id).layers:
        assert (store.layer_path(layer_id) / "file").read_text() == layer_id
    store.release([sandbox])


def test_forks_of_a_busy_process_are_owners_of_their_own(store: Store) -> None:
    """A store that threads use while the process forks, as a data loader does."""
    record = add_snapshot(store)
    stop = threading.Event()
    failures: list[BaseException] = []

    def busy() -> None:
        try:
            while not stop.is_set():
                read_as_a_fork(store, record.snapshot_id)
        except BaseException as error:
            failures.append(error)

    def child() -> None:
        assert store.owner_id != owner
        for _ in range(3):
            read_as_a_fork(store, record.snapshot_id)
        add_snapshot(store)
        assert store.is_alive(owner)
        assert in_child(lambda: read_as_a_fork(store, record.snapshot_id)) == 0

    owner = store.owner_id
    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        codes = [in_child(child) for _ in range(8)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert codes == [0] * 8
    assert failures == []
    assert store.owner_id == owner
    assert len(store.snapshots()) == 9
    store.sweep()
    assert problems(store) == []


def test_many_openers_of_a_new_home(tmp_path: Path) -> None:
    def open_it() -> None:
        store = Store.open(home_at(tmp_path / "new"))
        add_snapshot(store)
        store.close()

    children = [start_child(open_it) for _ in range(12)]
    assert [exit_code_of(child) for child in children] == [0] * 12
    store = Store.open(home_at(tmp_path / "new"))
    assert len(store.snapshots()) == 12
    assert problems(store) == []
    store.close()


def test_a_child_that_outlives_its_parent_keeps_the_store_whole(tmp_path: Path) -> None:
    """The parent's locks on the database go with it; the child must have had its own."""
    home = home_at(tmp_path / "home")
    told, tell = os.pipe()

    def parent() -> None:
        store = Store.open(home)
        record = add_snapshot(store)

        def orphan() -> None:
            (tmp_path / "orphan").write_text(str(os.getpid()))
            store.hold([Holder(new_id("sb"), snapshot_id=record.snapshot_id)])
            os.write(tell, b"r")
            while os.getppid() == parent_pid:
                time.sleep(0.01)
            for _ in range(200):
                add_snapshot(store)
            os.write(tell, b"d")

        parent_pid = os.getpid()
        start_child(orphan)
        os.read(told, 1)
        os._exit(0)

    assert in_child(parent) == 0
    for _ in range(10):
        store = Store.open(home)
        add_snapshot(store)
        store.close()
    assert os.read(told, 1) == b"d"
    with contextlib.suppress(ProcessLookupError):
        orphan = os.pidfd_open(int((tmp_path / "orphan").read_text()))
        select.select([orphan], [], [], 30)
        os.close(orphan)
    store = Store.open(home)
    assert len(store.snapshots()) == 211
    store.sweep(grace_s=0)
    assert problems(store) == []
    store.close()
    os.close(told)
    os.close(tell)
