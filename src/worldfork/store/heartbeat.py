"""Saying now and then that this process goes on: who stands still for too long loses what it was writing or reading.

A record lock says that an owner is alive, not that it does anything. One that was stopped, or hangs, would keep half
a layer for ever. The clock is the machine's monotonic one: the same for all its processes, deaf to whoever sets the
time, and not running while the machine sleeps.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from worldfork.core.errors import WorldforkError

_log = logging.getLogger("worldfork.store")


class Heartbeat:
    """A thread that renews leases while there are any. Started by the first, gone a while after the last."""

    def __init__(self, renew: Callable[[], int], *, every_s: float) -> None:
        """Take what to call.

        Args:
            renew: renews all leases of this process and returns how many there are.
            every_s: seconds between two calls.
        """
        self._renew = renew
        self._every_s = every_s
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._asked = 0

    def start(self) -> None:
        """See to it that the thread runs, and goes on to. Cheap where it does."""
        with self._mutex:
            self._asked += 1
            found: threading.Thread | None = self._thread
            if found is None and not self._over.is_set():
                thread = threading.Thread(target=self._run, name="worldfork-heartbeat", daemon=True)
                self._thread = thread
                try:
                    thread.start()
                except RuntimeError:
                    self._thread = None  # the interpreter is shutting down; what is left takes less than a lease

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            asked = self._asked
            try:
                idle = self._renew() == 0
            except WorldforkError as error:
                _log.warning("leases could not be renewed: %s", error)
                continue
            with self._mutex:
                # Whoever took a lease since the look has counted on this thread.
                if idle and asked == self._asked:
                    self._thread = None
                    return

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._over.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
