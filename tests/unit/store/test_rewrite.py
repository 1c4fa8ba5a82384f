"""Durable snapshots may come to stand on other layers of the same content, and collection takes the old ones."""

from __future__ import annotations

import pytest
from tests.stores import add_snapshot, problems, record_of

from worldfork.core.errors import Corrupt, NotFound, StoreError
from worldfork.core.ids import new_id
from worldfork.store.leases import Holder
from worldfork.store.snapshots import exchanged
from worldfork.store.store import Store


def durable(store: Store, below: tuple[str, ...] = ()) -> tuple[str, tuple[str, ...]]:
    record = add_snapshot(store, below=below)
    store.make_durable(record.snapshot_id)
    return record.snapshot_id, record.layers


@pytest.mark.parametrize(
    ("stack", "run", "by", "expected"),
    [
        ("abc", "b", "x", "axc"),
        ("abc", "bc", "x", "ax"),
        ("abc", "abc", "x", "x"),
        ("abc", "ac", "x", "abc"),
        ("abc", "cd", "x", "abc"),
        ("abc", "z", "x", "abc"),
        ("abc", "b", "", "ac"),
        ("abc", "c", "a", "abc"),
        ("abc", "a", "c", "abc"),
        ("abc", "bc", "b", "ab"),
    ],
)
def test_only_a_whole_run_is_exchanged(stack: str, run: str, by: str, expected: str) -> None:
    assert "".join(exchanged(tuple(stack), tuple(run), tuple(by))) == expected


def test_every_durable_snapshot_with_the_run_changes_and_no_other(store: Store) -> None:
    first, low = durable(store)
    second, high = durable(store, low)
    other, single = durable(store)
    ready = add_snapshot(store, below=low)
    assert store.rewrite(low, single) == 2
    assert store.snapshot(first).layers == single
    assert store.snapshot(second).layers == (high[0], *single)
    assert store.snapshot(other).layers == single
    assert store.snapshot(ready.snapshot_id).layers == (ready.layers[0], *low), "a ready one goes on as it is"
    assert store.collect().layers == []
    store.delete_snapshot(ready.snapshot_id)
    assert set(store.collect().layers) == {*low, ready.layers[0]}
    assert problems(store) == []


def test_who_stands_on_the_old_layers_keeps_them(store: Store) -> None:
    snapshot_id, old = durable(store)
    _, new = durable(store)
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, snapshot_id=snapshot_id, layers=old)])
    store.rewrite(old, new)
    assert store.collect().layers == []
    store.publish(record_of((add_snapshot(store).layers[0], *old)), [])
    store.release([sandbox])
    assert store.collect().layers == []
    assert store.layer_path(old[0]).is_dir()


def test_a_holder_that_comes_too_late_is_told_so(store: Store) -> None:
    snapshot_id, old = durable(store)
    _, new = durable(store)
    store.rewrite(old, new)
    store.collect()
    with pytest.raises(NotFound):
        store.hold([Holder(new_id("sb"), snapshot_id=snapshot_id, layers=old)])
    assert store.holders() == []


def test_nothing_is_put_onto_a_layer_that_is_not_durable(store: Store) -> None:
    snapshot_id, old = durable(store)
    ready = add_snapshot(store)
    with pytest.raises(NotFound):
        store.rewrite(old, ready.layers)
    assert store.snapshot(snapshot_id).layers == old


def test_a_rewrite_between_look_and_word_of_a_collection_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot_id, old = durable(store)
    lonely, spare = durable(store)
    store.delete_snapshot(lonely)
    look = store._look

    def rewrite_after_the_look() -> tuple[set[str], int, int]:
        seen = look()
        assert seen[0] == set(spare)
        assert store.rewrite(old, spare) == 1
        return seen

    monkeypatch.setattr(store, "_look", rewrite_after_the_look)
    assert store.collect().layers == []
    monkeypatch.setattr(store, "_look", look)
    assert store.collect().layers == list(old)
    assert store.snapshot(snapshot_id).layers == spare
    assert problems(store) == []


