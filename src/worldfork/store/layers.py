"""Layers: read-only differences, each in a directory of its own."""

from __future__ import annotations

import functools
import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from worldfork.content.ids import write_ids
from worldfork.core.errors import ConfigError, Corrupt, Locked, NotFound, OutOfSpace, StoreError, WorldforkError
from worldfork.core.ids import check_id, new_id
from worldfork.records.snapshot import LayerRecord
from worldfork.store.failures import FIND_DAMAGE, typed
from worldfork.store.faultpoints import fault
from worldfork.store.home import Home
from worldfork.store.owner import OwnedStore, frees_space

FORMS = ("trusted", "user")
_COLUMNS = "layer_id, form, state, size_bytes, digest, created_s, entries, logical_bytes, stored_bytes, covers, level"


class Sealed(Protocol):
    """What was found in a layer."""

    @property
    def digest(self) -> str:
        """Of its manifest."""

    @property
    def entries(self) -> int:
        """How many paths it has."""

    @property
    def logical_bytes(self) -> int:
        """What its files hold."""

    @property
    def stored_bytes(self) -> int:
        """What it takes on disk."""


@dataclass(frozen=True)
class LayerDraft:
    """A layer in the making: this process's own until it is published or abandoned."""

    layer_id: str
    path: Path
    """Where its content goes, `layers/<id>/fs`. The parent exists, the path itself does not."""


