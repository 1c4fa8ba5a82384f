"""Snapshots: which layers, in which order, under which names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from worldfork.core.errors import ConfigError, Corrupt, Locked, NotFound
from worldfork.core.ids import check_id
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.layers import FORMS, Layers, publish_layers, require_layers
from worldfork.store.leases import Leases
from worldfork.store.owner import frees_space

_LONGEST_NAME = 200


class Snapshots(Layers, Leases):
    """The snapshots of a store, and their names."""

    def publish(self, record: SnapshotRecord, new_layers: Sequence[str]) -> None:
        """Make a snapshot ready, and the layers that it adds: all in one transaction. Waits for no disk.

        Args:
            record: whose `layers` are in order, top first; its `state` is not looked at.
            new_layers: those of its layers that this process has just made.
        Raises:
            NotFound: a layer does not exist, or its content does not.
            ConfigError: layers of the other form are among them, or an id is malformed.
            OutOfSpace, StoreError: the metadata failed; nothing was published.
        """
        check_id("sn", record.snapshot_id)
        if record.form not in FORMS:
            raise ConfigError(f"{record.form!r} is not a form of snapshots", remedy=f"use one of {', '.join(FORMS)}")
        self._expect_content(new_layers)
        ready = dataclasses.replace(record, state="ready")
        owner_id = self.owner_id
        fault("publish:checked")
        with self.database.write() as db:
            forms = require_layers(db, record.layers, owner_id)
            if forms - {record.form}:
                raise ConfigError(
                    f"{record.snapshot_id} is of form {record.form!r}, but has layers of another",
                    remedy="files deleted in one form come back in the other, so the two never share a stack",
                )
            publish_layers(db, new_layers, owner_id)
            db.execute(
                "INSERT INTO snapshots (snapshot_id, state, owner_id, boot_id, created_s, record)"
                " VALUES (?, 'ready', ?, ?, ?, ?)",
                (record.snapshot_id, owner_id, self.boot_id, record.created_s, ready.to_json()),
            )
            fault("publish:written")
        fault("publish:committed")

    def _expect_content(self, layer_ids: Sequence[str]) -> None:
        for layer_id in layer_ids:
            path = self.layer_path(layer_id)
            with typed(f"the layer {layer_id} cannot be looked at"):
                if path.is_symlink() or not path.is_dir():
                    raise NotFound(f"the layer {layer_id} has no content at {path}", layer_id=layer_id)

    def snapshot(self, snapshot_id: str) -> SnapshotRecord:
        """Return a snapshot.

        Raises:
            NotFound: there is none of this id.
            Corrupt: its record cannot be read.
        """
        with self.database.read() as db:
            row = db.execute("SELECT state, record FROM snapshots WHERE snapshot_id = ?", (snapshot_id,)).fetchone()
        if row is None:
            raise NotFound(f"there is no snapshot {snapshot_id}", snapshot_id=snapshot_id)
        return _as_record(*row)

    def snapshots(self) -> list[SnapshotRecord]:
        """Return all snapshots, in the order in which they were published, whatever the clock said."""
        with self.database.read() as db:
            rows = db.execute("SELECT state, record FROM snapshots ORDER BY number").fetchall()
        return [_as_record(*row) for row in rows]

    @frees_space
    def delete_snapshot(self, snapshot_id: str) -> None:
        """Forget a snapshot and its names. Layers that nothing uses any more go with the next `collect`.

        Raises:
            NotFound: there is none of this id.
            Locked: sandboxes that live use it; `holders` has their ids.
            StoreError: the metadata failed; nothing was deleted.
        """
        with self.database.write() as db:
            if not db.execute("SELECT 1 FROM snapshots WHERE snapshot_id = ?", (snapshot_id,)).fetchone():
                raise NotFound(f"there is no snapshot {snapshot_id}", snapshot_id=snapshot_id)
            holders = self._living(db, "snapshot_id = ?", (snapshot_id,))
            if holders:
                raise Locked(
                    f"{snapshot_id} is in use by {', '.join(holders)}",
                    remedy="end these sandboxes first",
                    holders=holders,
                )
            db.execute("DELETE FROM snapshots WHERE snapshot_id = ?", (snapshot_id,))
            fault("delete_snapshot:written")
        fault("delete_snapshot:committed")

    def set_name(self, name: str, snapshot_id: str | None) -> None:
        """Let a name stand for a snapshot from now on; None takes the name away. On disk when it returns.

        Raises:
            NotFound: there is no such snapshot.
            ConfigError: the name is empty, too long or not printable.
            StoreError: the metadata failed.
        """
        if not name or len(name) > _LONGEST_NAME or not name.isprintable():
            raise ConfigError(f"{name!r} cannot be a name", remedy=f"use 1 to {_LONGEST_NAME} printable characters")
        with self.database.write_lasting() as db:
            if snapshot_id is None:
                db.execute("DELETE FROM names WHERE name = ?", (name,))
            elif not db.execute("SELECT 1 FROM snapshots WHERE snapshot_id = ?", (snapshot_id,)).fetchone():
                raise NotFound(f"there is no snapshot {snapshot_id}", snapshot_id=snapshot_id)
            else:
                db.execute(
                    "INSERT INTO names (name, snapshot_id) VALUES (?, ?)"
                    " ON CONFLICT (name) DO UPDATE SET snapshot_id = excluded.snapshot_id",
                    (name, snapshot_id),
                )
        fault("set_name:committed")

    def named(self, name: str) -> str | None:
        """Return the id of the snapshot that a name stands for, or None."""
        with self.database.read() as db:
            row = db.execute("SELECT snapshot_id FROM names WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def names(self) -> dict[str, str]:
        """Return every name and the id that it stands for."""
        with self.database.read() as db:
            return dict(db.execute("SELECT name, snapshot_id FROM names ORDER BY name").fetchall())


def _as_record(state: str, text: str) -> SnapshotRecord:
    try:
        return dataclasses.replace(SnapshotRecord.from_json(text), state="durable" if state == "durable" else "ready")
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupt(
            f"the record of a snapshot cannot be read: {error!r}", expected="a SnapshotRecord", actual=text[:200]
        ) from error
