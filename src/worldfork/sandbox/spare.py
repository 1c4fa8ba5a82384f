"""One start begun beforehand, so that the next fork finds its namespaces made."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable

from worldfork.sandbox.driver import Begun


class Spare:
    """At most one begun start that nobody has asked for yet; safe for many threads.

    Args:
        begin: begins a start.
        put_down: takes one back and reaps it. Blocking.
    """

    def __init__(self, begin: Callable[[], Begun], put_down: Callable[[Begun], None]) -> None:
        self._begin = begin
        self._put_down = put_down
        self._kept: Begun | None = None
        self._since_s = 0.0
        self._lock = threading.Lock()

    def stock(self) -> None:
        """Begin one, if there is none.

        Raises:
            LaunchFailed: the host is at a limit.
        """
        with self._lock:
            if self._kept is None:
                self._kept = self._begin()
                self._since_s = time.monotonic()

    def take(self) -> Begun | None:
        """Hand it out, if there is one and it has not failed meanwhile."""
        with self._lock:
            begun, self._kept = self._kept, None
        if begun is None:
            return None
        waiter = select.poll()
        waiter.register(begun.sock, select.POLLIN)
        if not waiter.poll(0):
            return begun
        self._put_down(begun)  # it has something to say before it has its plan: it failed
        return None

    def drop(self, unused_s: float) -> bool:
        """Take it back if it was begun `unused_s` ago or earlier; return whether it remains. Blocking."""
        with self._lock:
            if self._kept is None or time.monotonic() - self._since_s < unused_s:
                return self._kept is not None
            begun, self._kept = self._kept, None
        self._put_down(begun)
        return False

    def forget(self) -> None:
        """In a forked child: close our copy of what is the parent's."""
        self._lock = threading.Lock()
        if self._kept is not None:
            self._kept.sock.close()
            self._kept = None
