"""The store: bytes and layers, and no sandboxes beyond the ids of those who use them."""

from __future__ import annotations

import logging

from worldfork.core.clock import Clock
from worldfork.core.errors import OutOfSpace
from worldfork.store import ballast
from worldfork.store.home import Home
from worldfork.store.layers import LayerDraft
from worldfork.store.leases import Holder
from worldfork.store.sweep import CollectReport, Sweeping, SweepReport

__all__ = ["CollectReport", "Holder", "LayerDraft", "Store", "SweepReport"]

_log = logging.getLogger("worldfork.store")


class Store(Sweeping):
    """Snapshots on disk. Thread-safe and synchronous; one for each process and home.

    Its nouns are spread over the modules beside this one: layers, leases, snapshots, durability, sweep.
    Nothing waits for the disk but `make_durable`, `set_name`, `sweep` and `collect`.
    """

    @classmethod
    def open(cls, home: Home, *, clock: Clock | None = None) -> Store:
        """Open the store of a home; make it if there is none. Drops what a crash of the machine may have torn.

        Raises:
            FormatUnsupported: a newer version wrote it.
            Corrupt: its database is none of ours, or damaged.
            OutOfSpace, StoreError: the disk failed.
        """
        try:
            store = cls(home, clock=clock)
        except OutOfSpace:
            ballast.drop(home)
            store = cls(home, clock=clock)
        try:
            lost = store.recover()
            ballast.lay_in(home)
        except BaseException:
            store.close()
            raise
        if lost:
            _log.warning("%d snapshots were not yet durable when the machine went down: %s", len(lost), ", ".join(lost))
        return store
