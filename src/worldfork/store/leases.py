"""Leases: who uses what, and who of them is alive."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worldfork.core.errors import Corrupt, NotFound
from worldfork.core.ids import PREFIXES, check_id
from worldfork.store import locks
from worldfork.store.failures import FIND_DAMAGE, OUT_OF_FILES, from_system
from worldfork.store.faultpoints import fault
from worldfork.store.layers import require_layers
from worldfork.store.owner import OwnedStore, frees_space

GRACE_S = 30.0
"""Seconds that a new holder may take to lock its file, while whoever made it is alive."""

READING = "reading"
"""The kind of holders that live as their owner does; see `readings`."""

_COLUMNS = "holder_id, kind, snapshot_id, layers, facts, owner_id, created_s, renewed_s"


@dataclass(frozen=True)
class Holder:
    """A user of snapshots and layers: what it names is not collected while its row is there."""

    holder_id: str
    """An id, usually of a sandbox. It lives as long as the record lock on its lock file is held."""
    kind: str = "sandbox"
    snapshot_id: str | None = None
    """A snapshot that it uses, which cannot be deleted meanwhile."""
    layers: tuple[str, ...] = ()
    """All layers that it stands on: a snapshot's own may be exchanged for others of the same content at any time."""
    facts: str = "{}"
    """What others may know of it, as JSON; the store does not look at it."""
    owner_id: str = ""
    """Who made it; filled in by the store."""
    created_s: float = 0.0
    """Seconds since the Unix epoch; filled in by the store."""
    renewed_s: float = 0.0
    """When its owner last said that it goes on, on the machine's monotonic clock; filled in by the store."""


