"""A live sandbox takes over the disk of another state, and can go back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from worldfork import AsyncSandbox
from worldfork.core.errors import NotCapturable, NotFound
from worldfork.lineage.place import place
from worldfork.lineage.snapshots import wait_durable
from worldfork.records.episode import Episode
from worldfork.rollout.promote import promote_into
from worldfork.store import faultpoints


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


@pytest.mark.behaviour("adopt-1")
def test_the_disk_of_a_fork_and_back() -> None:
    async def test() -> None:
        async with await AsyncSandbox.create(network="none", name="agent") as box:
            await box.sh("echo s0 >a; mkdir d; echo old >d/x", check=True)
            (fork,) = (await box.fork(1)).unwrap()
            async with fork:
                await fork.sh("echo won >a; rm -r d; mkdir d; echo new >d/y; chmod 700 d", check=True)
                won = await fork.checkpoint(stop=True)
            await box.sh("echo mine >a; echo mine >extra", check=True)
            asleep = await box.sh("echo $$", check=True)
            assert asleep.exit_code == 0
            before = await box.adopt(won.snapshot_id, label="before")
            seen = await box.sh("cat a; ls; ls d; stat -c %a d; echo on >b && cat b", check=True)
            assert seen.stdout.split() == ["won", "a", "d", "y", "700", "on"]
            assert (box.name, before.label) == ("agent", "before")
            after = await box.checkpoint()
            assert after.parent_id == won.snapshot_id
            again = await box.adopt(before.snapshot_id)
            seen = await box.sh("cat a extra d/x; ls", check=True)
            assert seen.stdout.split() == ["mine", "mine", "old", "a", "d", "extra"]
            for snapshot in (before, again):
                async with await AsyncSandbox.create(snapshot_id=snapshot.snapshot_id) as child:
                    text = (await child.sh("cat a", check=True)).stdout.strip()
                    assert text == ("mine" if snapshot is before else "won")

    run(test)


@pytest.mark.behaviour("adopt-2")
def test_what_the_sandbox_stands_on_may_be_deleted_and_another_process_finds_it() -> None:
    async def test() -> None:
        async with await AsyncSandbox.create(network="none") as box:
            (fork,) = (await box.fork(1)).unwrap()
            async with fork:
                await fork.sh("echo won >a", check=True)
                won = await fork.checkpoint(stop=True)
            before = await box.adopt(won.snapshot_id)
            await AsyncSandbox.delete_snapshot(won.snapshot_id)
            await AsyncSandbox.delete_snapshot(before.snapshot_id)
            seen = await (await AsyncSandbox.connect(box.sandbox_id)).sh("cat a", check=True)
            assert seen.stdout == "won\n"
            last = await box.checkpoint(stop=True)
        await AsyncSandbox.delete_snapshot(last.snapshot_id)

    run(test)


@pytest.mark.behaviour("adopt-3")
def test_processes_keep_their_disk() -> None:
    async def test() -> None:
        async with await AsyncSandbox.create(network="none") as box:
            start = await box.checkpoint()
            await box.sh("echo mine >a; sleep 1000 >/dev/null 2>&1 &", check=True)
            kept = len(await AsyncSandbox.list_all_snapshots())
            with pytest.raises(NotCapturable):
                await box.adopt(start.snapshot_id)
            with pytest.raises(NotFound):
                await box.adopt("sn-" + "0" * 20)
            assert (await box.sh("cat a", check=True)).stdout == "mine\n"
            assert len(await AsyncSandbox.list_all_snapshots()) == kept

    run(test)


@pytest.mark.behaviour("adopt-4")
def test_a_caller_that_is_cancelled_leaves_the_one_state_or_the_other() -> None:
    async def test() -> None:
        async with await AsyncSandbox.create(network="none") as box:
            await box.sh("echo one >a", check=True)
            one = await box.checkpoint()
            await box.sh("echo two >a", check=True)
            two = await box.checkpoint()
            for step in range(12):
                wanted = one if step % 2 else two
                adopting = asyncio.ensure_future(box.adopt(wanted.snapshot_id))
                for _ in range(step):
                    await asyncio.sleep(0)
                adopting.cancel()
                await asyncio.wait([adopting])
                assert (await box.sh("cat a", check=True)).stdout in ("one\n", "two\n")

    run(test)


@pytest.mark.behaviour("adopt-4")
def test_what_it_was_before_outlives_a_caller_that_is_cancelled() -> None:
    async def test() -> None:
        async with await AsyncSandbox.create(network="none") as box:
            one = await box.checkpoint()
            await box.sh("echo mine >a", check=True)
            known = {each.snapshot_id for each in await box.list_snapshots()}
            adopting = asyncio.ensure_future(box.adopt(one.snapshot_id))
            faultpoints.install(lambda name: adopting.cancel() if name == "checkpoint:rerooted" else None)
            try:
                await asyncio.wait([adopting])
            finally:
                faultpoints.install(None)
            assert adopting.cancelled()
            [before] = [each for each in await box.list_snapshots() if each.snapshot_id not in known]
            under_way = place().durability(before.snapshot_id)
            assert under_way is not None or place().store.snapshot(before.snapshot_id).state == "durable"
            if under_way is not None:
                await wait_durable(under_way)
            await box.adopt(before.snapshot_id)
            assert (await box.sh("cat a", check=True)).stdout == "mine\n"

    run(test)


@pytest.mark.behaviour("adopt-3")
def test_what_the_kernel_lets_go_of_a_moment_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = [2]  # times, in the taking and in the moving

    async def test() -> None:
        async with await AsyncSandbox.create(network="none") as box:
            (fork,) = (await box.fork(1)).unwrap()
            async with fork:
                await fork.sh("echo won >a", check=True)
                won = await fork.checkpoint(stop=True)
            await box.sh("echo mine >a", check=True)
            driver = type(place().driver)
            reroot = driver.reroot

            async def late(*arguments: Any) -> Any:
                if busy[0]:
                    busy[0] -= 1
                    raise NotCapturable("something still uses the root", what="the root", why="busy")
                return await reroot(*arguments)

            monkeypatch.setattr(driver, "reroot", late)
            before = await box.adopt(won.snapshot_id)
            assert (await box.sh("cat a", check=True)).stdout == "won\n"
            assert busy == [0]
            # That of the fork, and the one of before; none of the tries.
            assert [each.snapshot_id for each in await box.list_snapshots()][1:] == [before.snapshot_id]

    run(test)


@pytest.mark.behaviour("adopt-1")
def test_a_winner_is_promoted() -> None:
    async def test() -> None:
        async with await AsyncSandbox.create(network="none") as box:
            (fork,) = (await box.fork(1)).unwrap()
            async with fork:
                await fork.sh("echo won >a", check=True)
                won = await fork.checkpoint(stop=True)
            winner = Episode("t", "h", "p", 3, 1.0, final_snapshot_id=won.snapshot_id)
            before = await promote_into(box, winner)
            assert (await box.sh("cat a", check=True)).stdout == "won\n"
            assert before.label == "before t #3"

    run(test)
