"""What uploads and downloads share: the report, and doing a few things at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

PIECE_BYTES: Final = 1024 * 1024
"""What one visit to a thread reads from the host's disk or writes to it."""
_AT_ONCE: Final = 8
"""Files under way at the same time in one transfer."""

Job: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class TransferReport:
    """What a transfer copied; the top directory itself is not counted."""

    files: int = 0
    directories: int = 0
    links: int = 0
    size_bytes: int = 0
    skipped: tuple[str, ...] = ()
    """Devices, sockets and FIFOs, which are not copied; relative paths."""


async def work(jobs: list[Job]) -> None:
    """Do all jobs, and those they add to the list meanwhile, the last added first.

    The first failure cancels the others, waits for them and passes on.
    """
    active: set[asyncio.Task[None]] = set()
    try:
        while jobs or active:
            while jobs and len(active) < _AT_ONCE:
                active.add(asyncio.create_task(jobs.pop()()))
            done, active = await asyncio.wait(active, return_when=asyncio.FIRST_COMPLETED)
            failures = [failure for task in done if (failure := task.exception())]
            if failures:
                raise failures[0]
    finally:
        for task in active:
            task.cancel()
        await asyncio.gather(*active, return_exceptions=True)
