"""What keeps a store small and fast, done when nobody waits: seal, share, squash, keep the quota, collect.

As a program (`python -m worldfork.keeping.upkeep`) it works on the home of the settings, one process of a home at a
time, and ends when there is nothing left to do or its standard input does. It may be killed at any instant.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from dataclasses import dataclass, field

from worldfork.core.errors import Locked, WorldforkError
from worldfork.core.settings import Settings, load_settings
from worldfork.keeping.quota import enforce_quota
from worldfork.keeping.sealing import seal_all
from worldfork.keeping.sharing import share_equal, share_files
from worldfork.keeping.squash import squash_deep
from worldfork.store.home import open_home
from worldfork.store.store import Store

_NICE = 10
_log = logging.getLogger("worldfork.store")


@dataclass
class UpkeepReport:
    """What was done."""

    sealed: list[str] = field(default_factory=list)
    """Layers whose content was read for the first time."""
    shared: int = 0
    """How often a snapshot was put onto the older of two equal layers."""
    shared_bytes: int = 0
    """Of large files in different layers that share their disk space now."""
    merged: list[str] = field(default_factory=list)
    """Layers that stand for many, each."""
    dropped: list[str] = field(default_factory=list)
    """Throw-away snapshots that went for the quota."""
    collected: list[str] = field(default_factory=list)
    """Layers that nothing used any more."""
    failures: list[tuple[str, str]] = field(default_factory=list)
    """What could not be done, and why; the next upkeep tries again."""


def keep_up(store: Store, settings: Settings, *, wait_s: float | None = None) -> UpkeepReport:
    """Do all of it once; one failure never stops the rest. Blocking, for seconds or minutes.

    Args:
        store: of which home.
        settings: for the quota.
        wait_s: how long to wait for another process that is at it, in seconds; the time to live of a lease by default.
    Raises:
        Locked: that was not enough.
        OutOfSpace, StoreError: it could not begin.
    """
    report = UpkeepReport()
    with store.single_flight("upkeep", wait_s=wait_s):
        steps = (_lost, _seal, _share, _squash, _quota, _collect)
        for step in steps:
            try:
                step(store, settings, report)
            except WorldforkError as error:
                report.failures.append((step.__name__.strip("_"), str(error)))
    return report


def _seal(store: Store, _: Settings, report: UpkeepReport) -> None:
    done = seal_all(store)
    report.sealed += done.sealed
    report.failures += done.failures


def _share(store: Store, _: Settings, report: UpkeepReport) -> None:
    done = share_equal(store)
    report.shared += done.snapshots
    report.failures += done.failures
    files = share_files(store, report.sealed)
    report.shared_bytes += files.shared_bytes
    report.failures += files.failures


def _squash(store: Store, _: Settings, report: UpkeepReport) -> None:
    done = squash_deep(store)
    report.merged += done.merged
    report.failures += done.failures


def _quota(store: Store, settings: Settings, report: UpkeepReport) -> None:
    if settings.quota_bytes:
        done = enforce_quota(store, settings.quota_bytes)
        report.dropped += done.deleted
        report.collected += done.layers
        report.failures += done.failures


def _lost(store: Store, _: Settings, report: UpkeepReport) -> None:
    report.failures += store.sweep_lost().failures


def _collect(store: Store, _: Settings, report: UpkeepReport) -> None:
    done = store.collect()
    report.collected += done.layers
    report.failures += done.failures


def _end_with_input() -> None:
    """Whoever started this holds the other end, and does nothing with it but die."""
    while os.read(0, 1 << 12):
        pass
    os._exit(0)


def main() -> int:
    """Run as a program; returns its exit code: `os.EX_TEMPFAIL` where another process is at it."""
    threading.Thread(target=_end_with_input, name="worldfork-end", daemon=True).start()
    os.nice(_NICE)
    settings = load_settings()
    store = Store.open(open_home(settings), ttl_s=settings.lease_ttl_s)
    try:
        report = keep_up(store, settings, wait_s=0)
    except Locked:
        return os.EX_TEMPFAIL
    finally:
        store.close()
    for what, why in report.failures:
        _log.warning("%s: %s", what, why)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
