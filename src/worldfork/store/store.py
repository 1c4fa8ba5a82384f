"""The store: bytes and layers, and no sandboxes beyond the ids of those who use them."""

from __future__ import annotations

import logging

from worldfork.core.clock import Clock
from worldfork.core.errors import OutOfSpace
from worldfork.core.settings import DEFAULT_LEASE_TTL_S
from worldfork.store import ballast
from worldfork.store.collect import Collecting, CollectReport
from worldfork.store.home import Home
from worldfork.store.layers import LayerDraft
from worldfork.store.leases import Holder
from worldfork.store.readings import Reading
from worldfork.store.sweep import SweepReport

__all__ = ["CollectReport", "Holder", "LayerDraft", "Reading", "Store", "SweepReport"]

_log = logging.getLogger("worldfork.store")


class Store(Collecting):
    """Snapshots on disk. Thread-safe and synchronous; one for each process and home.

    Its nouns are spread over the modules beside this one: layers, leases, readings, snapshots, durability, sweep and
    collect. What works on a store from outside (seal, squash, prune, check, export) are functions of their own.
    Nothing waits for the disk but `make_durable` and its kin, `rewrite`, `set_name`, `sweep` and `collect`.
    """

    @classmethod
    def open(cls, home: Home, *, clock: Clock | None = None, ttl_s: float = DEFAULT_LEASE_TTL_S) -> Store:
        """Open the store of a home; make it if there is none. Drops what a crash of the machine may have torn.

        Args:
            home: where it lies.
            clock: another one than the machine's, for tests.
            ttl_s: how long an owner that is alive may stand still and keep its drafts and readings.
        Raises:
            FormatUnsupported: a newer version wrote it.
            Corrupt: its database is none of ours, or damaged.
            OutOfSpace, StoreError: the disk failed.
        """
        try:
            store = cls(home, clock=clock, ttl_s=ttl_s)
        except OutOfSpace:
            ballast.drop(home)
            store = cls(home, clock=clock, ttl_s=ttl_s)
        try:
            lost = store.recover()
            ballast.lay_in(home)
        except BaseException:
            store.close()
            raise
        if lost:
            _log.warning("%d snapshots were not yet durable when the machine went down: %s", len(lost), ", ".join(lost))
        return store
