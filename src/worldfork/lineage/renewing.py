"""Keeping sandboxes that are still to come alive from being taken for dead."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Collection, Sequence
from typing import TypeVar

from worldfork.core.errors import WorldforkError
from worldfork.lineage.place import Place
from worldfork.records.sandbox import SandboxFacts
from worldfork.store.leases import GRACE_S

_T = TypeVar("_T")


async def renew(place: Place, many: Sequence[SandboxFacts], taken: Collection[int] = ()) -> None:
    """Let sandboxes that wait count as new again, until this is cancelled.

    Args:
        place: where.
        many: the sandboxes.
        taken: indexes of those that wait no more; grows meanwhile.
    """
    while True:
        await place.clock.sleep_s(GRACE_S / 4)
        waiting = [facts.sandbox_id for index, facts in enumerate(many) if index not in taken]
        with contextlib.suppress(WorldforkError):
            await place.work(lambda waiting=waiting: place.store.renew_holders(waiting))  # type: ignore[misc]  # the loop's


async def renewed(place: Place, facts: SandboxFacts, starting: Awaitable[_T]) -> _T:
    """Wait for a start that may take longer than a new sandbox has, as one that boots a machine first."""
    renewing = asyncio.ensure_future(renew(place, [facts]))
    try:
        return await starting
    finally:
        renewing.cancel()
