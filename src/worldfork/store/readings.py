"""Readings: leases of this process on layers that it looks at, copies or stands new layers on for a while."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from worldfork.core.errors import StoreError, WorldforkError
from worldfork.core.ids import new_id
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.layers import Layers, publish_layers, require_layers
from worldfork.store.leases import READING, Leases
from worldfork.store.owner import frees_space


@dataclass
class Reading:
    """A lease on layers. It lasts until its block is left, or this process stands still for longer than `ttl_s`."""

    store: Readings
    reading_id: str
    snapshot_id: str | None
    layers: tuple[str, ...]
    """What it was taken on, top first. What was claimed later is held too and not listed here."""

    def claim(self, layer_ids: Iterable[str]) -> set[str]:
        """Tell which of these layers exist, and hold them from the same moment on.

        One that was about to be collected is kept: it is ready then, and to be made durable again.

        Raises:
            StoreError: the lease was lost, or the metadata failed.
        """
        wanted = list(dict.fromkeys(layer_ids))
        store = self.store
        with store.database.write() as db:
            found = {layer_id for layer_id in wanted if _keep(store, db, layer_id)}
            _hold(db, self, sorted(found))
        fault("claim:committed")
        return found

    def check(self) -> None:
        """Make sure that the lease holds still.

        Raises:
            StoreError: it was lost, so that what was read since may have holes.
        """
        with self.store.database.read() as db:
            if not db.execute("SELECT 1 FROM holders WHERE holder_id = ?", (self.reading_id,)).fetchone():
                raise self.lost()

    def lost(self) -> StoreError:
        """Return the error for a lease that ran out."""
        return StoreError(
            f"the lease of this process ran out, because it stood still for more than {self.store.ttl_s:g} s",
            remedy="do it again",
            reading_id=self.reading_id,
        )


class Readings(Layers, Leases):
    """What a store offers to those who read and merge its layers."""

    @contextmanager
    def reading(self, *, snapshot_id: str | None = None, layers: Sequence[str] = (), purpose: str) -> Iterator[Reading]:
        """Keep layers from being collected for the length of the block.

        Args:
            snapshot_id: a snapshot, whose layers are kept although it may be deleted meanwhile.
            layers: or these.
            purpose: one word on what for; shown to whoever asks who holds what.
        Raises:
            NotFound: the snapshot or a layer does not exist.
            StoreError: on leaving, the lease had been lost: whatever was made of what was read is not to be trusted.
        """
        lease = self._begin_reading(snapshot_id, tuple(layers), purpose)
        fault("reading:begun")
        try:
            yield lease
        except BaseException:
            with suppress(WorldforkError):
                self._end_reading(lease)
            raise
        if not self._end_reading(lease):
            raise lease.lost()

    def _begin_reading(self, snapshot_id: str | None, layers: tuple[str, ...], purpose: str) -> Reading:
        reading_id, owner_id = new_id("rd"), self.owner_id
        with self.database.write() as db:
            if snapshot_id is not None:
                layers = tuple(self._layers_of(db, snapshot_id))
            require_layers(db, layers, owner_id)
            db.execute(
                "INSERT INTO holders (holder_id, kind, owner_id, layers, facts, created_s, renewed_s)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    reading_id,
                    READING,
                    owner_id,
                    json.dumps(layers),
                    json.dumps({"purpose": purpose, "snapshot_id": snapshot_id}),
                    self._clock.now_s(),
                    self._clock.monotonic_s(),
                ),
            )
        self._go_on_with(reading_id)
        return Reading(self, reading_id, snapshot_id, layers)

    @frees_space
    def _end_reading(self, lease: Reading) -> bool:
        self._leases.discard(lease.reading_id)
        with self.database.write() as db:
            held = db.execute("DELETE FROM holders WHERE holder_id = ?", (lease.reading_id,)).rowcount
        return held == 1

    def publish_merge(self, lease: Reading, layer_id: str, *, covers: Sequence[str], level: int) -> None:
        """Turn a draft into a merged layer, which no snapshot uses yet; the lease holds it.

        Args:
            lease: on the layers that it was made of.
            layer_id: the draft.
            covers: the layers that it stands for, top first.
            level: how many times its content has been merged.
        Raises:
            NotFound: the draft was lost; StoreError: the lease was.
        """
        with self.database.write() as db:
            publish_layers(db, [layer_id], self.owner_id)
            db.execute(
                "UPDATE layers SET covers = ?, level = ?, renewed_s = ? WHERE layer_id = ?",
                (json.dumps(tuple(covers)), level, self._clock.monotonic_s(), layer_id),
            )
            _hold(db, lease, [layer_id])
            fault("merge:written")
        self._leases.discard(layer_id)
        fault("merge:committed")


def _hold(db: sqlite3.Connection, lease: Reading, layer_ids: Sequence[str]) -> None:
    """Add layers to a lease, within a transaction."""
    row = db.execute("SELECT layers FROM holders WHERE holder_id = ?", (lease.reading_id,)).fetchone()
    if row is None:
        raise lease.lost()
    held = dict.fromkeys([*json.loads(row[0]), *layer_ids])
    db.execute("UPDATE holders SET layers = ? WHERE holder_id = ?", (json.dumps(list(held)), lease.reading_id))


def _keep(store: Readings, db: sqlite3.Connection, layer_id: str) -> bool:
    """Tell within a transaction whether a layer exists; one that was condemned does again."""
    row = db.execute("SELECT state, boot_id FROM layers WHERE layer_id = ?", (layer_id,)).fetchone()
    if row is None or row[0] == "building":
        return False
    if row[0] != "condemned":
        return True
    if row[1] != store.boot_id:
        return False  # a crash of the machine may have torn it
    with typed(f"the layer {layer_id} cannot be looked at"):
        # A collector that died between the move and the end of its transaction leaves a row without content.
        there = store.layer_path(layer_id).is_dir()
    if there:
        db.execute("UPDATE layers SET state = 'ready' WHERE layer_id = ?", (layer_id,))
    return there
