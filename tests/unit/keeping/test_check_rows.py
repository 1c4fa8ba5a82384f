"""A check tells metadata that does not agree with itself."""

from __future__ import annotations

import json
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.full_layers import change
from tests.stores import add_snapshot, home_at, record_of

from worldfork.core.ids import new_id
from worldfork.keeping.check import check
from worldfork.keeping.findings import CheckReport
from worldfork.store.leases import Holder
from worldfork.store.store import Store


def lines(report: CheckReport) -> list[str]:
    return [str(finding) for finding in report.findings]


def edit(store: Store, which: str, **facts: object) -> None:
    record = json.loads(store.snapshot(which).to_json())
    change(store, "UPDATE snapshots SET record = ? WHERE snapshot_id = ?", json.dumps(record | facts), which)


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", '{"layers": 3}', '{"layers": []}', "[" * 100_000, b"\xff\xfe", 7]
)
def test_a_record_that_cannot_be_read(store: Store, text: object) -> None:
    sound, damaged = add_snapshot(store, form="user"), add_snapshot(store, form="user")
    change(store, "UPDATE snapshots SET record = ? WHERE snapshot_id = ?", text, damaged.snapshot_id)
    report = check(store)
    assert report.counts.get(("snapshot", damaged.snapshot_id)) == 1
    assert ("snapshot", sound.snapshot_id) not in report.counts
    assert report.damaged_layers == []
    assert report.layers == 2


def test_a_record_of_text_that_is_no_text(store: Store) -> None:
    sound, damaged = add_snapshot(store, form="user"), add_snapshot(store, form="user")
    change(store, "UPDATE snapshots SET record = CAST(x'7bff' AS TEXT) WHERE snapshot_id = ?", damaged.snapshot_id)
    report = check(store)
    assert not report.sound
    assert report.layers == 2
    assert ("snapshot", sound.snapshot_id) not in report.counts


@pytest.mark.parametrize(
    "facts",
    [{"label": "\ud800"}, {"label": 7}, {"facts": {"limits": {"cpus": float("inf")}}}, {"facts": {"a": "\ud800"}}],
)
def test_a_record_that_stops_the_listings_of_all(store: Store, facts: dict[str, object]) -> None:
    damaged = add_snapshot(store, form="user")
    edit(store, damaged.snapshot_id, **facts)
    [finding] = check(store).findings
    assert (finding.kind, finding.subject, finding.path) == ("snapshot", damaged.snapshot_id, "record")


def test_a_record_that_python_reads_and_sqlite_does_not(store: Store) -> None:
    damaged = add_snapshot(store, form="user")
    text = damaged.to_json().replace('"facts":{', '"facts":{"deep":' + "[" * 3000 + "]" * 3000 + ",")
    change(store, "UPDATE snapshots SET record = ? WHERE snapshot_id = ?", text, damaged.snapshot_id)
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(30_000)
    try:
        assert {finding.path for finding in check(store).findings} == {"record"}
    finally:
        sys.setrecursionlimit(usual)


def test_records_that_do_not_agree_with_the_layers(store: Store) -> None:
    first = add_snapshot(store, form="user")
    other, missing = new_id("sn"), new_id("ly")
    damaged = [add_snapshot(store, form="user", below=first.layers).snapshot_id for _ in range(6)]
    edit(store, damaged[0], snapshot_id=other)
    edit(store, damaged[1], layers=[missing, *first.layers])
    edit(store, damaged[2], form="trusted")
    edit(store, damaged[3], layers=[*first.layers, *first.layers])
    change(store, "UPDATE snapshots SET level = 'for ever' WHERE snapshot_id = ?", damaged[4])
    change(store, "UPDATE snapshots SET state = 'durable' WHERE snapshot_id = ?", damaged[5])
    found = {one.subject: (one.path, one.expected, one.found) for one in check(store).findings}
    assert set(found) == set(damaged)
    assert found[damaged[0]] == ("snapshot_id", damaged[0], other)
    assert found[damaged[1]] == ("layers", f"the layer {missing}", "no such layer")
    assert found[damaged[2]][1].endswith("of form trusted")
    assert found[damaged[2]][2] == "form user"
    assert found[damaged[3]] == ("layers", "each layer once", "one that is there twice")
    assert found[damaged[4]][::2] == ("level", "for ever")
    assert found[damaged[5]][1].endswith(" durable")
    assert found[damaged[5]][2] == "ready"


