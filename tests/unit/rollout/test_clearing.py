from __future__ import annotations

import asyncio

import pytest

from worldfork.core.errors import SandboxError
from worldfork.rollout import clearing
from worldfork.rollout.clearing import Clearing


def test_what_is_done_in_time_is_not_late() -> None:
    async def quick() -> None:
        done.append(1)

    async def main() -> tuple[int, int]:
        found = Clearing()
        await found.do(quick, 1.0, "sb-a")
        assert done == [1]
        return found.late, await found.finish()

    done: list[int] = []
    assert asyncio.run(main()) == (0, 0)


def test_what_takes_longer_goes_on_and_is_waited_for() -> None:
    async def main() -> None:
        found, gate, done = Clearing(), asyncio.Event(), list[int]()

        async def slow() -> None:
            await gate.wait()
            done.append(1)

        await found.do(slow, 0.01, "sb-a")
        assert (found.late, done) == (1, [])
        assert await found.finish(0.01) == 1
        gate.set()
        assert await found.finish() == 0
        assert done == [1]

    asyncio.run(main())


def test_what_fails_is_tried_again_beside_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(clearing, "PAUSE_S", 0.0)

    async def main(failures: int) -> tuple[int, int]:
        found, count = Clearing(), 0

        async def fail() -> None:
            nonlocal count
            count += 1
            if count <= failures:
                raise SandboxError("held by a device")

        await found.do(fail, 10.0, "sb-a")
        assert await found.finish() == 0
        return found.late, count

    assert asyncio.run(main(2)) == (1, 3)
    assert "could not be cleared away" not in caplog.text
    assert asyncio.run(main(100)) == (1, clearing.TRIES)
    assert "sb-a could not be cleared away" in caplog.text


def test_a_caller_that_is_cancelled_leaves_the_work_under_way() -> None:
    async def main() -> None:
        found, gate, done = Clearing(), asyncio.Event(), list[int]()

        async def slow() -> None:
            await gate.wait()
            done.append(1)

        asking = asyncio.ensure_future(found.do(slow, 10.0, "sb-a"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        gate.set()
        assert await found.finish() == 0
        assert done == [1]

    asyncio.run(main())
