"""Snapshots: which layers, in which order, under which names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from worldfork.core.errors import ConfigError, Corrupt, Locked, NotFound
from worldfork.core.ids import check_id, is_id
from worldfork.records.snapshot import CheckpointType, SnapshotLevel, SnapshotRecord, check_label
from worldfork.store.failures import typed
from worldfork.store.faultpoints import fault
from worldfork.store.layers import FORMS, publish_layers, require_durable, require_layers
from worldfork.store.memory import Memories
from worldfork.store.owner import frees_space

LEVELS = tuple(level.value for level in SnapshotLevel)
MEMORY = CheckpointType.MEMORY.value
_LONGEST_NAME = 200
_REWRITTEN_AT_ONCE = 16
"""Snapshots of one transaction, about 50 us each: a fork waits for it."""
_COLUMNS = "state, record, level, digest, exported"


class Snapshots(Memories):
    """The snapshots of a store, and their names."""

    def publish(self, record: SnapshotRecord, new_layers: Sequence[str]) -> None:
        """Make a snapshot ready, and the layers that it adds: all in one transaction. Waits for no disk.

        Args:
            record: whose `layers` are in order, top first; its `state` is not looked at. One of kind "memory" takes
                what was made at `begin_memory`.
            new_layers: those of its layers that this process has just made.
        Raises:
            NotFound: a layer does not exist, or its content or the memory does not.
            ConfigError: layers of the other form are among them, an id is malformed, or the record holds what no
                reader of JSON takes.
            OutOfSpace, StoreError: the metadata failed; nothing was published.
        """
        check_id("sn", record.snapshot_id)
        record.check()
        if record.form not in FORMS:
            raise ConfigError(f"{record.form!r} is not a form of snapshots", remedy=f"use one of {', '.join(FORMS)}")
        self._expect_content(new_layers)
        if record.level not in LEVELS:
            raise ConfigError(f"{record.level!r} is not a level", remedy=f"use one of {', '.join(LEVELS)}")
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
                "INSERT INTO snapshots (snapshot_id, state, owner_id, boot_id, created_s, record, level)"
                " VALUES (?, 'ready', ?, ?, ?, ?, ?)",
                (record.snapshot_id, owner_id, self.boot_id, record.created_s, ready.to_json(), record.level),
            )
            if record.kind == MEMORY:
                self._place_memory(record.snapshot_id)
            fault("publish:written")
        self._leases.difference_update(new_layers)
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
            row = db.execute(f"SELECT {_COLUMNS} FROM snapshots WHERE snapshot_id = ?", (snapshot_id,)).fetchone()
        if row is None:
            raise NotFound(f"there is no snapshot {snapshot_id}", snapshot_id=snapshot_id)
        return _as_record(*row)

    def snapshots(self) -> list[SnapshotRecord]:
        """Return all snapshots, in the order in which they were published, whatever the clock said."""
        with self.database.read() as db:
            rows = db.execute(f"SELECT {_COLUMNS} FROM snapshots ORDER BY number").fetchall()
        return [_as_record(*row) for row in rows]

    def rewrite(self, run: Sequence[str], by: Sequence[str]) -> int:
        """Let durable snapshots stand on other layers of the same content; return how many. On disk when it returns.

        Whoever stands on the old layers holds them by their own ids and notices nothing.

        Args:
            run: ids of layers that follow each other in a snapshot's stack, top first.
            by: what takes their place.
        Raises:
            ConfigError: `run` is empty.
            NotFound: a layer of `by` is not durable: a snapshot that is must never lose one.
            OutOfSpace, StoreError: the metadata failed; nothing was changed.
        """
        if not run:
            raise ConfigError("no layers to rewrite", remedy="name at least one")
        # The ids of a run are 19 characters between quotes, so that a search in the text finds no half of one.
        with self.database.read() as db:
            rows = db.execute(
                "SELECT number FROM snapshots WHERE state = 'durable' AND instr(record, ?) > 0", (f'"{run[0]}"',)
            ).fetchall()
        numbers = [row[0] for row in rows]
        replaced = 0
        for start in range(0, max(1, len(numbers)), _REWRITTEN_AT_ONCE):
            replaced += self._rewrite_some(numbers[start : start + _REWRITTEN_AT_ONCE], run, by)
            fault("rewrite:committed")
        if replaced:
            self.database.sync_log()
            fault("rewrite:lasting")
        return replaced

    def _rewrite_some(self, numbers: Sequence[int], run: Sequence[str], by: Sequence[str]) -> int:
        replaced = 0
        with self.database.write() as db:
            require_durable(db, by)
            for number in numbers:
                row = db.execute("SELECT record FROM snapshots WHERE number = ?", (number,)).fetchone()
                if row is None:
                    continue
                try:
                    record = SnapshotRecord.from_json(row[0])
                    layers = exchanged(record.layers, run, by)
                    changed = dataclasses.replace(record, layers=layers).to_json()
                except (ValueError, TypeError, KeyError):
                    continue  # damaged, which a check tells; it must not keep all others from going on
                if layers != record.layers:
                    db.execute("UPDATE snapshots SET record = ? WHERE number = ?", (changed, number))
                    replaced += 1
            if replaced:
                # A collection that looked before this must look again.
                db.execute("UPDATE counters SET value = value + 1 WHERE name = 'rewrites'")
            fault("rewrite:written")
        return replaced

    def set_digest(self, snapshot_id: str, digest: str) -> None:
        """Keep the digest of a snapshot's state, which never changes.

        Raises:
            NotFound: there is no such snapshot. OutOfSpace, StoreError: the metadata failed.
        """
        self._set(snapshot_id, "digest", digest)

    def set_exported(self, snapshot_id: str, where: str) -> None:
        """Write down where a whole copy of a snapshot is now.

        Raises:
            NotFound: there is no such snapshot. OutOfSpace, StoreError: the metadata failed.
        """
        self._set(snapshot_id, "exported", where)

    def set_labels(self, labels: Mapping[str, str], *, instead_of: Mapping[str, str] | None = None) -> int:
        """Give snapshots, by id, other labels; return how many have them now. On disk when it returns.

        Args:
            labels: those that are not there any more are left out.
            instead_of: labels by id; a snapshot that has another one by now is left out too.
        Raises:
            ConfigError: a label is no text. OutOfSpace, StoreError: the metadata failed; nothing was changed.
        """
        for label in labels.values():
            check_label(label)
        if not labels:
            return 0
        changed = 0
        with self.database.write_lasting() as db:
            for snapshot_id, label in labels.items():
                former = None if instead_of is None else instead_of.get(snapshot_id)
                changed += db.execute(
                    "UPDATE snapshots SET record = json_set(record, '$.label', ?1) WHERE snapshot_id = ?2"
                    " AND (?3 IS NULL OR json_extract(record, '$.label') = ?3)",
                    (label, snapshot_id, former),
                ).rowcount
            fault("set_labels:written")
        fault("set_labels:committed")
        return changed

    def _set(self, snapshot_id: str, column: str, value: str) -> None:
        with self.database.write() as db:
            changed = db.execute(
                f"UPDATE snapshots SET {column} = ? WHERE snapshot_id = ?", (value, snapshot_id)
            ).rowcount
        fault(f"set_{column}:committed")
        if changed != 1:
            raise NotFound(f"there is no snapshot {snapshot_id}", snapshot_id=snapshot_id)

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

    def id_of(self, snapshot: str) -> str:
        """Return the id of the snapshot that a text means: its id, or a name of it.

        Raises:
            NotFound: there is none.
        """
        found = self.named(snapshot)
        if found is None and is_id("sn", snapshot):
            found = self.snapshot(snapshot).snapshot_id
        if found is None:
            raise NotFound(
                f"there is no snapshot {snapshot!r}, neither an id nor a name", remedy="see `worldfork snapshots`"
            )
        return found

    def names(self) -> dict[str, str]:
        """Return every name and the id that it stands for."""
        with self.database.read() as db:
            return dict(db.execute("SELECT name, snapshot_id FROM names ORDER BY name").fetchall())


def exchanged(layers: tuple[str, ...], run: Sequence[str], by: Sequence[str]) -> tuple[str, ...]:
    """Return a stack with `by` in the place of `run`.

    The stack itself where it does not hold the whole run, or has one of `by` elsewhere: no overlay takes a layer twice.
    """
    try:
        start = layers.index(run[0])
    except ValueError:
        return layers
    above, replaced, below = layers[:start], layers[start : start + len(run)], layers[start + len(run) :]
    if replaced != tuple(run) or not {*above, *below}.isdisjoint(by):
        return layers
    return (*above, *by, *below)


def _as_record(state: str, text: str, level: str, digest: str | None, exported: str | None) -> SnapshotRecord:
    shown = "durable" if state == "durable" else "ready"
    try:
        record = SnapshotRecord.from_json(text)
        return dataclasses.replace(record, state=shown, level=level, digest=digest, exported=exported)
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupt(
            f"the record of a snapshot cannot be read: {error!r}",
            remedy="`worldfork store check` names it, `worldfork snapshots rm` removes it",
            expected="a SnapshotRecord",
            actual=text[:200],
        ) from error