def test_layers_whose_rows_make_no_sense(store: Store) -> None:
    rows = [add_snapshot(store, form="user") for _ in range(5)]
    layers = [record.layers[0] for record in rows]
    change(store, "UPDATE layers SET digest = 'sha256:12' WHERE layer_id = ?", layers[0])
    change(store, "UPDATE layers SET level = -1 WHERE layer_id = ?", layers[1])
    change(store, "UPDATE layers SET covers = json_array(layer_id) WHERE layer_id = ?", layers[2])
    change(store, "UPDATE layers SET covers = '{}' WHERE layer_id = ?", layers[3])
    change(store, "UPDATE layers SET layer_id = '../../../etc' WHERE layer_id = ?", layers[4])
    found = {(one.kind, one.subject, one.path) for one in check(store).findings}
    expected = {
        ("layer", layers[0], "digest"),
        ("layer", layers[0], "manifest"),
        ("layer", layers[1], "level"),
        ("layer", layers[2], "covers"),
        ("layer", layers[3], "covers"),
        ("layer", "../../../etc", "layer_id"),
        ("snapshot", rows[4].snapshot_id, "layers"),
    }
    assert found == expected


def test_a_name_without_a_snapshot(store: Store) -> None:
    record = add_snapshot(store, form="user")
    gone = new_id("sn")
    store.set_name("main", record.snapshot_id)
    change(store, "UPDATE names SET snapshot_id = ?", gone)
    assert lines(check(store)) == [f"name main: expected the snapshot {gone}, found no such snapshot"]


def test_a_living_holder_without_its_layers_and_a_dead_one(store: Store) -> None:
    record = add_snapshot(store, form="user")
    living, dead, garbled = new_id("sb"), new_id("sb"), new_id("sb")
    missing = new_id("ly")
    store.hold([Holder(holder_id, layers=record.layers) for holder_id in (living, dead, garbled)])
    change(store, "UPDATE holders SET layers = ? WHERE holder_id != ?", json.dumps([missing]), garbled)
    change(store, "UPDATE holders SET created_s = 0, renewed_s = -1 WHERE holder_id = ?", dead)
    change(store, "UPDATE holders SET layers = '{}' WHERE holder_id = ?", garbled)
    assert set(lines(check(store))) == {
        f"holder {living}: layers: expected the layer {missing}, found no such layer",
        f"holder {garbled}: layers: expected a list of layer ids, found {{}}",
    }


def test_a_database_of_which_pages_are_damaged(tmp_path: Path) -> None:
    home = home_at(tmp_path / "home")
    store = Store.open(home)
    for _ in range(60):
        add_snapshot(store, form="user")
    store.close()
    whole = home.database.read_bytes()
    with closing(sqlite3.connect(home.database)) as db:
        page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
        index = db.execute(
            "SELECT rootpage FROM sqlite_master WHERE name LIKE 'sqlite_autoindex_snapshots%'"
        ).fetchone()
    offset = (index[0] - 1) * page_bytes
    data = bytearray(whole)
    # Ids of the index of snapshots: the rows are whole, what finds them is not.
    data[offset + page_bytes - 200 : offset + page_bytes] = bytes(200)
    home.database.write_bytes(data)
    store = Store(home)
    report = check(store)
    store.close()
    assert [key for key in report.counts if key[0] == "database"] == [("database", str(home.database))]
    assert report.findings[0].path == "integrity_check"
    assert report.layers == 60


def test_every_level_is_sound(store: Store) -> None:
    record = add_snapshot(store, form="user")
    for level in ("volatile", "local", "exported"):
        store.publish(replace(record_of(record.layers, form="user"), level=level), [])
    assert lines(check(store)) == []