class Leases(OwnedStore):
    """The holders of a store."""

    def hold(self, holders: Sequence[Holder]) -> None:
        """Check that what the holders name exists, and keep it, in the same transaction. Waits for no disk.

        A holder that is known already gets its new snapshot, layers and facts, and keeps its owner and age.

        Raises:
            NotFound: a snapshot or layer does not exist; nobody holds anything.
            ConfigError: a holder's id is malformed.
            OutOfSpace, StoreError: the metadata failed; nobody holds anything.
        """
        self._hold(holders, known=False)

    def hold_on(self, holder: Holder) -> None:
        """As `hold`, for a holder that is known: one that was released meanwhile stays so.

        Raises:
            NotFound: it was released (with its `holder_id`), or a snapshot or layer does not exist; nothing changed.
            OutOfSpace, StoreError: the metadata failed; nothing changed.
        """
        self._hold([holder], known=True)

    def _hold(self, holders: Sequence[Holder], *, known: bool) -> None:
        owner_id, now_s = self.owner_id, self._clock.now_s()
        rows = []
        for holder in holders:
            _check_holder_id(holder.holder_id)
            listed = json.dumps(holder.layers)
            values = (holder.holder_id, holder.kind, holder.snapshot_id, listed, holder.facts)
            rows.append((*values, owner_id, now_s, self._clock.monotonic_s()))
        with self.database.write() as db:
            if known:
                self._require_holders(db, holders)
            for snapshot_id, layers in {(holder.snapshot_id, holder.layers) for holder in holders}:
                # A snapshot that exists has its layers, and asking for each would make deep forks slow.
                covered = set() if snapshot_id is None else set(self._layers_of(db, snapshot_id))
                others = [layer_id for layer_id in layers if layer_id not in covered]
                if others:
                    require_layers(db, others, owner_id)
            db.executemany(
                f"INSERT INTO holders ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (holder_id) DO UPDATE SET kind = excluded.kind, snapshot_id = excluded.snapshot_id,"
                " layers = excluded.layers, facts = excluded.facts",
                rows,
            )
        fault("hold:committed")

    @staticmethod
    def _require_holders(db: sqlite3.Connection, holders: Sequence[Holder]) -> None:
        for holder in holders:
            if not db.execute("SELECT 1 FROM holders WHERE holder_id = ?", (holder.holder_id,)).fetchone():
                raise NotFound(f"there is no sandbox {holder.holder_id}", holder_id=holder.holder_id)

    def renew_holders(self, holder_ids: Sequence[str]) -> None:
        """Let holders of this process that are still to come alive count as new again. Those that are gone stay so.

        Raises:
            OutOfSpace, StoreError: the metadata failed.
        """
        values = (self._clock.monotonic_s(), self.owner_id, json.dumps(tuple(holder_ids)))
        with self.database.write() as db:
            db.execute(
                "UPDATE holders SET renewed_s = ? WHERE owner_id = ? AND holder_id IN (SELECT value FROM json_each(?))",
                values,
            )

    def vouch(self, holder_id: str, layers: Sequence[str]) -> None:
        """Let a holder count as alive for as long as this process does, whatever becomes of its lock.

        For whoever ends a sandbox to take what it leaves. It stays so until the holder is released.

        Args:
            holder_id: which.
            layers: what it stands on from now on, drafts of this process among them.
        Raises:
            NotFound: there is no such holder.
            OutOfSpace, StoreError: the metadata failed.
        """
        values = (self.owner_id, math.inf, json.dumps(tuple(layers)), holder_id)
        with self.database.write() as db:
            update = "UPDATE holders SET owner_id = ?, renewed_s = ?, layers = ? WHERE holder_id = ?"
            if db.execute(update, values).rowcount != 1:
                raise NotFound(f"there is no sandbox {holder_id}", holder_id=holder_id)
        fault("vouch:committed")

    def is_vouched(self, holder_id: str) -> bool:
        """Tell whether a process that is alive vouches for a holder, and will release it.

        Raises:
            StoreError: the metadata failed, or the lock of that process cannot be looked at.
        """
        with self.database.read() as db:
            row = db.execute("SELECT owner_id, renewed_s FROM holders WHERE holder_id = ?", (holder_id,)).fetchone()
        return row is not None and row[1] == math.inf and self.is_alive(row[0])

    def update_facts(self, holder_id: str, facts: str) -> None:
        """Replace what others may know of a holder.

        Raises:
            NotFound: there is no such holder.
            OutOfSpace, StoreError: the metadata failed.
        """
        with self.database.write() as db:
            if db.execute("UPDATE holders SET facts = ? WHERE holder_id = ?", (facts, holder_id)).rowcount != 1:
                raise NotFound(f"there is no sandbox {holder_id}", holder_id=holder_id)

    @frees_space
    def release(self, holder_ids: Iterable[str]) -> None:
        """Let holders go, whether they live or not, in one transaction. Those that are gone are fine.

        Raises:
            ConfigError: an id is malformed.
            StoreError: the metadata failed; all still hold.
        """
        chosen = [(_check_holder_id(holder_id),) for holder_id in holder_ids]
        with self.database.write() as db:
            db.executemany("DELETE FROM holders WHERE holder_id = ?", chosen)
        fault("release:committed")
        for (holder_id,) in chosen:
            try:
                # Where its PID 1 is still on its way out, the next sweep does it.
                locks.remove_if_free(self.lock_path(holder_id))
            except OSError as error:
                # It holds no more. Where no descriptor is free just now, the next sweep removes the file.
                if error.errno not in OUT_OF_FILES:
                    raise from_system(error, f"the lock of {holder_id} cannot be removed") from error

    def holders(self) -> list[Holder]:
        """Return all holders, living and dead, the oldest first."""
        with self.database.read() as db:
            rows = db.execute(f"SELECT {_COLUMNS} FROM holders ORDER BY created_s, holder_id").fetchall()
        return [_as_holder(row) for row in rows]

    def holder(self, holder_id: str) -> Holder:
        """Return one holder, living or dead.

        Raises:
            NotFound: there is no such holder.
        """
        with self.database.read() as db:
            row = db.execute(f"SELECT {_COLUMNS} FROM holders WHERE holder_id = ?", (holder_id,)).fetchone()
        if row is None:
            raise NotFound(f"there is no sandbox {holder_id}", holder_id=holder_id)
        return _as_holder(row)

    def is_living(self, holder: Holder, *, grace_s: float = GRACE_S) -> bool:
        """Tell whether a holder counts as alive: its lock is held, or it is new and its maker is alive.

        A reading does as long as its owner is alive and says so, and so does what its owner vouches for.

        Raises:
            StoreError: its lock cannot be looked at.
        """
        if holder.kind == READING:
            return self.is_going(holder.owner_id, holder.renewed_s)
        if self.is_alive(holder.holder_id):
            return True
        # By the machine's monotonic clock, on which what is vouched for never grows old: whoever sets the time must not
        # end what is just starting.
        age_s = self._clock.monotonic_s() - holder.renewed_s
        if holder.renewed_s < 0:  # of a process of format 1
            age_s = self._clock.now_s() - holder.created_s
        return age_s < grace_s and self.is_alive(holder.owner_id)

    def _layers_of(self, db: sqlite3.Connection, snapshot_id: str) -> list[str]:
        """Return the layers of a snapshot, within a transaction.

        Raises:
            NotFound: there is no such snapshot.
        """
        row = db.execute(
            "SELECT json_extract(record, '$.layers') FROM snapshots WHERE snapshot_id = ?", (snapshot_id,)
        ).fetchone()
        if row is None:
            raise NotFound(f"there is no snapshot {snapshot_id}", snapshot_id=snapshot_id)
        return [str(layer_id) for layer_id in json.loads(row[0] or "[]")]

    def _living(self, db: sqlite3.Connection, condition: str, values: tuple[object, ...]) -> list[str]:
        rows = db.execute(f"SELECT {_COLUMNS} FROM holders WHERE {condition}", values).fetchall()
        return [holder.holder_id for holder in map(_as_holder, rows) if self.is_living(holder)]


def _check_holder_id(text: str) -> str:
    prefix = text.partition("-")[0]
    return check_id(prefix if prefix in PREFIXES else "sb", text)


def _as_holder(row: tuple[str, str, str | None, str, str, str, float, float]) -> Holder:
    holder_id, kind, snapshot_id, layers, facts, owner_id, created_s, renewed_s = row
    try:
        listed = tuple(str(layer_id) for layer_id in json.loads(layers))
    except (ValueError, TypeError) as error:
        raise Corrupt(
            f"what {holder_id} stands on cannot be read", remedy=FIND_DAMAGE, expected="ids of layers", actual=layers
        ) from error
    return Holder(holder_id, kind, snapshot_id, listed, facts, owner_id, created_s, renewed_s)
