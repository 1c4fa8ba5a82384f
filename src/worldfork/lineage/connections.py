"""The connections of one handle to the init of its sandbox: one for each event loop, and no loop can use another's."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator

from worldfork.sandbox.connection import Connection


class Connections:
    """What a handle is connected by. Each is closed in the event loop that it belongs to."""

    def __init__(self) -> None:
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Connection] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._by_loop.values()))

    def mine(self) -> Connection | None:
        """Return that of the running event loop."""
        return self._by_loop.get(asyncio.get_running_loop())

    def keep(self, connection: Connection) -> Connection:
        """Let one be that of the running event loop, and return it."""
        self._by_loop[asyncio.get_running_loop()] = connection
        return connection

    def drop_ended_loops(self) -> None:
        """Close those of event loops that are closed; nobody else will."""
        for loop, connection in list(self._by_loop.items()):
            if loop.is_closed():
                del self._by_loop[loop]
                connection.abandon()

    def close(self) -> None:
        """Close all of them; those of other event loops a moment later."""
        for loop, connection in list(self._by_loop.items()):
            if loop.is_closed():
                connection.abandon()
            elif loop is _running_loop():
                connection.close()
            else:
                loop.call_soon_threadsafe(connection.close)
        self._by_loop.clear()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
