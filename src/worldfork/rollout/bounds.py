"""Waiting that has an end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from worldfork.core.shielded import to_its_end

T = TypeVar("T")

SETTLE_S = 5.0
"""How long a policy whose time is over may take to let go. Its sandbox is ended then, whatever it does."""
_STRAYS: set[asyncio.Task[Any]] = set()
"""Policies that did not let go; kept so that they are not collected in the middle."""


class TurnOver(Exception):
    """The time of a policy's turn is over."""


async def bounded(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Await a policy's work for so long; one that does not let go is left behind.

    Raises:
        TurnOver: its time is over.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=limit_s)
    except asyncio.CancelledError:
        await _settle(task)
        raise
    if not done:
        await _settle(task)
        raise TurnOver
    if task.cancelled():
        # A policy that cancelled itself broke; what cancels a rollout comes from outside.
        raise RuntimeError("the policy cancelled its own turn")
    return task.result()


async def _settle(task: asyncio.Task[Any]) -> None:
    task.cancel()
    _, left = await to_its_end(asyncio.wait({task}, timeout=SETTLE_S))
    if left:
        _STRAYS.add(task)
        task.add_done_callback(_STRAYS.discard)
    task.add_done_callback(_look)


def _look(task: asyncio.Task[Any]) -> None:
    """Retrieve what a policy ended with after its turn was over; nobody else asks."""
    if not task.cancelled():
        task.exception()