def test_a_hole_stops_the_collection(store: Store) -> None:
    _snapshot_id, layers = durable(store)
    unused = add_snapshot(store)
    store.delete_snapshot(unused.snapshot_id)
    with store.database.write() as db:
        db.execute("DELETE FROM layers WHERE layer_id = ?", (layers[0],))
    with pytest.raises(Corrupt, match=layers[0]):
        store.collect()
    assert store.layer_path(unused.layers[0]).is_dir()


class TestReadings:
    def test_what_is_read_stays_although_its_snapshot_goes(self, store: Store) -> None:
        record = add_snapshot(store)
        with store.reading(snapshot_id=record.snapshot_id, purpose="test") as lease:
            assert lease.layers == record.layers
            store.delete_snapshot(record.snapshot_id)
            assert store.collect().layers == []
            assert store.layer_path(record.layers[0]).is_dir()
        assert store.collect().layers == list(record.layers)
        assert store.holders() == []

    def test_a_lost_lease_is_told_at_the_end(self, store: Store) -> None:
        record = add_snapshot(store)
        block = store.reading(snapshot_id=record.snapshot_id, purpose="test")
        lease = block.__enter__()
        lease.check()
        store.release([lease.reading_id])
        with pytest.raises(StoreError, match="ran out"):
            lease.check()
        with pytest.raises(StoreError, match="ran out"):
            lease.claim(record.layers)
        with pytest.raises(StoreError, match="ran out"):
            block.__exit__(None, None, None)

    def test_an_error_of_the_block_passes(self, store: Store) -> None:
        record = add_snapshot(store)
        with pytest.raises(ZeroDivisionError):
            with store.reading(layers=record.layers, purpose="test"):
                raise ZeroDivisionError
        assert store.holders() == []

    def test_a_condemned_layer_that_is_claimed_lives_on(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        record, keep = add_snapshot(store), add_snapshot(store)
        store.delete_snapshot(record.snapshot_id)
        condemn = store._condemn
        with store.reading(layers=keep.layers, purpose="test") as lease:

            def claim_after_the_mark() -> list[str]:
                condemned = condemn()
                assert condemned == list(record.layers)
                assert lease.claim([*record.layers, new_id("ly")]) == set(record.layers)
                return condemned

            monkeypatch.setattr(store, "_condemn", claim_after_the_mark)
            assert store.collect().layers == []
            monkeypatch.setattr(store, "_condemn", condemn)
            assert store.layer(record.layers[0]).state == "ready"
            again = record_of(record.layers)
            store.publish(again, [])
        assert store.collect().layers == []
        assert problems(store) == []

    def test_a_condemned_layer_without_content_is_not_there(self, store: Store) -> None:
        record, keep = add_snapshot(store), add_snapshot(store)
        store.delete_snapshot(record.snapshot_id)
        store._condemn()
        store.trash(store.home.layers / record.layers[0])  # as a collector that died before its word was kept
        with store.reading(layers=keep.layers, purpose="test") as lease:
            assert lease.claim(record.layers) == set()
            draft = store.begin_layer(form="trusted", layer_id=record.layers[0])
            assert draft.layer_id == record.layers[0]
            draft.path.mkdir()
            (draft.path / "file").write_text(draft.layer_id)
            assert store.collect().layers == []
        store.publish(record_of(record.layers), record.layers)
        store.empty_trash()
        assert problems(store) == []


def test_a_damaged_record_is_told_and_nothing_goes(store: Store) -> None:
    unused = add_snapshot(store)
    durable(store)
    store.delete_snapshot(unused.snapshot_id)
    with store.database.write() as db:
        db.execute("UPDATE snapshots SET record = '{' WHERE state = 'durable'")
    for look in (store.collect, store.snapshots):
        with pytest.raises(Corrupt, match="store check"):
            look()
    assert store.layer_path(unused.layers[0]).is_dir()
