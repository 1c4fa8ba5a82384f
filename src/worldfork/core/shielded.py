"""Work that has to come to its end, whoever waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")


async def to_its_end(work: Awaitable[_T], hasten: Callable[[], None] | None = None) -> _T:
    """Wait for work; one who is cancelled meanwhile waits all the same, and is cancelled then.

    Args:
        work: such as a call in a thread, which nothing can stop.
        hasten: makes it end soon, for one who is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if hasten is not None:
            hasten()
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # nobody is left to be told
        raise
