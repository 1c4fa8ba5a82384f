from __future__ import annotations

import asyncio

from worldfork.core.clock import ManualClock, SystemClock, boot_id


def test_a_manual_clock_wakes_sleepers_in_order() -> None:
    async def story() -> list[str]:
        clock = ManualClock()
        woken: list[str] = []

        async def sleeper(name: str, duration_s: float) -> None:
            await clock.sleep_s(duration_s)
            woken.append(name)

        async with asyncio.TaskGroup() as group:
            for name, duration_s in (("late", 10.0), ("early", 1.0), ("now", 0.0)):
                group.create_task(sleeper(name, duration_s))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            clock.advance_s(1.0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert woken == ["now", "early"]
            clock.advance_s(9.0)
        return woken

    assert asyncio.run(story()) == ["now", "early", "late"]


def test_a_cancelled_sleeper_does_not_disturb_the_others() -> None:
    async def story() -> None:
        clock = ManualClock()
        lost = asyncio.ensure_future(clock.sleep_s(1.0))
        kept = asyncio.ensure_future(clock.sleep_s(1.0))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.sleep(0)
        clock.advance_s(1.0)
        await kept
        assert lost.cancelled()

    asyncio.run(story())


def test_wall_time_jumps_alone() -> None:
    clock = ManualClock(now_s=100.0)
    clock.advance_s(5.0)
    clock.jump_s(-50.0)
    assert (clock.now_s(), clock.monotonic_s()) == (55.0, 5.0)


def test_the_system_clock_runs() -> None:
    clock = SystemClock()
    first = clock.monotonic_s()
    asyncio.run(clock.sleep_s(0))
    assert clock.monotonic_s() >= first
    assert clock.now_s() > 1_600_000_000


def test_the_boot_id_is_stable() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36
