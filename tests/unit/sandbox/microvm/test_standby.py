"""Machines that wait for the next sandboxes: taken whole, or gone without a trace."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.native import stand_in
from tests.unit.sandbox.microvm.test_disks import plan as plan
from tests.unit.sandbox.microvm.test_manifest import SAVED

from worldfork.core.errors import LaunchFailed
from worldfork.records.sandbox import Limits
from worldfork.sandbox.driver import StartPlan
from worldfork.sandbox.microvm.control import control
from worldfork.sandbox.microvm.keep import Kept, base_items, start_keep
from worldfork.sandbox.microvm.manifest import DiskFile, write_saved
from worldfork.sandbox.microvm.standby import Begin, Standby
from worldfork.sandbox.microvm.starting import Origin
from worldfork.sandbox.microvm.waiting import Kind, Waiting, enter_groups, kind_of, put_away, settle
from worldfork.sandbox.microvm.wire import Op

PROGRAM = Path(stand_in.__file__).read_text(encoding="utf-8")
GENERATION = 9


def begin(planned: StartPlan) -> tuple[Kept, int]:
    items = base_items(planned.facts.sandbox_id, Path(planned.facts.run), planned.lock)
    return start_keep(items, (sys.executable, "-I", "-S", "-c", PROGRAM), {}, GENERATION), GENERATION


@pytest.fixture
def top(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    return tmp_path / "images"


@pytest.fixture
def standby(top: Path) -> Iterator[Standby]:
    found = Standby(top, places=1, used_s=lambda: 0.0)
    yield found
    assert not found.drop(0.0)
    assert list(top.iterdir()) == []


@pytest.fixture
def wanted(plan: StartPlan, tmp_path: Path) -> StartPlan:
    (tmp_path / "locks").mkdir()
    return replace(plan, lock=str(tmp_path / "locks" / plan.facts.sandbox_id))


@pytest.fixture
def kind(wanted: StartPlan, tmp_path: Path) -> Kind:
    (tmp_path / "memory").mkdir()
    write_saved(tmp_path / "memory", SAVED)
    found = kind_of(wanted, Origin(tmp_path / "memory", SAVED, -1, ((DiskFile("/base"),),)))
    assert found is not None
    return found


def stock(standby: Standby, kind: Kind, plan: StartPlan, begins: Begin = begin) -> threading.Thread:
    thread = standby.stock(kind, plan, begins)
    assert thread is not None
    return thread


def take(standby: Standby, kind: Kind) -> Waiting:
    assert select.select([standby._waiting[0].kept.sock], [], [], 20)[0]
    waiting = standby.take(kind)
    assert waiting is not None
    return waiting


def test_the_one_that_waits_becomes_the_sandboxs(standby: Standby, wanted: StartPlan, kind: Kind) -> None:
    run = Path(wanted.facts.run)
    (run / "upper.0").mkdir()
    stock(standby, kind, wanted).join()
    waiting = take(standby, kind)
    assert standby.take(kind) is None

    async def work() -> None:
        async with asyncio.timeout(20):
            await waiting.kept.launched()
            await waiting.kept.ready()
            async with control(run) as guest:
                assert await guest.ask(Op.STATS, b"there") == b"there"

    try:
        assert settle(waiting, wanted)
        assert {path.name for path in run.iterdir()} >= {"upper.0", "sock", "control", "qmp", "name"}
        asyncio.run(work())
        with open(wanted.lock, "r+b") as file, pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        waiting.kept.put_down()


def test_only_its_own_kind_is_taken(standby: Standby, wanted: StartPlan, kind: Kind) -> None:
    stock(standby, kind, wanted).join()
    other = replace(kind, cpus=3.0)
    assert standby.take(other) is None
    assert standby.take(None) is None
    stock(standby, other, wanted).join()
    assert standby.take(kind) is None, "one kind waits at a time"


def test_what_can_only_be_made_for_one(wanted: StartPlan, kind: Kind, tmp_path: Path) -> None:
    origin = Origin(tmp_path / "memory", SAVED, -1, ((DiskFile("/base"),),))
    assert kind_of(wanted, origin) == kind
    for facts in ({"detached": True}, {"timeout_s": 5.0}):
        assert kind_of(replace(wanted, facts=replace(wanted.facts, **facts)), origin) is None
    assert kind_of(wanted, replace(origin, network="host")) is None
    assert kind_of(wanted, replace(origin, directory=tmp_path / "gone")) is None
    assert kind_of(replace(wanted, facts=replace(wanted.facts, limits=Limits(cpus=9))), origin) != kind


def test_one_that_has_ended_is_not_handed_out(standby: Standby, wanted: StartPlan, kind: Kind, top: Path) -> None:
    stock(standby, kind, wanted).join()
    (waiting,) = standby._waiting
    os.kill(waiting.kept.pid, signal.SIGKILL)
    os.waitid(os.P_PID, waiting.kept.pid, os.WEXITED | os.WNOWAIT)
    assert standby.take(kind) is None
    assert list(top.iterdir()) == []


def test_it_rests_only_so_long(standby: Standby, wanted: StartPlan, kind: Kind, top: Path) -> None:
    stock(standby, kind, wanted).join()
    assert standby.drop(60.0)
    assert not standby.drop(0.0)
    assert standby.take(kind) is None
    assert list(top.iterdir()) == []


def test_who_comes_while_one_is_begun_gets_that_one(standby: Standby, wanted: StartPlan, kind: Kind) -> None:
    reached, goes_on = threading.Event(), threading.Event()

    def slowly(planned: StartPlan) -> tuple[Kept, int]:
        begun = begin(planned)
        reached.set()
        assert goes_on.wait(20)
        return begun

    found: list[Waiting | None] = []
    taking = threading.Thread(target=lambda: found.append(standby.take(kind)))
    making = stock(standby, kind, wanted, slowly)
    assert reached.wait(20)
    assert standby.comes(kind)
    assert not standby.comes(replace(kind, cpus=3.0))
    taking.start()
    while standby.comes(kind):
        time.sleep(0.001)
    assert standby.take(kind) is None, "one alone waits for it"
    assert standby.drop(60.0), "one that is begun counts"
    goes_on.set()
    taking.join()
    making.join()
    assert found[0] is not None
    put_away(found[0])


def counting(most: threading.Semaphore, begun: list[StartPlan], planned: StartPlan) -> tuple[Kept, int]:
    """Begin, one for each that the test lets through."""
    assert most.acquire(timeout=20)
    begun.append(planned)
    return begin(planned)


def test_so_many_wait_as_there_are_places(wanted: StartPlan, kind: Kind, top: Path) -> None:
    standby = Standby(top, places=3, used_s=lambda: 0.0)
    stock(standby, kind, wanted).join()
    taken = [standby.take(kind) for _ in range(4)]
    assert taken[3] is None
    places = {waiting.place for waiting in taken if waiting is not None}
    assert len(places) == 3
    for waiting in taken[:3]:
        assert waiting is not None
        put_away(waiting)
    stock(standby, kind, wanted).join()
    assert not standby.drop(0.0)
    assert list(top.iterdir()) == []


def test_each_that_is_begun_is_for_one_who_waits(wanted: StartPlan, kind: Kind, top: Path) -> None:
    standby = Standby(top, places=2, used_s=lambda: 0.0)
    may, begun, found = threading.Semaphore(0), list[StartPlan](), list[Waiting | None]()
    begins = functools.partial(counting, may, begun)
    taking = [threading.Thread(target=lambda: found.append(standby.take(kind))) for _ in range(2)]
    making = [stock(standby, kind, wanted, begins) for _ in range(2)]
    assert standby.stock(kind, wanted, begins) is None, "as many are at it as there are places"
    while standby._coming < 2:
        time.sleep(0.001)
    for thread in taking:
        assert standby.comes(kind)
        awaiting = standby._awaiting
        thread.start()
        while standby._awaiting == awaiting:
            time.sleep(0.001)
    assert not standby.comes(kind)
    assert standby.take(kind) is None, "two are for those who wait already"
    may.release(2)
    for thread in taking:
        thread.join()
    places = {waiting.place for waiting in found if waiting is not None}
    assert len(places) == 2
    for waiting in found:
        assert waiting is not None
        put_away(waiting)
    may.release(4)
    for thread in making:
        thread.join()
    assert 2 <= len(begun) <= 4
    assert not standby.drop(0.0)
    assert list(top.iterdir()) == []


def test_none_is_begun_while_all_processors_are_busy(wanted: StartPlan, kind: Kind, top: Path) -> None:
    idle = threading.Event()
    looks: list[float] = []

    def used_s() -> float:
        looks.append(time.monotonic())
        return 0.0 if idle.is_set() else looks[-1] * (os.cpu_count() or 1)

    standby = Standby(top, places=1, used_s=used_s)
    making = stock(standby, kind, wanted)
    while len(looks) < 5:
        time.sleep(0.001)
    assert not standby.comes(kind), "nobody is to wait for it"
    assert standby.take(kind) is None
    assert list(top.iterdir()) == []
    assert standby.drop(60.0), "one that is about to be begun counts"
    idle.set()
    making.join()
    waiting = standby.take(kind)
    assert waiting is not None
    put_away(waiting)
    assert not standby.drop(0.0)


def test_none_is_begun_once_all_were_let_go(wanted: StartPlan, kind: Kind, top: Path) -> None:
    standby = Standby(top, places=2, used_s=lambda: 0.0)
    may, begun = threading.Semaphore(0), list[StartPlan]()
    making = stock(standby, kind, wanted, functools.partial(counting, may, begun))
    while not standby._coming:
        time.sleep(0.001)
    left: list[bool] = []
    dropping = threading.Thread(target=lambda: left.append(standby.drop(0.0)))
    dropping.start()
    while not standby._drops:
        time.sleep(0.001)
    may.release(2)
    making.join()
    dropping.join()
    assert left == [False]
    assert len(begun) == 1
    assert list(top.iterdir()) == []


def test_one_that_cannot_be_begun_holds_nobody_up(standby: Standby, wanted: StartPlan, kind: Kind, top: Path) -> None:
    def fails(planned: StartPlan) -> tuple[Kept, int]:
        raise LaunchFailed("it cannot")

    stock(standby, kind, wanted, fails).join()
    assert not standby.comes(kind)
    assert standby.take(kind) is None
    assert list(top.iterdir()) == []


def test_a_lock_elsewhere_means_that_nothing_is_taken(
    standby: Standby, wanted: StartPlan, kind: Kind, top: Path
) -> None:
    stock(standby, kind, wanted).join()
    waiting = take(standby, kind)
    assert not settle(waiting, replace(wanted, lock="/proc/lock"))
    assert list(top.iterdir()) == []
    assert {path.name for path in Path(wanted.facts.run).iterdir()} == {"name"}


def test_one_that_fails_half_way_is_gone(standby: Standby, wanted: StartPlan, kind: Kind, top: Path) -> None:
    stock(standby, kind, wanted).join()
    waiting = take(standby, kind)
    elsewhere = replace(wanted, facts=replace(wanted.facts, run="/proc/nowhere"))
    with pytest.raises(LaunchFailed):
        settle(waiting, elsewhere)
    assert list(top.iterdir()) == []


def test_a_machine_enters_the_groups_of_its_sandbox(tmp_path: Path) -> None:
    group = tmp_path / "group"
    items = [("cgdir", str(group)), ("cgset", "memory.max\t77"), ("cgjoin", "tasks"), ("cgfreeze", "freezer.state")]
    enter_groups(items, 4242, "sb-x")
    assert (group / "memory.max").read_text() == "77"
    assert (group / "cgroup.procs").read_text() == "4242"
    with pytest.raises(LaunchFailed) as caught:
        enter_groups(items, 4242, "sb-x")
    assert str(group) in caught.value.message


def test_what_a_killed_process_left_goes(standby: Standby, wanted: StartPlan, kind: Kind, top: Path) -> None:
    for name, has_lock in (("dead", True), ("old", False), ("young", False)):
        place = top / f".standby-{name}"
        place.mkdir()
        if has_lock:
            (place / "lock").touch()
        if name == "old":
            os.utime(place, (1, time.time() - 3600))
    stock(standby, kind, wanted).join()
    left = {path.name for path in top.iterdir()}
    assert ".standby-young" in left
    assert left.isdisjoint({".standby-dead", ".standby-old"})
    (top / ".standby-young").rmdir()


def test_a_forked_child_lets_go_of_the_parents(standby: Standby, wanted: StartPlan, kind: Kind) -> None:
    stock(standby, kind, wanted).join()
    (waiting,) = standby._waiting
    again = os.dup(waiting.kept.sock.fileno())
    standby.forget()
    assert waiting.kept.sock.fileno() == -1
    assert standby.take(kind) is None
    os.close(again)  # the parent's, which ends it
    os.waitpid(waiting.kept.pid, 0)
    for name in ("sock", "control", "qmp", "lock"):
        (waiting.place / name).unlink()
    waiting.place.rmdir()
