"""The verbs for what is kept, on a real store: snapshots, prune, tag, df, tree, show."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.stores import in_child, record_of
from tests.unit.cli.conftest import Invoke

from worldfork.cli.keeping import duration_s
from worldfork.cli.lineage import tree_lines
from worldfork.cli.lookup import open_store, snapshot_id_of
from worldfork.core.errors import ConfigError, NotFound
from worldfork.core.ids import new_id
from worldfork.keeping.family import family
from worldfork.keeping.usage import measure_layers
from worldfork.lineage.place import close_places
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store import locks
from worldfork.store.leases import Holder
from worldfork.store.store import Store

Add = Callable[..., SnapshotRecord]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("WORLDFORK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORLDFORK_SCRATCH", str(tmp_path / "home"))
    monkeypatch.setenv("WORLDFORK_UPKEEP", "off")
    with open_store() as opened:
        yield opened
        close_places()


@pytest.fixture
def add(store: Store) -> Add:
    def publish(parent: SnapshotRecord | None = None, **facts: Any) -> SnapshotRecord:
        draft = store.begin_layer(form="trusted")
        draft.path.mkdir()
        (draft.path / "file").write_bytes(b"x" * 10_000)
        layers = (draft.layer_id, *(parent.layers if parent else ()))
        record = record_of(layers, parent_id=parent.snapshot_id if parent else None)
        record = dataclasses.replace(record, **facts)
        store.publish(record, [draft.layer_id])
        return record

    return publish


def test_a_snapshot_that_was_not_counted_as_it_was_taken_has_the_size_of_its_sealed_layer(
    store: Store, add: Add, invoke: Invoke
) -> None:
    first = add()
    add(first)
    assert [each["size_bytes"] for each in json.loads(invoke("snapshots", "--json").stdout)] == [None, None]
    measure_layers(store)
    sizes = [each["size_bytes"] for each in json.loads(invoke("snapshots", "--json").stdout)]
    assert sizes == [each.added_bytes for each in reversed(family(store))]
    assert all(10_000 <= size < 20_000 for size in sizes)
    assert all("KiB" in line for line in invoke("snapshots").stdout.splitlines()[1:])


def test_snapshots_are_listed_newest_first(store: Store, add: Add, invoke: Invoke) -> None:
    assert invoke("snapshots").stdout == "There is no snapshot.\n"
    assert json.loads(invoke("snapshots", "--json").stdout) == []
    old, new = add(), add(label="first", size_bytes=2048, level="volatile", sandbox_id="sb-a")
    store.set_name("best", new.snapshot_id)
    store.make_durable(old.snapshot_id)
    lines = invoke("snapshots").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["snapshot", new.snapshot_id, old.snapshot_id]
    assert lines[1].split()[1:8] == ["best", "first", "ready", "volatile", "filesystem", "1", "2.0"]
    assert lines[2].split()[1:5] == ["-", "-", "durable", "local"]
    assert invoke("snapshots", "-q").stdout == f"{new.snapshot_id}\n{old.snapshot_id}\n"
    facts = json.loads(invoke("snapshots", "--json").stdout)[0]
    expected = {
        "snapshot_id": new.snapshot_id,
        "sandbox_id": "sb-a",
        "status": "local_ready",
        "snapshot_type": "filesystem",
        "created_at": 1_700_000_000.0,
        "base": "host",
        "parent_id": None,
        "layers": 1,
        "size_bytes": 2048,
        "label": "first",
        "warnings": [],
        "state": "ready",
        "level": "volatile",
        "names": ["best"],
    }
    assert expected.items() <= facts.items()
    store.set_exported(old.snapshot_id, "/there")
    assert json.loads(invoke("snapshots", "--json").stdout)[1]["state"] == "exported"


def test_a_name_or_an_id(store: Store, add: Add) -> None:
    record = add()
    store.set_name("best", record.snapshot_id)
    assert snapshot_id_of(store, "best") == snapshot_id_of(store, record.snapshot_id) == record.snapshot_id
    for text in ("bes", "sn-", new_id("sn"), ""):
        with pytest.raises(NotFound):
            snapshot_id_of(store, text)


def test_tag_gives_moves_lists_and_takes_away(store: Store, add: Add, invoke: Invoke) -> None:
    one, two = add(), add()
    assert invoke("tag").stdout == "There is no name.\n"
    assert invoke("tag", one.snapshot_id, "best").exit_code == 0
    assert store.named("best") == one.snapshot_id
    assert invoke("tag", two.snapshot_id, "best").exit_code == 0
    assert invoke("tag", "best", "again").exit_code == 0
    listed = json.loads(invoke("tag", "--json").stdout)
    assert listed == [{"name": name, "snapshot_id": two.snapshot_id} for name in ("again", "best")]
    assert [line.split() for line in invoke("tag").stdout.splitlines()][1:] == [
        ["again", two.snapshot_id],
        ["best", two.snapshot_id],
    ]
    assert invoke("tag", "--remove", "best").exit_code == 0
    assert store.names() == {"again": two.snapshot_id}
    assert invoke("tag", "--remove", "best").exit_code == 13


@pytest.mark.parametrize("name", ["sn-k3v7q2abcd5efgh6", "base:mine", "world:trusted:x", "", "a\nb"])
def test_names_that_cannot_be_given(store: Store, add: Add, invoke: Invoke, name: str) -> None:
    assert invoke("tag", add().snapshot_id, name).exit_code == 2
    assert store.names() == {}


@pytest.mark.parametrize("line", [("one",), ("one", "two", "--remove", "three")])
def test_half_a_tag_is_a_mistake(store: Store, invoke: Invoke, line: tuple[str, ...]) -> None:
    assert invoke("tag", *line).exit_code == 2


def test_tag_of_nothing(store: Store, invoke: Invoke) -> None:
    assert invoke("tag", new_id("sn"), "best").exit_code == 13


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("12h", 43_200), ("7d", 604_800), ("1.5w", 907_200), ("0s", 0)]
)
def test_ages(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["7", "d", "-1d", "7 d", "1e9d", "٣d", "7D", "inf"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(ConfigError):
        duration_s(text)


def test_prune_without_a_rule_deletes_no_snapshot(store: Store, add: Add, invoke: Invoke) -> None:
    add()
    result = invoke("prune")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "There was no rule" in result.stderr
    assert len(store.snapshots()) == 1


def test_prune(store: Store, add: Add, invoke: Invoke) -> None:
    records = [add(label=f"step {number}") for number in range(6)]
    store.set_name("best", records[0].snapshot_id)
    line = ["prune", "--keep-last", "1", "--keep-label", "step [23]", "--json", "--measure"]
    said = json.loads(invoke(*line, "--dry-run").stdout)
    assert len(store.snapshots()) == 6
    done = json.loads(invoke(*line).stdout)
    assert {**said, "dry_run": False} == done
    assert done["deleted"] == [records[1].snapshot_id, records[4].snapshot_id]
    assert done["kept"][0] == {"snapshot_id": records[0].snapshot_id, "reasons": ["named best"]}
    assert done["layers"] == sorted(records[1].layers + records[4].layers)
    assert done["freed_bytes"] >= 20_000
    assert (done["unmeasured_layers"], done["in_use"], done["failures"]) == (0, [], [])
    assert len(store.snapshots()) == 4


def test_prune_takes_every_rule(store: Store, add: Add, invoke: Invoke) -> None:
    root = add()
    named = add(root)
    store.set_name("run/best", named.snapshot_id)
    other = add()
    store.set_name("other", other.snapshot_id)
    result = invoke("prune", "--keep-name", "run/*", "--keep-ancestors", "--keep-within", "1s")
    assert result.stdout == f"{other.snapshot_id}\n"
    assert [record.snapshot_id for record in store.snapshots()] == [root.snapshot_id, named.snapshot_id]
    assert invoke("prune", "--keep-within", "never").exit_code == 2
    assert invoke("prune", "--keep-last", "-1").exit_code == 2


def test_a_dry_run_says_why(store: Store, add: Add, invoke: Invoke) -> None:
    goes, used, stays = add(), add(), add()
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, snapshot_id=used.snapshot_id, layers=used.layers)])
    lock = locks.take(store.lock_path(sandbox))
    assert lock is not None
    result = invoke("prune", "--keep-last", "1", "-n")
    rows = [line.split(maxsplit=2) for line in result.stdout.splitlines()[1:]]
    assert rows == [
        [goes.snapshot_id, "goes"],
        [used.snapshot_id, "in", f"use  {sandbox}"],
        [stays.snapshot_id, "stays", "one of the last 1"],
    ]
    assert (
        "1 snapshot would go, 1 would stay, 1 is in use; 1 layer: 0 B would be free, and 1 layer of unknown size"
        in result.stderr
    )
    done = invoke("prune", "--keep-last", "1")
    assert done.stdout == f"{goes.snapshot_id}\n"
    assert f"{used.snapshot_id} stays: in use by {sandbox}" in done.stderr
    lock.release()


def test_prune_tells_what_could_not_go(store: Store, add: Add, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    record = add()
    monkeypatch.setattr(Store, "_discard", _refuse)
    result = invoke("prune", "--keep-last", "0", "--json")
    assert result.exit_code == 3
    failures = json.loads(result.stdout)["failures"]
    assert failures == [{"what": record.layers[0], "why": "busy"}]
    assert f"worldfork: {record.layers[0]} stays: busy" in invoke("prune").stderr


def _refuse(self: Store, db: object, layer_id: str) -> None:
    from worldfork.core.errors import StoreError

    raise StoreError("busy")


def test_df(store: Store, add: Add, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    base = add()
    add(base)
    add(base)
    plain = invoke("df")
    assert "3 layers without a known size yet" in plain.stderr
    monkeypatch.setenv("WORLDFORK_QUOTA_BYTES", "5000000")
    found = json.loads(invoke("df", "--measure", "--json").stdout)
    assert (found["logical_bytes"], found["layers"], len(found["snapshots"])) == (50_000, 3, 3)
    assert found["stored_bytes"] == 3 * found["shared_bytes"]
    assert found["reclaimable"]["total_bytes"] == 0
    assert (found["quota_bytes"], found["reserve_bytes"]) == (5_000_000, 1 << 30)
    share = found["snapshots"][1]
    assert share["own_bytes"] == share["shared_bytes"] == found["shared_bytes"]
    lines = invoke("df", "-v").stdout.splitlines()
    assert lines[1].split()[0] == base.snapshot_id
    rows = {line.split()[0]: line for line in lines if line}
    assert "3 snapshots, each kept whole" in rows["logical"]
    assert "WORLDFORK_QUOTA_BYTES" in rows["quota"]


def test_tree(store: Store, add: Add, invoke: Invoke) -> None:
    assert invoke("tree").stdout == "There is no snapshot.\n"
    root = add(label="the root")
    left = add(root)
    right = add(root, level="volatile")
    only = add(left)
    gone = add()
    orphan = add(gone)
    store.delete_snapshot(gone.snapshot_id)
    store.set_name("best", only.snapshot_id)
    lines = invoke("tree").stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if not line.startswith("│")] == [
        root.snapshot_id,
        f"├─ {left.snapshot_id}",
        f"└─ {right.snapshot_id}",
        orphan.snapshot_id,
    ]
    assert lines[2].startswith(f"│  ↓ {only.snapshot_id}  [best]  ready  +- of -")
    assert "ready (volatile)" in lines[3]
    assert lines[0].endswith("the root")
    assert lines[4].endswith(f"(its parent {gone.snapshot_id} is gone)")
    found = json.loads(invoke("tree", "--json").stdout)
    assert [each["depth"] for each in found] == [0, 1, 2, 1, 0]
    assert found[4]["parent_is_gone"] is True
    ascii_lines = list(tree_lines(family(store), "ascii"))
    assert [line.split("sn-")[0] for line in ascii_lines] == ["", "|- ", "|  | ", "`- ", ""]


def test_a_long_chain_stays_narrow_and_a_wide_tree_whole(store: Store, add: Add) -> None:
    chain = [add()]
    for _ in range(30):
        chain.append(add(chain[-1]))
    for _ in range(3):
        add(chain[-1])
    lines = list(tree_lines(family(store), "utf-8"))
    assert max(len(line.split("sn-")[0]) for line in lines) == 3
    assert [line[:2] for line in lines[-3:]] == ["├─", "├─", "└─"]


def test_show(store: Store, add: Add, invoke: Invoke) -> None:
    chain = [add(label="note", made_by="checkpoint", sandbox_id="sb-a")]
    for _ in range(6):
        chain.append(add(chain[-1]))
    last = chain[-1]
    store.set_name("best", last.snapshot_id)
    found = json.loads(invoke("show", "best", "--json").stdout)
    assert found["snapshot_id"] == last.snapshot_id
    assert found["names"] == ["best"]
    assert found["ancestors"] == [record.snapshot_id for record in chain[-2::-1]]
    assert [layer["layer_id"] for layer in found["layers"]] == list(last.layers)
    assert (found["state"], found["level"], found["digest"], found["stored_bytes"]) == ("ready", "local", None, None)
    assert found["base"] == {"kind": "host"}
    assert found["facts"] == {"env": {"A": "b"}}
    assert found["parent_is_gone"] is False
    text = invoke("show", last.snapshot_id).stdout
    assert "2 more" in text
    assert "kind=host" in text
    assert text.count("ly-") == 7
    assert "A=b" not in text
    first = invoke("show", chain[0].snapshot_id).stdout
    rows = dict(line.split(maxsplit=1) for line in first.splitlines() if len(line.split()) > 1)
    assert (rows["label"], rows["made_by"], rows["sandbox_id"], rows["names"]) == ("note", "checkpoint", "sb-a", "-")
    store.delete_snapshot(chain[-2].snapshot_id)
    orphan = json.loads(invoke("show", "best", "--json").stdout)
    assert (orphan["parent_is_gone"], orphan["ancestors"]) == (True, [])
    assert invoke("show", "nothing").exit_code == 13


@pytest.mark.filterwarnings("ignore:no cgroup:RuntimeWarning")
def test_prune_clears_the_dead_away_first(store: Store, add: Add, invoke: Invoke) -> None:
    record = add()

    def die_with_it() -> None:
        store.hold([Holder(new_id("sb"), snapshot_id=record.snapshot_id, layers=record.layers)])

    assert in_child(die_with_it) == 0
    done = json.loads(invoke("prune", "--keep-last", "0", "--json").stdout)
    assert (done["deleted"], done["layers"]) == ([record.snapshot_id], list(record.layers))
    assert store.holders() == []
