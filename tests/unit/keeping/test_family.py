"""The lineage as a tree."""

from __future__ import annotations

import dataclasses

from tests.stores import record_of
from tests.unit.keeping.test_quota import MB

from worldfork.core.ids import new_id
from worldfork.keeping.family import family
from worldfork.keeping.usage import measure_layers
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store import locks
from worldfork.store.leases import Holder
from worldfork.store.store import Store


def child_of(store: Store, parent: SnapshotRecord | None, **facts: object) -> SnapshotRecord:
    draft = store.begin_layer(form="trusted")
    draft.path.mkdir()
    (draft.path / "file").write_text(draft.layer_id)
    layers = (draft.layer_id, *(parent.layers if parent else ()))
    record = record_of(layers, parent_id=parent.snapshot_id if parent else None)
    record = dataclasses.replace(record, **facts)  # type: ignore[arg-type]
    store.publish(record, [draft.layer_id])
    return record


def test_an_empty_store(store: Store) -> None:
    assert family(store) == []


def test_children_follow_their_parent(store: Store) -> None:
    root = child_of(store, None, label="root")
    left = child_of(store, root)
    right = child_of(store, root, level="volatile")
    other = child_of(store, None)
    below = child_of(store, left)
    store.set_name("best", below.snapshot_id)
    store.make_durable(other.snapshot_id)
    store.set_exported(other.snapshot_id, "s3://there")
    found = family(store)
    assert [(each.snapshot_id, each.depth, each.children) for each in found] == [
        (root.snapshot_id, 0, 2),
        (left.snapshot_id, 1, 1),
        (below.snapshot_id, 2, 0),
        (right.snapshot_id, 1, 0),
        (other.snapshot_id, 0, 0),
    ]
    assert [each.names for each in found] == [(), (), ("best",), (), ()]
    assert [each.state for each in found] == ["ready"] * 4 + ["exported"]
    assert [each.level for each in found] == ["local", "local", "local", "volatile", "local"]
    assert found[0].label == "root"
    assert not any(each.parent_is_gone for each in found)


def test_sizes(store: Store) -> None:
    root = child_of(store, None)
    (store.layer_path(root.layers[0]) / "data").write_bytes(b"x" * MB)
    child_of(store, root)
    assert [(each.stored_bytes, each.added_bytes) for each in family(store)] == [(None, None)] * 2
    measure_layers(store)
    first, second = family(store)
    assert first.stored_bytes == first.added_bytes
    assert first.stored_bytes is not None
    assert second.added_bytes is not None
    assert second.stored_bytes == first.stored_bytes + second.added_bytes
    assert second.added_bytes < 100_000 < MB <= first.stored_bytes


def test_a_parent_that_was_deleted(store: Store) -> None:
    root = child_of(store, None)
    middle = child_of(store, root)
    leaf = child_of(store, middle)
    store.delete_snapshot(middle.snapshot_id)
    found = {each.snapshot_id: each for each in family(store)}
    assert list(found) == [root.snapshot_id, leaf.snapshot_id]
    assert (found[leaf.snapshot_id].depth, found[leaf.snapshot_id].parent_id) == (0, middle.snapshot_id)
    assert found[leaf.snapshot_id].parent_is_gone
    assert not found[root.snapshot_id].parent_is_gone


def test_only_the_living_count_as_forks(store: Store) -> None:
    record = child_of(store, None)
    dead, alive = new_id("sb"), [new_id("sb") for _ in range(3)]
    held = [Holder(each, snapshot_id=record.snapshot_id, layers=record.layers) for each in [dead, *alive]]
    store.hold(held)
    taken = [locks.take(store.lock_path(each)) for each in alive]
    store._clock.advance_s(1000)  # type: ignore[attr-defined]
    with store.reading(snapshot_id=record.snapshot_id, purpose="test"):
        assert [each.live_forks for each in family(store)] == [3]
    for lock in taken:
        assert lock is not None
        lock.release()


def test_a_circle_is_shown_and_ends(store: Store) -> None:
    one, two = new_id("sn"), new_id("sn")
    child_of(store, None, snapshot_id=one, parent_id=two)
    child_of(store, None, snapshot_id=two, parent_id=one)
    assert [each.snapshot_id for each in family(store)] == [one, two]


def test_a_long_chain(store: Store) -> None:
    record = child_of(store, None)
    for _ in range(1500):
        following = record_of(record.layers, parent_id=record.snapshot_id)
        store.publish(following, [])
        record = following
    assert family(store)[-1].depth == 1500
