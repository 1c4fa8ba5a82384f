"""Checkpoints that end their sandbox: from its death to the move of its upper it looks like any dead sandbox."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.actors import Actor
from tests.victims import left_in, start_afresh, wait_clean

from worldfork import AsyncSandbox, Sandbox, SandboxStatus
from worldfork.core.errors import SandboxDied
from worldfork.lineage import place as places
from worldfork.store import faultpoints
from worldfork.store.leases import Holder


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    faultpoints.install(None)
    places.close_places()


def at_step(step: str, call: Callable[[], object]) -> None:
    """Have something happen at a named step, in the thread that passes it."""

    def hook(name: str) -> None:
        if name == step:
            call()

    faultpoints.install(hook)


def expect_whole(snapshot_id: str) -> None:
    with Sandbox.create(snapshot_id=snapshot_id, network="none") as restored:
        assert restored.read_file("/f") == b"first"


def look_around(sandbox_id: str) -> None:
    """Do what this process's watch and everybody's sweeps do, who find a dead sandbox that is not new."""
    here = places.place()
    assert not here.store.is_alive(sandbox_id)
    assert here._watch is not None
    here._watch.look()
    holder = here.store.holder(sandbox_id)
    assert here.store.is_living(holder, grace_s=0)
    assert here.store.sweep(dead=here._dispose_dead, grace_s=0).failures == []


def test_our_own_watch_and_a_sweep_come_by(own_home: Path, base: str) -> None:
    """Neither the watch of this process nor a sweep clears away what is just becoming a layer."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        sandbox_id = sandbox.sandbox_id
        looked = []

        def look() -> None:
            look_around(sandbox_id)
            looked.append(sandbox_id)

        at_step("checkpoint:stopped", look)
        snapshot = sandbox.checkpoint(stop=True)
        faultpoints.install(None)
        assert looked
        assert sandbox.status is SandboxStatus.TERMINATED
        expect_whole(snapshot.snapshot_id)
    assert wait_clean(own_home) == []


def test_another_process_takes_ours(own_home: Path, base: str) -> None:
    """The owner sees its sandbox die, and leaves what it leaves to whoever killed it for that."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        sandbox_id = sandbox.sandbox_id

        def take() -> str:
            return Sandbox.connect(sandbox_id).checkpoint(stop=True).snapshot_id

        actor = Actor(take, "checkpoint:stopped")
        actor.meet("checkpoint:stopped")
        look_around(sandbox_id)
        sandbox.terminate()
        assert (own_home / "run" / sandbox_id).is_dir()
        actor.end()
        assert actor.error == ""
        expect_whole(actor.value)
    start_afresh()
    assert wait_clean(own_home) == []


def test_whoever_takes_it_dies(own_home: Path, base: str) -> None:
    """Then it is a dead sandbox like any other, and its owner clears it away."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox_id = sandbox.sandbox_id
        actor = Actor(lambda: Sandbox.connect(sandbox_id).checkpoint(stop=True), "checkpoint:stopped")
        actor.meet("checkpoint:stopped")
        actor.kill()
        here = places.place()
        assert here._watch is not None
        here._watch.look()
        assert not (own_home / "run" / sandbox_id).exists()
    start_afresh()
    assert wait_clean(own_home) == []


