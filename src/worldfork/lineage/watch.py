"""Watching live sandboxes: the disk they take, the reserve that the host keeps free, and those that ended themselves.

File systems that limit a directory are rare, so the difference of each sandbox is measured from time to time. What
one file may take is limited by the kernel at once (`Live.rlimits`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from worldfork.core import mapped
from worldfork.core.errors import OutOfSpace, SandboxError, WorldforkError
from worldfork.lineage.live import Live
from worldfork.lineage.measuring import DEEPEST, IMMEASURABLE, MOST, files_bytes, tree_bytes, uppers_bytes
from worldfork.sandbox.pressure import HostKills

__all__ = ["DEEPEST", "IMMEASURABLE", "Watch", "tree_bytes"]

_INTERVAL_S = 0.5
_REST_FACTOR = 20
"""After a measurement the sandbox is left alone for this many times as long as the measurement took."""
_WRITER_SHARE = 64
"""A sandbox counts as a writer to stop when it takes more than this fraction of the reserve."""
_MIB = 1 << 20
_log = logging.getLogger("worldfork")


@dataclass
class _Measured:
    size_bytes: int
    due_s: float
    """When to look again, on the monotonic clock."""


class Watch:
    """One thread for all sandboxes that this process owns; it runs while there are any."""

    def __init__(
        self,
        directory: str,
        reserve_bytes: int,
        living: Callable[[], Iterable[Live]],
        rest: Callable[[], bool],
        kills: HostKills,
    ) -> None:
        self._directory = directory
        self._reserve_bytes = reserve_bytes
        self._living = living
        self._rest = rest
        """Lets go of what is kept for the next sandbox once nothing happens; says whether there is more."""
        self._kills = kills
        self._measured: dict[str, _Measured] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch; does nothing when it is watching already."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._kills.restart()
                self._thread = threading.Thread(target=self._watch, name="worldfork-watch", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Stop watching. Blocking, for as long as one measurement takes."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            with self._lock:
                if not list(self._living()) and not self._rest():
                    self._thread = None
                    return
            try:
                self.look()
            except OSError as error:
                _log.warning("sandboxes could not be watched: %s", error)

    def look(self) -> None:
        """Clear away who died, measure what is due, and end who takes too much."""
        living = []
        for live in self._living():
            if live.alive():
                living.append(live)
            else:
                live.end_now()
        names = {live.sandbox_id for live in living}
        self._measured = {name: seen for name, seen in self._measured.items() if name in names}
        for live in living:
            limit_mb = live.facts.limits.disk_mb
            if not live.place.disk_on_host(live.facts):
                continue  # its disk has just that size
            if limit_mb is not None and (size_bytes := self._size_of(live)) > limit_mb * _MIB:
                live.condemn(_own_limit(live.sandbox_id, limit_mb, size_bytes))
        status = os.statvfs(self._directory)
        free_bytes = status.f_bavail * status.f_frsize
        if free_bytes < self._reserve_bytes:
            self._stop_largest(living, free_bytes)
        # At the end, so that a death seen above is held against what was before.
        self._kills.look()

    def _stop_largest(self, living: list[Live], free_bytes: int) -> None:
        sizes = {live.sandbox_id: self._size_of(live) for live in living}
        largest = max(living, key=lambda live: sizes[live.sandbox_id], default=None)
        if largest is not None and sizes[largest.sandbox_id] > self._reserve_bytes // _WRITER_SHARE:
            largest.condemn(_host_reserve(largest.sandbox_id, free_bytes, self._reserve_bytes))

    def _size_of(self, live: Live) -> int:
        seen = self._measured.get(live.sandbox_id)
        now_s = time.monotonic()
        if seen is None or now_s >= seen.due_s:
            size_bytes = _measured_bytes(live)
            took_s = time.monotonic() - now_s
            seen = _Measured(size_bytes, time.monotonic() + took_s * _REST_FACTOR)
            self._measured[live.sandbox_id] = seen
        return seen.size_bytes


def _measured_bytes(live: Live) -> int:
    if not live.place.disk_on_host(live.facts):
        return files_bytes(live.facts.run)
    if live.facts.ids:
        with contextlib.suppress(WorldforkError):
            return mapped.run(uppers_bytes, live.facts.run)
    return uppers_bytes(live.facts.run)


def _own_limit(sandbox_id: str, limit_mb: int, size_bytes: int) -> Callable[[], SandboxError]:
    deep = f", or could not be measured: it nests directories deeper than {DEEPEST}, or has more than {MOST:,} entries"
    return lambda: OutOfSpace(
        f"sandbox {sandbox_id} was ended: it took more than its {limit_mb} MiB of disk"
        f"{deep if size_bytes == IMMEASURABLE else ''}",
        remedy="give it a larger disk_mb",
        scope="sandbox",
        sandbox_id=sandbox_id,
    )


def _host_reserve(sandbox_id: str, free_bytes: int, reserve_bytes: int) -> Callable[[], SandboxError]:
    return lambda: OutOfSpace(
        f"sandbox {sandbox_id} was ended: only {free_bytes >> 20} MiB of the host's disk were free, less than the "
        f"reserve of {reserve_bytes >> 20} MiB, and it had written the most",
        remedy="free disk space, or lower WORLDFORK_RESERVE_BYTES",
        scope="host",
        sandbox_id=sandbox_id,
    )
