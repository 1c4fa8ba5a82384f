from __future__ import annotations

import asyncio

import pytest

from worldfork.core.shielded import to_its_end
from worldfork.rollout.bounds import TurnOver, bounded


def test_what_was_begun_ends_however_often_its_caller_is_cancelled() -> None:
    ended: list[str] = []

    async def work() -> str:
        await asyncio.sleep(0.05)
        ended.append("whole")
        return "done"

    async def cancel_twice() -> None:
        waiting = asyncio.ensure_future(to_its_end(work()))
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == ["whole"]
        assert await to_its_end(work()) == "done"

    asyncio.run(cancel_twice())


def test_what_it_raises_passes() -> None:
    async def fail() -> None:
        raise KeyError("defect")

    with pytest.raises(KeyError):
        asyncio.run(to_its_end(fail()))


def test_a_turn_has_an_end() -> None:
    async def quick() -> int:
        return 5

    async def slow() -> None:
        await asyncio.sleep(60)

    assert asyncio.run(bounded(quick(), 5)) == 5
    with pytest.raises(TurnOver):
        asyncio.run(bounded(slow(), 0.01))


def test_a_turn_that_is_cancelled_is_over_before_that_passes() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append("whole")

    async def cancel() -> None:
        turn = asyncio.ensure_future(bounded(slow(), 60))
        await asyncio.sleep(0.01)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert ended == ["whole"]

    asyncio.run(cancel())


def test_a_cancellation_in_the_moment_of_its_end_is_not_lost() -> None:
    async def run() -> None:
        waiting: list[asyncio.Task[None]] = []

        async def work() -> None:
            await asyncio.sleep(0)
            waiting[0].cancel()

        waiting.append(asyncio.create_task(to_its_end(work())))
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]

    asyncio.run(run())


def test_work_that_cancels_itself_has_no_result() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(to_its_end(work()))
