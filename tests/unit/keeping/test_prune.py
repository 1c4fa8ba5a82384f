"""What a prune deletes, keeps, spares and frees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from tests.stores import add_snapshot, in_child, problems, record_of

from worldfork.core.clock import ManualClock
from worldfork.core.errors import StoreError
from worldfork.core.ids import new_id
from worldfork.keeping.keep_rules import KeepRules
from worldfork.keeping.prune import prune
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store import faultpoints, locks
from worldfork.store.leases import Holder
from worldfork.store.store import Store

NONE = KeepRules(last=0)


@pytest.fixture
def at() -> Iterator[Callable[[str, Callable[[], None]], None]]:
    """Do something once, when a named step is passed."""
    todo: list[tuple[str, Callable[[], None]]] = []

    def hook(name: str) -> None:
        if todo and todo[0][0] == name:
            todo.pop(0)[1]()

    def when(name: str, do: Callable[[], None]) -> None:
        todo.append((name, do))

    faultpoints.install(hook)
    yield when
    faultpoints.install(None)
    assert not todo, "a step was never passed"


def add_with(store: Store, content: bytes, *, below: tuple[str, ...] = (), **facts: object) -> SnapshotRecord:
    draft = store.begin_layer(form="trusted")
    draft.path.mkdir()
    (draft.path / "file").write_text(draft.layer_id)
    (draft.path / "more").write_bytes(content)
    record = dataclasses.replace(record_of((draft.layer_id, *below)), **facts)  # type: ignore[arg-type]
    store.publish(record, [draft.layer_id])
    return record


def left(store: Store) -> list[str]:
    return [record.snapshot_id for record in store.snapshots()]


def test_without_a_rule_only_what_nothing_uses_goes(store: Store) -> None:
    keep, gone = add_snapshot(store), add_snapshot(store)
    store.delete_snapshot(gone.snapshot_id)
    report = prune(store, KeepRules())
    assert (report.deleted, report.layers) == ([], list(gone.layers))
    assert left(store) == [keep.snapshot_id]
    assert problems(store) == []


def test_by_rules(store: Store) -> None:
    records = [add_snapshot(store) for _ in range(40)]
    store.set_name("best", records[3].snapshot_id)
    report = prune(store, KeepRules(last=2))
    assert report.failures == []
    assert report.kept == {
        records[3].snapshot_id: ("named best",),
        records[38].snapshot_id: ("one of the last 2",),
        records[39].snapshot_id: ("one of the last 2",),
    }
    assert left(store) == list(report.kept)
    assert sorted([*report.deleted, *report.kept]) == sorted(record.snapshot_id for record in records)
    assert problems(store) == []


def test_the_clock_of_the_store_counts(store: Store, clock: ManualClock) -> None:
    add_snapshot(store)
    clock.advance_s(3599)
    assert prune(store, KeepRules(within_s=3600)).deleted == []
    clock.advance_s(2)
    assert len(prune(store, KeepRules(within_s=3600)).deleted) == 1


def test_a_dry_run_says_what_a_real_one_does(store: Store) -> None:
    base = add_with(store, b"x" * 100_000)
    records = [add_with(store, b"y" * (10_000 * number), below=base.layers) for number in range(1, 40)]
    before_unused = add_snapshot(store)
    store.delete_snapshot(before_unused.snapshot_id)
    store.set_name("best", records[7].snapshot_id)
    dead, alive, reader = new_id("sb"), new_id("sb"), new_id("sb")
    store.hold([Holder(dead, layers=records[5].layers), Holder(alive, snapshot_id=records[6].snapshot_id)])
    store.hold([Holder(reader, layers=records[9].layers)])
    lock = locks.take(store.lock_path(alive))
    assert lock is not None
    rules = KeepRules(last=1, ancestors=True)
    before = left(store)
    said = prune(store, rules, dry_run=True, measure=True)
    assert left(store) == before
    assert sorted(path.name for path in store.home.layers.iterdir()) == sorted(
        record.layer_id for record in store.layers_known()
    )
    done = prune(store, rules, measure=True)
    assert said == dataclasses.replace(done, dry_run=True, deleted=sorted(done.deleted, key=before.index))
    assert done.in_use == {records[6].snapshot_id: [alive]}
    assert before_unused.layers[0] in done.layers
    assert not {*records[5].layers, *records[9].layers} & set(done.layers)
    lock.release()


def test_what_it_frees_counts_shared_layers_once_and_none_that_stay(store: Store) -> None:
    base = add_with(store, b"x" * 1_000_000)
    shared = add_with(store, b"y" * 200_000, below=base.layers)
    for _ in range(3):
        add_with(store, b"z" * 50_000, below=shared.layers)
    store.set_name("base", base.snapshot_id)
    report = prune(store, NONE, dry_run=True, measure=True)
    assert len(report.layers) == 4
    assert report.unmeasured_layers == 0
    assert 350_000 < report.freed_bytes < 450_000
    unmeasured = add_with(store, b"w" * 70_000)
    again = prune(store, NONE)
    assert again.freed_bytes == report.freed_bytes
    assert again.unmeasured_layers == 1
    assert unmeasured.layers[0] in again.layers


def test_what_a_living_sandbox_uses_stays_and_is_told(store: Store) -> None:
    used, other = add_snapshot(store), add_snapshot(store)
    dead, alive = new_id("sb"), new_id("sb")
    store.hold([Holder(alive, snapshot_id=used.snapshot_id, layers=used.layers)])

    def die_with_it() -> None:
        store.hold([Holder(dead, snapshot_id=other.snapshot_id, layers=other.layers)])

    assert in_child(die_with_it) == 0
    lock = locks.take(store.lock_path(alive))
    assert lock is not None
    report = prune(store, NONE)
    assert report.in_use == {used.snapshot_id: [alive]}
    assert report.deleted == [other.snapshot_id]
    assert (report.failures, left(store)) == ([], [used.snapshot_id])
    lock.release()
    store.release([alive, dead])
    assert prune(store, NONE).deleted == [used.snapshot_id]
    store.sweep()
    assert problems(store) == []


def test_a_fork_after_the_look_keeps_its_snapshot(store: Store, at: Callable[..., None]) -> None:
    record, other = add_snapshot(store), add_snapshot(store)
    sandbox = new_id("sb")
    at("prune:planned", lambda: store.hold([Holder(sandbox, snapshot_id=record.snapshot_id, layers=record.layers)]))
    report = prune(store, NONE)
    assert report.in_use == {record.snapshot_id: [sandbox]}
    assert report.deleted == [other.snapshot_id]
    assert store.layer_path(record.layers[0]).is_dir()


def test_a_name_after_the_look_keeps_its_snapshot(store: Store, at: Callable[..., None]) -> None:
    record, other = add_snapshot(store), add_snapshot(store)
    at("prune:planned", lambda: store.set_name("saved", record.snapshot_id))
    report = prune(store, NONE)
    assert report.kept == {record.snapshot_id: ("named saved",)}
    assert report.deleted == [other.snapshot_id]
    at("prune:planned", lambda: store.set_name("other", record.snapshot_id))
    assert prune(store, KeepRules(names=("x*",))).deleted == [record.snapshot_id]


def test_a_child_after_the_look_keeps_its_ancestors(store: Store, at: Callable[..., None]) -> None:
    lineage: list[SnapshotRecord] = []
    for number in range(40):
        parent_id = lineage[-1].snapshot_id if number else None
        lineage.append(add_with(store, b"", parent_id=parent_id))
    unrelated = add_snapshot(store)
    children: list[str] = []

    def publish_a_child() -> None:
        children.append(add_with(store, b"", parent_id=lineage[35].snapshot_id).snapshot_id)

    def name_one() -> None:
        store.set_name("late", lineage[10].snapshot_id)

    at("prune:planned", publish_a_child)
    report = prune(store, KeepRules(last=0, ancestors=True))
    assert report.deleted == [unrelated.snapshot_id, *(record.snapshot_id for record in lineage[:35:-1])]
    assert left(store) == [*(record.snapshot_id for record in lineage[:36]), *children]
    store.delete_snapshot(children[0])
    at("prune:committed", name_one)
    report = prune(store, KeepRules(last=0, ancestors=True))
    assert left(store) == [record.snapshot_id for record in lineage[: 10 + 1]]
    assert report.kept[lineage[10].snapshot_id] == ("named late",)
    assert report.kept[lineage[0].snapshot_id] == (f"ancestor of {lineage[10].snapshot_id}",)


def test_what_somebody_else_deletes_meanwhile_is_fine(store: Store, at: Callable[..., None]) -> None:
    records = [add_snapshot(store) for _ in range(5)]

    def delete_some() -> None:
        for record in records[1:4]:
            store.delete_snapshot(record.snapshot_id)
        store.collect()

    at("prune:planned", delete_some)
    report = prune(store, NONE)
    assert report.deleted == [records[0].snapshot_id, records[4].snapshot_id]
    assert report.failures == []
    assert len(report.layers) == 5, "what another process has collected is gone all the same"
    assert prune(store, NONE).deleted == []
    assert problems(store) == []


def test_a_failure_stops_nothing_else(store: Store, at: Callable[..., None]) -> None:
    records = [add_snapshot(store) for _ in range(40)]

    def fail() -> None:
        raise StoreError("the metadata hiccups")

    at("prune:written", fail)
    report = prune(store, NONE)
    failed = [what for what, _ in report.failures]
    assert failed == [record.snapshot_id for record in records[: len(failed)]]
    assert 0 < len(failed) < 40
    assert left(store) == failed
    assert len(report.layers) == 40 - len(failed)
    assert prune(store, NONE).deleted == failed
    assert problems(store) == []


def test_metadata_that_always_fail_are_given_up(store: Store, at: Callable[..., None]) -> None:
    records = [add_snapshot(store) for _ in range(100)]
    tries = []

    def fail() -> None:
        tries.append(1)
        raise StoreError("no")

    for _ in range(3):
        at("prune:written", fail)
    report = prune(store, NONE)
    assert len(tries) == 3
    assert [what for what, _ in report.failures] == [record.snapshot_id for record in records]


def test_a_collection_that_fails_is_told(store: Store, at: Callable[..., None]) -> None:
    record = add_snapshot(store)

    def fail() -> None:
        raise StoreError("not now")

    at("collect:condemned", fail)
    report = prune(store, NONE)
    assert report.deleted == [record.snapshot_id]
    assert (report.layers, report.freed_bytes) == ([], 0)
    assert report.failures == [("collect", "not now")]
    assert prune(store, KeepRules()).layers == list(record.layers)