@pytest.mark.parametrize("step", ["vouch:committed", "checkpoint:stopped", "checkpoint:taken"])
def test_an_end_asked_for_meanwhile(own_home: Path, base: str, step: str) -> None:
    """It waits for the snapshot, or the checkpoint says that the sandbox is gone; nothing is left either way."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        with ThreadPoolExecutor(1) as pool:
            ends: list[Future[None]] = []
            at_step(step, lambda: ends.append(pool.submit(sandbox.terminate)) if not ends else None)
            try:
                expect_whole(sandbox.checkpoint(stop=True).snapshot_id)
            except SandboxDied:
                assert step == "vouch:committed"
            faultpoints.install(None)
            ends[0].result(timeout=20)
    assert wait_clean(own_home) == []


@pytest.mark.parametrize("step", ["checkpoint:stopped", "checkpoint:taken", "publish:committed", "end:dead"])
def test_a_caller_that_is_cancelled_has_no_snapshot(own_home: Path, base: str, step: str) -> None:
    """However often it is cancelled: what nobody will ever hear of is not there."""

    async def story() -> None:
        here = places.place()
        sandbox = await AsyncSandbox.create(base=base, network="none")
        await sandbox.write_file("/f", b"first")
        before = here.store.snapshots()
        loop, met, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def stand() -> None:
            loop.call_soon_threadsafe(met.set)
            if threading.current_thread() is not threading.main_thread():
                assert go_on.wait(20)

        at_step(step, stand)
        taking = asyncio.ensure_future(sandbox.checkpoint(stop=True))
        await asyncio.wait_for(met.wait(), 20)
        for _ in range(3):
            taking.cancel()
            await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await taking
        faultpoints.install(None)
        assert here.store.snapshots() == before
        await sandbox.terminate()
        here.store.collect()

    asyncio.run(story())
    assert wait_clean(own_home) == []


@pytest.mark.parametrize("step", ["begin_layer:made", "checkpoint:taken", "publish:committed"])
def test_a_time_limit_never_costs_the_disk(own_home: Path, base: str, step: str) -> None:
    """Over before the sandbox is killed it leaves that as it was; later it waits for the snapshot."""

    async def story() -> None:
        here = places.place()
        sandbox = await AsyncSandbox.create(base=base, network="none")
        await sandbox.write_file("/f", b"first")
        before = here.store.snapshots()
        loop, go_on = asyncio.get_running_loop(), threading.Event()

        def outlast() -> None:
            if threading.current_thread() is not threading.main_thread():
                loop.call_soon_threadsafe(loop.call_later, 0.6, go_on.set)
                assert go_on.wait(20)

        at_step(step, outlast)
        if step == "begin_layer:made":
            with pytest.raises(TimeoutError):
                await sandbox.checkpoint(stop=True, timeout=0.3)
            faultpoints.install(None)
            assert here.store.snapshots() == before
            assert await sandbox.read_file("/f") == b"first"
        snapshot = await sandbox.checkpoint(stop=True, timeout=20 if step == "begin_layer:made" else 0.3)
        faultpoints.install(None)
        assert go_on.is_set()
        async with await AsyncSandbox.create(snapshot_id=snapshot.snapshot_id, network="none") as restored:
            assert await restored.read_file("/f") == b"first"

    asyncio.run(story())
    assert wait_clean(own_home) == []


def test_a_caller_that_gave_up_keeps_its_sandbox(own_home: Path, base: str) -> None:
    """What is cancelled a moment before the sandbox would be killed does not kill it."""

    async def story() -> None:
        sandbox = await AsyncSandbox.create(base=base, network="none")
        await sandbox.write_file("/f", b"first")
        taking = asyncio.ensure_future(sandbox.checkpoint(stop=True))
        at_step("checkpoint:ending", lambda: None if taking.cancelled() else taking.cancel())
        with pytest.raises(asyncio.CancelledError):
            await taking
        faultpoints.install(None)
        assert await sandbox.read_file("/f") == b"first"
        await sandbox.terminate()

    asyncio.run(story())
    assert wait_clean(own_home) == []


def test_a_sandbox_that_is_gone_is_not_vouched_for(own_home: Path, base: str) -> None:
    """Nobody who lives, no row: what a process says it takes is as true as its lock."""
    store = places.place().store
    holder = Holder("sb-aaaaaaaaaaaaaaaa")
    assert not store.is_vouched(holder.holder_id)
    store.hold([holder])
    assert not store.is_vouched(holder.holder_id)
    store.vouch(holder.holder_id, ())
    assert store.is_vouched(holder.holder_id)
    store.release([holder.holder_id])
    assert not store.is_vouched(holder.holder_id)
    assert left_in(own_home) == []


def test_time_alone_ends_nothing_that_is_vouched_for(own_home: Path) -> None:
    """No grace runs out for it, and it lists what it stands on."""
    here = places.place()
    draft = here.store.begin_layer(form=here.driver.form)
    here.store.hold([Holder("sb-aaaaaaaaaaaaaaaa")])
    here.store.vouch("sb-aaaaaaaaaaaaaaaa", (draft.layer_id,))
    found = here.store.holder("sb-aaaaaaaaaaaaaaaa")
    assert found.layers == (draft.layer_id,)
    assert here.store.is_living(found, grace_s=0)
    here.store.release([found.holder_id])
    here.store.abandon_layer(draft.layer_id)
    here.store.empty_trash()
    assert wait_clean(own_home) == []
