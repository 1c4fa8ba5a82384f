"""Clearing away what a rollout leaves, beside what comes next where it takes long."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable

TRIES = 5
PAUSE_S = 0.25
"""Before the second try; doubled before each later one."""
FINISH_S = 60.0
"""How long the end of a run waits for what is still being cleared away."""

_log = logging.getLogger("worldfork")
_of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Clearing] = weakref.WeakKeyDictionary()


class Clearing:
    """What clears away for the rollouts of one run. For one event loop."""

    def __init__(self) -> None:
        self.late = 0
        """How often it took longer than it may, or had to be tried again."""
        self._under_way: set[asyncio.Task[None]] = set()

    async def do(self, work: Callable[[], Awaitable[object]], budget_s: float, what: str) -> None:
        """Clear something away; what takes longer, or fails, is done in the background and waited for by `finish`.

        Args:
            work: does it; may be called again after it failed.
            budget_s: how long to wait for it here.
            what: whose leavings these are, for the log.
        """
        first = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._again(work, what, first))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        done, _ = await asyncio.wait({task, first}, timeout=budget_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            self.late += 1
            _log.warning("clearing away %s takes more than %g s and goes on beside the rest", what, budget_s)

    async def finish(self, limit_s: float | None = None) -> int:
        """Wait for what is still being cleared away; return how much of it is not done by then."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=FINISH_S if limit_s is None else limit_s)
        if self._under_way:
            _log.warning("%d rollouts could not be cleared away; `worldfork sweep` does", len(self._under_way))
        return len(self._under_way)

    async def _again(self, work: Callable[[], Awaitable[object]], what: str, first: asyncio.Future[None]) -> None:
        for left in reversed(range(TRIES)):
            try:
                await work()
                return
            except Exception as error:
                if not first.done():
                    # Nobody waits for a second try.
                    self.late += 1
                    first.set_result(None)
                if not left:
                    _log.warning("%s could not be cleared away; `worldfork sweep` does: %s", what, error)
                    return
            await asyncio.sleep(PAUSE_S * 2.0 ** (TRIES - 1 - left))


def clearing_of_loop() -> Clearing:
    """Return what clears away for open rollouts of this event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _of_loops:
        _of_loops[loop] = Clearing()
    return _of_loops[loop]