class Layers(OwnedStore):
    """The layers of a store."""

    def begin_layer(
        self, *, form: str, size_hint_bytes: int = 0, layer_id: str | None = None, ids: str = ""
    ) -> LayerDraft:
        """Announce a layer before anything is moved into it, so that a crash cannot leave it unknown.

        It is lost when this process stands still for longer than `ttl_s`.

        Args:
            form: "trusted" or "user".
            size_hint_bytes: how much will be written, if known; refused at once if the disk lacks it.
            layer_id: of a layer that comes from elsewhere; random by default.
            ids: the map of the sandbox that writes it, if it has a range of ids.
        Raises:
            ConfigError: no such form, or a malformed id.
            Locked: somebody alive is making a layer of this id.
            StoreError: there is one of this id already; claim it instead.
            OutOfSpace: the disk is or would be full.
            StoreError: the disk or the metadata failed.
        """
        if form not in FORMS:
            raise ConfigError(f"{form!r} is not a form of layers", remedy=f"use one of {', '.join(FORMS)}")
        if size_hint_bytes:
            self._expect_room(size_hint_bytes)
        chosen = new_id("ly") if layer_id is None else check_id("ly", layer_id)
        self._announce(chosen, form, given=layer_id is not None)
        layer_id = chosen
        self._go_on_with(layer_id)
        place = self.home.layers / layer_id
        try:
            fault("begin_layer:announced")
            with typed(f"the layer {layer_id} cannot be made"):
                place.mkdir(mode=0o700)
                write_ids(place, ids)
            fault("begin_layer:made")
        except BaseException:
            # Nobody hears of it, so nobody else could give it up before this process ends.
            with suppress(WorldforkError):
                self.abandon_layer(layer_id, owner_id=self.owner_id)
            raise
        return LayerDraft(layer_id, place / "fs")

    def _announce(self, layer_id: str, form: str, *, given: bool) -> None:
        clock = self._clock
        values = (layer_id, form, self.owner_id, self.boot_id, clock.now_s(), clock.monotonic_s())
        with self.database.write() as db:
            if given:
                self._expect_unused(db, layer_id)
            db.execute(
                "INSERT INTO layers (layer_id, form, state, owner_id, boot_id, created_s, renewed_s)"
                " VALUES (?, ?, 'building', ?, ?, ?, ?)",
                values,
            )

    def _expect_unused(self, db: sqlite3.Connection, layer_id: str) -> None:
        """Make way for a layer that is made under an id of its own choice, within a transaction."""
        row = db.execute("SELECT state, owner_id, renewed_s FROM layers WHERE layer_id = ?", (layer_id,)).fetchone()
        if row is None:
            # A crash of the machine may have lost the row and kept the directory.
            self._move_to_trash(self.home.layers / layer_id)
            return
        state, owner_id, renewed_s = row
        if state in ("ready", "durable"):
            raise StoreError(f"there is a layer {layer_id} already", remedy="claim it", layer_id=layer_id)
        if state == "building" and self.is_going(owner_id, renewed_s):
            raise Locked(
                f"{layer_id} is being made by another process", remedy="try again when it is done", holders=[owner_id]
            )
        self._discard(db, layer_id)

    def _discard(self, db: sqlite3.Connection, layer_id: str) -> None:
        """Move a layer out of sight and forget it, within a transaction.

        Both in one, so that whoever stops for long in between cannot move away what was made there since.
        """
        self._move_to_trash(self.home.layers / layer_id)
        fault("discard:moved")
        db.execute("DELETE FROM layers WHERE layer_id = ?", (layer_id,))

    def _expect_room(self, size_bytes: int) -> None:
        with typed("the free space cannot be looked at"):
            status = os.statvfs(self.home.layers)
        free_bytes = status.f_bavail * status.f_frsize
        if free_bytes < size_bytes:
            raise OutOfSpace(
                f"a layer of {size_bytes} bytes does not fit into {free_bytes} free bytes at {self.home.layers}",
                remedy="delete snapshots or free disk space",
                scope="host",
                needed_bytes=size_bytes,
                free_bytes=free_bytes,
            )

    @frees_space
    def abandon_layer(self, layer_id: str, *, owner_id: str | None = None) -> None:
        """Give up a layer that was not published; its content goes to the trash. Idempotent.

        Args:
            layer_id: which.
            owner_id: only if it is this owner's; for ids that others may be making too.
        Raises:
            ConfigError: it has been published; delete its snapshots instead.
            StoreError: the disk or the metadata failed.
        """
        check_id("ly", layer_id)
        self._leases.discard(layer_id)
        with self.database.write() as db:
            row = db.execute("SELECT state, owner_id FROM layers WHERE layer_id = ?", (layer_id,)).fetchone()
            if row is None or (owner_id is not None and row[1] != owner_id):
                return
            if row[0] != "building":
                raise ConfigError(f"{layer_id} has been published", remedy="delete the snapshots that use it")
            self._discard(db, layer_id)
        fault("abandon_layer:forgotten")

    def adopt_layer(self, layer_id: str) -> None:
        """Make a layer whose content is complete ready, although whoever was making it died. Idempotent.

        For a holder that stands on it already; without any user it goes with the next `collect`.

        Raises:
            NotFound: there is no such layer, or it has no content.
            OutOfSpace, StoreError: the disk or the metadata failed.
        """
        with typed(f"the layer {layer_id} cannot be looked at"):
            if not self.layer_path(layer_id).is_dir():
                raise NotFound(f"the layer {layer_id} has no content", layer_id=layer_id)
        with self.database.write() as db:
            db.execute("UPDATE layers SET state = 'ready' WHERE layer_id = ? AND state = 'building'", (layer_id,))
            if not db.execute("SELECT 1 FROM layers WHERE layer_id = ?", (layer_id,)).fetchone():
                raise NotFound(f"there is no layer {layer_id}", layer_id=layer_id)

    def layer_path(self, layer_id: str) -> Path:
        """Return where the content of a layer lies. Looks at nothing: hold the layer to be sure of it."""
        return _content_path(self.home, check_id("ly", layer_id))

    def layer(self, layer_id: str) -> LayerRecord:
        """Return what is known of a layer.

        Raises:
            NotFound: there is none of this id.
        """
        with self.database.read() as db:
            row = db.execute(f"SELECT {_COLUMNS} FROM layers WHERE layer_id = ?", (layer_id,)).fetchone()
        if row is None:
            raise NotFound(f"there is no layer {layer_id}", layer_id=layer_id)
        return _as_record(row)

    def layers_known(self) -> list[LayerRecord]:
        """Return all layers, those in the making and those about to go too, the oldest first."""
        with self.database.read() as db:
            rows = db.execute(f"SELECT {_COLUMNS} FROM layers ORDER BY created_s, layer_id").fetchall()
        return [_as_record(row) for row in rows]

    def sealed(self, layer_id: str, sealed: Sealed) -> None:
        """Write down what the content of a layer was found to be.

        Raises:
            NotFound: there is no such layer any more.
            OutOfSpace, StoreError: the metadata failed.
        """
        with self.database.write() as db:
            changed = db.execute(
                "UPDATE layers SET digest = ?, entries = ?, logical_bytes = ?, stored_bytes = ?"
                " WHERE layer_id = ? AND state IN ('building', 'ready', 'durable')",
                (sealed.digest, sealed.entries, sealed.logical_bytes, sealed.stored_bytes, layer_id),
            ).rowcount
        fault("seal:written")
        if changed != 1:
            raise NotFound(f"there is no layer {layer_id}", layer_id=layer_id)


