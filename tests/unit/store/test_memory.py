"""The memory of snapshots: made aside, put in its place with its snapshot, gone with it."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from tests.stores import add_memory, add_snapshot, in_child, make_memory, problems, record_of

from worldfork.core.errors import ConfigError, NotFound, StoreError
from worldfork.core.ids import new_id
from worldfork.keeping.browse import browsing
from worldfork.keeping.check import check
from worldfork.keeping.keep_rules import KeepRules
from worldfork.keeping.prune import prune
from worldfork.keeping.quota import enforce_quota, over_quota
from worldfork.keeping.usage import usage
from worldfork.store.memory import DIGESTS
from worldfork.store.store import Store


def test_memory_is_there_with_its_snapshot_and_not_before(store: Store) -> None:
    base = add_snapshot(store)
    record = replace(record_of(base.layers), kind="memory")
    draft = store.begin_memory(record.snapshot_id)
    make_memory(draft, record.snapshot_id)
    assert not store.memory_path(record.snapshot_id).exists()
    store.publish(record, ())
    assert (store.memory_path(record.snapshot_id) / "state").read_text() == record.snapshot_id
    assert not draft.exists()
    assert problems(store) == []


def test_a_snapshot_whose_memory_was_not_made_is_not_published(store: Store) -> None:
    record = replace(record_of(add_snapshot(store).layers), kind="memory")
    with pytest.raises(NotFound):
        store.publish(record, ())
    with pytest.raises(NotFound):
        store.snapshot(record.snapshot_id)


def test_what_was_given_up_is_gone_wherever_it_lies(store: Store) -> None:
    snapshot_id = new_id("sn")
    for path in (store.begin_memory(snapshot_id), store.memory_path(snapshot_id)):
        make_memory(path, "x")
        store.abandon_memory(snapshot_id)
        assert not path.exists()
    store.abandon_memory(snapshot_id)
    kept = add_memory(store, below=add_snapshot(store).layers)
    store.abandon_memory(kept.snapshot_id)
    assert store.memory_path(kept.snapshot_id).is_dir(), "of a published snapshot nothing is given up"


def test_memory_goes_with_its_snapshot(store: Store) -> None:
    kept, gone = (add_memory(store, below=add_snapshot(store).layers) for _ in range(2))
    store.delete_snapshot(gone.snapshot_id)
    assert store.collect().memories == [f"memory/{gone.snapshot_id}"]
    assert [path.name for path in store.home.memory.iterdir()] == [kept.snapshot_id]


def test_a_sweep_removes_what_a_dead_maker_left_and_nothing_of_one_that_lives(store: Store) -> None:
    mine = new_id("sn")
    make_memory(store.begin_memory(mine), "mine")

    def die() -> None:
        other = Store.open(store.home)
        make_memory(other.begin_memory(new_id("sn")), "half")
        os._exit(0)

    assert in_child(die) == 0
    assert len(list(store.home.memory.iterdir())) == 2
    assert [name.startswith("memory/.new-") for name in store.sweep().leftovers if "memory" in name] == [True]
    assert list(store.home.memory.iterdir()) == [store.begin_memory(mine)]


def test_memory_on_disk_has_digests_and_a_check_compares_them(store: Store) -> None:
    record = add_memory(store, below=add_snapshot(store).layers)
    assert store.memory_digests(record.snapshot_id) is None
    assert check(store, read_data=True).sound
    store.make_durable(record.snapshot_id)
    directory = store.memory_path(record.snapshot_id)
    assert set(json.loads((directory / DIGESTS).read_text())) == {"state", "disk"}
    report = check(store, read_data=True)
    assert (report.sound, report.memories) == (True, 1)
    state = directory / "state"
    state.chmod(0o600)
    state.write_text(new_id("sn"))
    assert check(store).sound, "the size is what it was"
    found = check(store, read_data=True).findings
    assert [(one.kind, one.subject, one.path) for one in found] == [("snapshot", record.snapshot_id, "memory/state")]
    state.unlink()
    assert [one.found for one in check(store).findings] == ["nothing"]
    for damaged in ("{", "3", '{"state": 3}', '{"state": ["x", "y"]}', '{"../state": [3, "y"]}'):
        (directory / DIGESTS).write_text(damaged)
        with pytest.raises(StoreError):
            store.memory_digests(record.snapshot_id)
        assert [one.path for one in check(store).findings] == ["memory"]
    (directory / DIGESTS).unlink()
    assert [one.path for one in check(store).findings] == [f"memory/{DIGESTS}"]


def test_a_memory_that_is_gone_is_found(store: Store) -> None:
    record = add_memory(store, below=add_snapshot(store).layers)
    store.memory_path(record.snapshot_id).rename(store.home.tmp / "elsewhere")
    with pytest.raises(NotFound):
        store.memory_digests(record.snapshot_id)
    assert [one.subject for one in check(store).findings] == [record.snapshot_id]


def test_memory_that_links_share_is_counted_once_and_beside_the_layers(store: Store) -> None:
    base = add_snapshot(store)
    first = replace(record_of(base.layers), kind="memory")
    make_memory(store.begin_memory(first.snapshot_id), first.snapshot_id)
    (store.begin_memory(first.snapshot_id) / "ram.0").write_bytes(os.urandom(1 << 20))
    store.publish(first, ())
    before = usage(store)
    second = replace(record_of(base.layers), kind="memory")
    make_memory(store.begin_memory(second.snapshot_id), second.snapshot_id)
    os.link(store.memory_path(first.snapshot_id) / "ram.0", store.begin_memory(second.snapshot_id) / "ram.0")
    store.publish(second, ())
    after = usage(store)
    assert before.memory_bytes >= 1 << 20
    assert after.memory_bytes - before.memory_bytes < 1 << 16
    assert sum(one.memory_bytes for one in after.snapshots) == after.memory_bytes
    assert after.stored_bytes == before.stored_bytes
    store.delete_snapshot(first.snapshot_id)
    assert usage(store).reclaimable.memory_bytes > 0
    assert usage(store).memory_bytes >= 1 << 20, "the second has it all the same"


def test_the_quota_counts_memory_and_frees_that_of_throw_aways(store: Store) -> None:
    base = add_snapshot(store)
    store.set_name("base", base.snapshot_id)
    record = replace(record_of(base.layers), kind="memory", level="volatile")
    make_memory(store.begin_memory(record.snapshot_id), record.snapshot_id)
    (store.begin_memory(record.snapshot_id) / "ram.0").write_bytes(os.urandom(4 << 20))
    store.publish(record, ())
    assert over_quota(store, 2 << 20) > 0
    report = enforce_quota(store, 2 << 20)
    assert (report.deleted, report.over_bytes) == ([record.snapshot_id], 0)
    assert list(store.home.memory.iterdir()) == []


def test_rules_remove_nothing_in_which_a_sandbox_rests(store: Store) -> None:
    base = add_snapshot(store)
    resting = add_memory(store, below=base.layers, suspended={"sandbox_id": "sb-resting"})
    other = add_memory(store, below=base.layers)
    report = prune(store, KeepRules(last=0))
    assert report.in_use == {resting.snapshot_id: ["sb-resting"]}
    assert set(report.deleted) == {base.snapshot_id, other.snapshot_id}
    assert [path.name for path in store.home.memory.iterdir()] == [resting.snapshot_id]
    store.delete_snapshot(resting.snapshot_id)


def test_nobody_looks_into_memory_as_into_files(store: Store) -> None:
    record = add_memory(store, below=add_snapshot(store).layers)
    with pytest.raises(ConfigError, match="memory"), browsing(store, record.snapshot_id):
        pass


def test_prune_tells_what_memory_it_frees(store: Store) -> None:
    first, second = (add_memory(store, below=add_snapshot(store).layers) for _ in range(2))
    own = store.memory_path(first.snapshot_id) / "ram.0"
    own.write_bytes(os.urandom(1 << 20))
    os.link(own, store.memory_path(second.snapshot_id) / "ram.0")
    one = prune(store, KeepRules(last=1), dry_run=True)
    assert first.snapshot_id in one.deleted
    assert 0 < one.memory_bytes < 1 << 20, "the other snapshot has the pages too"
    both = prune(store, KeepRules(last=0), dry_run=True)
    assert {first.snapshot_id, second.snapshot_id} <= set(both.deleted)
    assert 1 << 20 <= both.memory_bytes < 2 << 20
    assert prune(store, KeepRules(last=0)).memory_bytes == both.memory_bytes
    assert list(store.home.memory.iterdir()) == []
