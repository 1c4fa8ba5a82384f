"""Starts that take longer than a new sandbox may: whoever clears away the dead comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.victims import start_afresh, wait_clean

from worldfork import AsyncSandbox, Sandbox
from worldfork.core.clock import SystemClock
from worldfork.core.errors import LaunchFailed
from worldfork.lineage import place as places
from worldfork.lineage.fork import fork_snapshot
from worldfork.lineage.live import Live
from worldfork.lineage.starting import StartOptions
from worldfork.sandbox.driver import Begun, Started, StartPlan
from worldfork.store import faultpoints
from worldfork.store.leases import GRACE_S


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    faultpoints.install(None)
    places.close_places()


class MovedClock(SystemClock):
    """The machine's clock, moved on; whoever sleeps on it waits for that."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.moved = asyncio.Event()

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s

    async def sleep_s(self, duration_s: float) -> None:
        await self.moved.wait()
        self.moved.clear()


@pytest.mark.parametrize("what", ["row", "lock"])
def test_one_that_was_taken_for_dead_is_no_sandbox(
    own_home: Path, base: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its lease went, or the name of the file that its PID 1 locked: it is an error, and nothing runs on."""
    with Sandbox.create(base=base, network="none") as source:
        snapshot = source.checkpoint()

    async def story() -> None:
        here = places.place()
        clock = MovedClock()
        monkeypatch.setattr(here, "clock", clock)
        start, pids = here.driver.start, []

        async def start_late(plan: StartPlan, begun: Begun | None = None) -> Started:
            started = await start(plan, begun)
            pids.append(started.pid)
            clock.ahead_s += GRACE_S
            if what == "row":
                here.store.release([plan.facts.sandbox_id])
            else:
                here.store.lock_path(plan.facts.sandbox_id).unlink()
            return started

        with monkeypatch.context() as patch:
            patch.setattr(here.driver, "start", start_late)
            with pytest.raises(LaunchFailed, match="cleared away") as caught:
                await AsyncSandbox.create(snapshot_id=snapshot.snapshot_id)
            assert caught.value.remedy
        assert not Path(f"/proc/{pids[0]}").exists()

    asyncio.run(story())
    assert Sandbox.list() == []
    start_afresh()
    assert wait_clean(own_home) == []


def test_a_slow_start_that_nobody_cleared_away_is_one(
    own_home: Path, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Sandbox.create(base=base, network="none") as source:
        snapshot = source.checkpoint()

    async def story() -> None:
        here = places.place()
        clock = MovedClock()
        monkeypatch.setattr(here, "clock", clock)
        monkeypatch.setattr(clock, "ahead_s", 0.0)
        faultpoints.install(lambda name: setattr(clock, "ahead_s", GRACE_S) if name == "start:made" else None)
        async with await AsyncSandbox.create(snapshot_id=snapshot.snapshot_id) as sandbox:
            assert (await sandbox.run("true")).ok
        faultpoints.install(None)

    asyncio.run(story())
    assert wait_clean(own_home) == []


def test_those_that_wait_for_their_turn_stay_new(own_home: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many children the last begin long after all were announced."""
    with Sandbox.create(base=base, network="none") as source:
        snapshot = source.checkpoint()

    async def story() -> None:
        here = places.place()
        clock = MovedClock()
        monkeypatch.setattr(here, "clock", clock)

        def ages() -> dict[str, float]:
            return {holder.holder_id: holder.renewed_s for holder in here.store.holders()}

        async def wait_for_it(index: int, child: object) -> None:
            if index:
                return
            assert isinstance(child, Live)
            before = ages()
            assert len(before) == 4
            clock.moved.set()
            waiting = before.keys() - {child.sandbox_id}
            async with asyncio.timeout(20):
                while any(ages()[sandbox_id] == before[sandbox_id] for sandbox_id in waiting):
                    await asyncio.sleep(0.005)
            assert ages()[child.sandbox_id] == before[child.sandbox_id]

        children = await fork_snapshot(
            here, snapshot.snapshot_id, 4, StartOptions(), max_concurrency=1, on_child=wait_for_it
        )
        for one in children:
            assert isinstance(one, Live)
            await one.end()

    asyncio.run(story())
    assert wait_clean(own_home) == []
