"""Whether the metadata of the store agrees with itself, looked at in one moment while everybody goes on."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field

from worldfork.core.errors import ConfigError, Corrupt, WorldforkError
from worldfork.core.ids import check_id
from worldfork.keeping.findings import DATABASE, HOLDER, LAYER, NAME, SNAPSHOT, CheckReport, Finding
from worldfork.records.snapshot import SnapshotLevel, SnapshotRecord
from worldfork.store.layers import FORMS
from worldfork.store.schema import APPLICATION, FORMAT
from worldfork.store.store import Store

_DIGEST = re.compile(r"b3:[0-9a-f]{64}", re.ASCII)
_LEVELS = tuple(level.value for level in SnapshotLevel)
_SHOWN = 100


@dataclass
class LayerRow:
    """What the metadata says of one layer."""

    form: str
    state: str
    boot_id: str
    digest: str | None


@dataclass
class Metadata:
    """What a check needs to know of the moment that it looked at."""

    layers: dict[str, LayerRow] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    """Layers of the snapshots that stay."""
    suspects: list[str] = field(default_factory=list)
    """Holders that name layers which are not there."""


def check_metadata(store: Store, report: CheckReport) -> Metadata:
    """Look at all rows in one transaction that reads; add what is wrong to the report.

    Raises:
        StoreError: the metadata cannot be read at all.
    """
    known = Metadata()
    steps: list[Callable[[sqlite3.Connection], None]] = [
        lambda db: _integrity(db, store, report),
        lambda db: _layers(db, report, known),
        lambda db: _snapshots(db, store, report, known),
        lambda db: _names(db, report),
        lambda db: _holders(db, report, known),
    ]
    try:
        with store.database.view() as db:
            for step in steps:
                try:
                    step(db)
                except sqlite3.Error as error:
                    report.add(_database(store, "", "rows that can be read", str(error)))
    except Corrupt as error:  # the end of the transaction reports it once more
        if report.sound:
            report.add(_database(store, "", "a sound database", error.message))
    for holder_id in known.suspects:
        _living_holder(store, report, holder_id)
    return known


def _database(store: Store, path: str, expected: str, found: str) -> Finding:
    return Finding(DATABASE, str(store.home.database), path, expected, found)


def _integrity(db: sqlite3.Connection, store: Store, report: CheckReport) -> None:
    application = db.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION:
        report.add(_database(store, "application_id", str(APPLICATION), str(application)))
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != FORMAT:
        report.add(_database(store, "user_version", str(FORMAT), str(version)))
    for (line,) in db.execute("PRAGMA integrity_check"):
        if line != "ok":
            report.add(_database(store, "integrity_check", "ok", line))
    for table, _, parent, _ in db.execute("PRAGMA foreign_key_check"):
        if table != "names":  # told by name below
            report.add(_database(store, table, f"a row of {parent}", "none"))


def _layers(db: sqlite3.Connection, report: CheckReport, known: Metadata) -> None:
    rows = db.execute("SELECT layer_id, form, state, boot_id, digest, covers, level FROM layers ORDER BY layer_id")
    for layer_id, form, state, boot_id, digest, covers, level in rows:
        if _not_an_id("ly", layer_id):
            # It must never become a path.
            report.add(Finding(LAYER, _text(layer_id), "layer_id", "a layer id", _text(layer_id)))
            continue
        known.layers[layer_id] = LayerRow(form, state, boot_id, digest)
        facts = [
            ("form", form in FORMS, " or ".join(FORMS), form),
            ("digest", digest is None or bool(_DIGEST.fullmatch(str(digest))), "b3: and 64 hex digits", digest),
            ("level", isinstance(level, int) and level >= 0, "a level of 0 or more", level),
            ("covers", covers is None or _is_list_of_layers(covers, layer_id), "ids of other layers", covers),
        ]
        for name, right, expected, found in facts:
            if not right:
                report.add(Finding(LAYER, layer_id, name, expected, _text(found)))


def _snapshots(db: sqlite3.Connection, store: Store, report: CheckReport, known: Metadata) -> None:
    lost = []
    rows = db.execute(
        "SELECT snapshot_id, state, boot_id, level, record, json_valid(record) FROM snapshots ORDER BY number"
    )
    for snapshot_id, state, boot_id, level, text, is_json in rows:
        if state == "ready" and boot_id != store.boot_id:
            lost.append(_text(snapshot_id))
            continue
        report.snapshots += 1
        problems = _Problems(report, _text(snapshot_id))
        if _not_an_id("sn", snapshot_id):
            problems.add("snapshot_id", "a snapshot id", snapshot_id)
        if level not in _LEVELS:
            problems.add("level", f"one of {', '.join(_LEVELS)}", level)
        record = _parsed(text, problems)
        if record is not None and not is_json:
            problems.add("record", "JSON that SQLite reads", text)
        if record is not None:
            _record(record, state, problems, known)
    if lost:
        report.notes.append(
            f"{_count(len(lost), 'snapshot')} had not reached the disk when the machine went down, and will be "
            f"forgotten: {some(lost)}"
        )


@dataclass
class _Problems:
    report: CheckReport
    snapshot_id: str

    def add(self, path: str, expected: str, found: object) -> None:
        self.report.add(Finding(SNAPSHOT, self.snapshot_id, path, expected, _text(found)))


def _parsed(text: object, problems: _Problems) -> SnapshotRecord | None:
    try:
        if not isinstance(text, str):
            raise TypeError(f"{type(text).__name__} is no text")
        record = SnapshotRecord.from_json(text)
        if not all(isinstance(layer_id, str) for layer_id in record.layers):
            raise TypeError("layers are named by text")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        problems.add("record", "a record of a snapshot", text)
        return None
    return record


def _record(record: SnapshotRecord, state: str, problems: _Problems, known: Metadata) -> None:
    if record.snapshot_id != problems.snapshot_id:
        problems.add("snapshot_id", problems.snapshot_id, record.snapshot_id)
    if record.form not in FORMS:
        problems.add("form", " or ".join(FORMS), record.form)
    try:
        record.check()  # what does not pass may keep all others from being listed
    except (ConfigError, TypeError, AttributeError, RecursionError) as error:
        problems.add("record", "text and finite numbers", str(error))
    if len(set(record.layers)) != len(record.layers):
        problems.add("layers", "each layer once", "one that is there twice")
    known.used.update(record.layers)
    for layer_id in record.layers:
        row = known.layers.get(layer_id)
        if row is None:
            problems.add("layers", f"the layer {layer_id}", "no such layer")
            continue
        if row.form != record.form:
            problems.add("layers", f"{layer_id} of form {record.form}", f"form {row.form}")
        allowed = ("durable",) if state == "durable" else ("ready", "durable")
        if row.state not in allowed:
            problems.add("layers", f"{layer_id} {' or '.join(allowed)}", row.state)


def _names(db: sqlite3.Connection, report: CheckReport) -> None:
    report.names = int(db.execute("SELECT count(*) FROM names").fetchone()[0])
    rows = db.execute(
        "SELECT name, snapshot_id FROM names WHERE snapshot_id NOT IN (SELECT snapshot_id FROM snapshots)"
    )
    for name, snapshot_id in rows:
        report.add(Finding(NAME, _text(name), "", f"the snapshot {_text(snapshot_id)}", "no such snapshot"))


def _holders(db: sqlite3.Connection, report: CheckReport, known: Metadata) -> None:
    there = {layer_id for layer_id, row in known.layers.items() if row.state != "condemned"}
    for holder_id, layers in db.execute("SELECT holder_id, layers FROM holders ORDER BY holder_id"):
        report.holders += 1
        try:
            listed = json.loads(layers)
            if not isinstance(listed, list) or not all(isinstance(layer_id, str) for layer_id in listed):
                raise ValueError("not a list of ids")
        except (ValueError, TypeError, RecursionError):
            report.add(Finding(HOLDER, _text(holder_id), "layers", "a list of layer ids", _text(layers)))
            continue
        if not there.issuperset(listed):
            known.suspects.append(holder_id)


def _living_holder(store: Store, report: CheckReport, holder_id: str) -> None:
    """A dead holder may name what is gone; one that lives must not, and is looked at once more by itself."""
    try:
        if not store.is_living(store.holder(holder_id)):
            return
        with store.database.read() as db:
            rows = db.execute(
                "SELECT value FROM holders, json_each(holders.layers) WHERE holder_id = ? AND value NOT IN"
                " (SELECT layer_id FROM layers WHERE state != 'condemned')",
                (holder_id,),
            ).fetchall()
    except WorldforkError:
        return  # it was let go meanwhile
    for (layer_id,) in rows:
        report.add(Finding(HOLDER, holder_id, "layers", f"the layer {layer_id}", "no such layer"))


def _not_an_id(prefix: str, text: object) -> bool:
    try:
        check_id(prefix, text)
    except ConfigError:
        return True
    return False


def _is_list_of_layers(text: object, layer_id: str) -> bool:
    try:
        listed = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        return False
    return isinstance(listed, list) and layer_id not in listed and not any(_not_an_id("ly", one) for one in listed)


def _text(value: object) -> str:
    shown = value if isinstance(value, str) else repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def some(names: list[str]) -> str:
    """Return the first of many names."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
