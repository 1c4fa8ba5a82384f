"""Time, in one place, so that tests can move it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """What the rest of the house knows of time. Seconds throughout."""

    def now_s(self) -> float:
        """Return wall time: seconds since the Unix epoch. It may jump."""
        ...

    def monotonic_s(self) -> float:
        """Return seconds since an unknown moment; it never goes back. For durations."""
        ...

    async def sleep_s(self, duration_s: float) -> None:
        """Return after `duration_s` seconds."""
        ...


class SystemClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """Return seconds since the Unix epoch."""
        return time.time()

    def monotonic_s(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    async def sleep_s(self, duration_s: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(duration_s)


class ManualClock:
    """A clock for tests: it stands still until `advance_s`. For one event loop."""

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._monotonic_s = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now_s(self) -> float:
        """Return the wall time of this clock."""
        return self._now_s

    def monotonic_s(self) -> float:
        """Return the sum of all advances."""
        return self._monotonic_s

    async def sleep_s(self, duration_s: float) -> None:
        """Return once the clock has been advanced this far."""
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._monotonic_s + duration_s, next(self._order), woken))
        await woken

    def advance_s(self, duration_s: float) -> None:
        """Move both times forward and wake whoever slept until then, in order."""
        self._now_s += duration_s
        self._monotonic_s += duration_s
        while self._sleepers and self._sleepers[0][0] <= self._monotonic_s:
            woken = heapq.heappop(self._sleepers)[2]
            if not woken.done():
                woken.set_result(None)

    def jump_s(self, offset_s: float) -> None:
        """Move the wall time alone, as an operator or NTP does. May be negative."""
        self._now_s += offset_s


def boot_id() -> str:
    """Return the kernel's id of this boot: 36 characters, the same until the machine restarts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