def _as_record(row: tuple[Any, ...]) -> LayerRecord:
    covers, level = row[-2:]
    try:
        ids = tuple(json.loads(covers or "[]"))
    except ValueError as error:
        raise Corrupt(
            f"what {row[0]} covers cannot be read", remedy=FIND_DAMAGE, expected="ids of layers", actual=covers
        ) from error
    return replace(LayerRecord(*row[:-2]), covers=ids, level=level)


def publish_layers(db: sqlite3.Connection, layer_ids: Sequence[str], owner_id: str) -> None:
    """Turn this owner's drafts into layers, within a transaction.

    Raises:
        NotFound: one is not, or no longer, a draft of this owner.
    """
    for layer_id in layer_ids:
        changed = db.execute(
            "UPDATE layers SET state = 'ready' WHERE layer_id = ? AND state = 'building' AND owner_id = ?",
            (layer_id, owner_id),
        ).rowcount
        if changed != 1:
            raise NotFound(
                f"{layer_id} is not a layer that this process is making",
                remedy="if this process stood still for minutes, its lease ran out: do it again",
                layer_id=layer_id,
            )


def require_durable(db: sqlite3.Connection, layer_ids: Sequence[str]) -> None:
    """Check within a transaction that layers exist and survive a crash of the machine.

    Raises:
        NotFound: some do not; `layers` names all of them.
    """
    rows = db.execute(
        "SELECT layer_id FROM layers WHERE state = 'durable' AND layer_id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(layer_ids)),),
    ).fetchall()
    missing = sorted(set(layer_ids) - {row[0] for row in rows})
    if missing:
        raise NotFound(f"{missing[0]} is no durable layer", layers=missing)


def require_layers(db: sqlite3.Connection, layer_ids: Sequence[str], owner_id: str) -> set[str]:
    """Check within a transaction that layers exist and are not about to go; return their forms.

    Args:
        db: the transaction's connection.
        layer_ids: which.
        owner_id: whose drafts count as existing.
    Raises:
        NotFound: some do not exist; `layers` names all of them.
    """
    rows = db.execute(
        "SELECT layer_id, form, state, owner_id FROM layers WHERE layer_id IN (SELECT value FROM json_each(?))",
        (json.dumps(layer_ids),),
    ).fetchall()
    found = {}
    for layer_id, form, state, owner in rows:
        if state in ("ready", "durable") or (state == "building" and owner == owner_id):
            found[layer_id] = form
    missing = [layer_id for layer_id in layer_ids if layer_id not in found]
    if missing:
        raise NotFound(f"there is no layer {missing[0]}", layers=missing)
    return set(found.values())


@functools.lru_cache(maxsize=128)
def _content_path(home: Home, layer_id: str) -> Path:
    """Return a layer's place; made anew for each use it would fill the interpreter's table of names."""
    return home.layers / layer_id / "fs"
