"""Layers, snapshots and names."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.stores import add_snapshot, home_at, in_child, problems, record_of

from worldfork.core.errors import ConfigError, Corrupt, Locked, NotFound, OutOfSpace, StoreError
from worldfork.core.ids import new_id
from worldfork.keeping.check import check
from worldfork.keeping.family import family
from worldfork.store import locks
from worldfork.store.leases import Holder
from worldfork.store.store import Store


def test_a_snapshot_comes_back_as_it_was_published(store: Store) -> None:
    first = add_snapshot(store)
    second = add_snapshot(store, below=first.layers)
    assert store.snapshot(second.snapshot_id) == second
    assert store.snapshots() == [first, second]
    assert [store.layer(layer_id).state for layer_id in second.layers] == ["ready", "ready"]
    assert (store.layer_path(second.layers[0]) / "file").read_text() == second.layers[0]
    assert problems(store) == []


def test_another_process_sees_it_and_so_does_a_later_one(store: Store) -> None:
    record = add_snapshot(store)

    def look() -> None:
        other = Store.open(store.home)
        assert other.snapshot(record.snapshot_id) == record
        other.close()

    assert in_child(look) == 0
    store.close()
    again = Store.open(store.home)
    assert again.snapshots() == [record]
    again.close()


def test_a_draft_is_announced_before_there_is_anything_of_it(store: Store) -> None:
    draft = store.begin_layer(form="trusted")
    assert store.layer(draft.layer_id).state == "building"
    assert draft.path == store.home.layers / draft.layer_id / "fs"
    assert draft.path.parent.is_dir()
    assert not draft.path.exists()


def test_an_abandoned_draft_is_gone_and_may_be_abandoned_again(store: Store) -> None:
    draft = store.begin_layer(form="user")
    draft.path.mkdir()
    store.abandon_layer(draft.layer_id)
    store.abandon_layer(draft.layer_id)
    assert not draft.path.exists()
    with pytest.raises(NotFound):
        store.layer(draft.layer_id)
    store.empty_trash()
    assert problems(store) == []


def test_a_published_layer_cannot_be_abandoned(store: Store) -> None:
    record = add_snapshot(store)
    with pytest.raises(ConfigError):
        store.abandon_layer(record.layers[0])
    assert problems(store) == []


def test_ids_that_are_paths_are_refused(store: Store) -> None:
    for text in ("../../etc", "ly-", "", "ly-aaaaaaaaaaaaaaa/"):
        with pytest.raises(ConfigError):
            store.layer_path(text)
        with pytest.raises(ConfigError):
            store.abandon_layer(text)


@pytest.mark.parametrize(
    "facts",
    [
        {"label": "\udcff"},
        {"label": "x" * (1 << 20)},
        {"facts": {"limits": {"cpus": float("inf")}}},
        {"facts": {"limits": {"cpus": float("nan")}}},
        {"facts": {"env": {"A": "\ud800"}}},
        {"facts": {"env": {"\udfff": "A"}}},
        {"base": {"kind": "host", "binds": [["\ud800", "/x"]]}},
        {"created_s": float("-inf")},
    ],
)
def test_a_record_that_would_stop_all_listings_is_refused(store: Store, facts: dict[str, object]) -> None:
    draft = store.begin_layer(form="user")
    draft.path.mkdir()
    with pytest.raises(ConfigError):
        store.publish(replace(record_of((draft.layer_id,), form="user"), **facts), [draft.layer_id])  # type: ignore[arg-type]
    assert store.snapshots() == []
    assert store.layer(draft.layer_id).state == "building"


def test_what_the_system_gave_may_hold_any_bytes(store: Store) -> None:
    record = replace(
        add_snapshot(store, form="user"),
        snapshot_id=new_id("sn"),
        base={"kind": "dir", "path": "/x\udcff"},
        facts={"env": {"A\udc80": "\udcff \U0001f600"}},
        label="\U0001f600",
    )
    store.publish(record, [])
    assert store.snapshot(record.snapshot_id) == record
    assert len(family(store)) == 2
    assert check(store).sound


def test_a_form_must_be_known(store: Store) -> None:
    with pytest.raises(ConfigError):
        store.begin_layer(form="other")


def test_a_layer_that_cannot_fit_is_refused_at_once(store: Store) -> None:
    with pytest.raises(OutOfSpace) as caught:
        store.begin_layer(form="trusted", size_hint_bytes=1 << 60)
    assert caught.value.scope == "host"
    assert not list(store.home.layers.iterdir())


class TestPublish:
    def test_refuses_a_layer_that_does_not_exist(self, store: Store) -> None:
        draft = store.begin_layer(form="trusted")
        draft.path.mkdir()
        missing = new_id("ly")
        with pytest.raises(NotFound) as caught:
            store.publish(record_of((draft.layer_id, missing)), [draft.layer_id])
        assert caught.value.fields["layers"] == [missing]
        assert store.snapshots() == []
        assert store.layer(draft.layer_id).state == "building"

    def test_refuses_a_draft_without_content(self, store: Store) -> None:
        draft = store.begin_layer(form="trusted")
        with pytest.raises(NotFound):
            store.publish(record_of((draft.layer_id,)), [draft.layer_id])

    def test_refuses_the_draft_of_another_owner(self, store: Store) -> None:
        draft = store.begin_layer(form="trusted")
        draft.path.mkdir()
        other = Store.open(store.home)
        with pytest.raises(NotFound):
            other.publish(record_of((draft.layer_id,)), [draft.layer_id])
        other.close()

    def test_refuses_a_draft_that_was_taken_away_meanwhile(self, store: Store) -> None:
        draft = store.begin_layer(form="trusted")
        draft.path.mkdir()
        with store.database.write() as db:
            db.execute("DELETE FROM layers")
        with pytest.raises(NotFound):
            store.publish(record_of((draft.layer_id,)), [draft.layer_id])
        assert store.snapshots() == []

    def test_never_mixes_forms(self, store: Store) -> None:
        root = add_snapshot(store, form="trusted")
        draft = store.begin_layer(form="user")
        draft.path.mkdir()
        for form in ("user", "trusted"):
            with pytest.raises(ConfigError):
                store.publish(record_of((draft.layer_id, *root.layers), form=form), [draft.layer_id])
        assert len(store.snapshots()) == 1

    def test_the_same_id_twice_is_an_error_and_changes_nothing(self, store: Store) -> None:
        record = add_snapshot(store)
        with pytest.raises(StoreError):
            store.publish(record, [])
        assert store.snapshots() == [record]

    def test_a_snapshot_may_add_nothing(self, store: Store) -> None:
        first = add_snapshot(store)
        again = record_of(first.layers)
        store.publish(again, [])
        bare = record_of(())
        store.publish(bare, [])
        assert store.snapshot(bare.snapshot_id).layers == ()
        assert problems(store) == []


class TestDelete:
    def test_shared_layers_stay_and_others_go(self, store: Store) -> None:
        first = add_snapshot(store)
        second = add_snapshot(store, below=first.layers)
        store.delete_snapshot(first.snapshot_id)
        assert store.collect().layers == []
        third = add_snapshot(store, below=first.layers)
        store.delete_snapshot(second.snapshot_id)
        assert store.collect().layers == [second.layers[0]]
        store.delete_snapshot(third.snapshot_id)
        assert sorted(store.collect().layers) == sorted(third.layers)
        assert list(store.home.layers.iterdir()) == []
        assert problems(store) == []

    def test_what_is_not_there_cannot_be_deleted(self, store: Store) -> None:
        with pytest.raises(NotFound):
            store.delete_snapshot(new_id("sn"))

    def test_a_living_holder_keeps_it_and_a_dead_one_does_not(self, store: Store) -> None:
        record = add_snapshot(store)
        sandbox = new_id("sb")
        store.hold([Holder(sandbox, snapshot_id=record.snapshot_id)])
        lock = locks.take(store.lock_path(sandbox))
        assert lock is not None
        with pytest.raises(Locked) as caught:
            store.delete_snapshot(record.snapshot_id)
        assert caught.value.holders == [sandbox]
        lock.release()
        store.release([sandbox])
        store.delete_snapshot(record.snapshot_id)
        assert store.snapshots() == []

    def test_layers_of_a_holder_stay(self, store: Store) -> None:
        record = add_snapshot(store)
        sandbox = new_id("sb")
        store.hold([Holder(sandbox, layers=record.layers)])
        store.delete_snapshot(record.snapshot_id)
        assert store.collect().layers == []
        assert store.layer_path(record.layers[0]).exists()
        store.release([sandbox])
        assert store.collect().layers == list(record.layers)

    def test_a_layer_about_to_go_cannot_be_held(self, store: Store) -> None:
        record = add_snapshot(store)
        store.delete_snapshot(record.snapshot_id)
        store._condemn()
        with pytest.raises(NotFound):
            store.hold([Holder(new_id("sb"), layers=record.layers)])
        with pytest.raises(NotFound):
            store.publish(record_of(record.layers), [])

    def test_a_snapshot_published_during_the_look_keeps_its_layers(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = add_snapshot(store)
        store.delete_snapshot(first.snapshot_id)
        look = store._look

        def publish_after_the_look() -> tuple[set[str], int, int]:
            seen = look()
            assert seen[0] == set(first.layers)
            store.publish(record_of(first.layers), [])
            return seen

        monkeypatch.setattr(store, "_look", publish_after_the_look)
        assert store.collect().layers == []
        assert problems(store) == []


class TestNames:
    def test_a_name_stands_for_a_snapshot_until_told_otherwise(self, store: Store) -> None:
        first, second = add_snapshot(store), add_snapshot(store)
        assert store.named("main") is None
        store.set_name("main", first.snapshot_id)
        store.set_name("main", second.snapshot_id)
        store.set_name("other", first.snapshot_id)
        assert store.named("main") == second.snapshot_id
        assert store.names() == {"main": second.snapshot_id, "other": first.snapshot_id}
        store.set_name("main", None)
        assert store.names() == {"other": first.snapshot_id}

    def test_names_go_with_their_snapshot(self, store: Store) -> None:
        record = add_snapshot(store)
        store.set_name("main", record.snapshot_id)
        store.delete_snapshot(record.snapshot_id)
        assert store.names() == {}

    def test_a_name_for_nothing_is_refused(self, store: Store) -> None:
        with pytest.raises(NotFound):
            store.set_name("main", new_id("sn"))

    @pytest.mark.parametrize("name", ["", "a\nb", "x" * 201])
    def test_names_that_cannot_be(self, store: Store, name: str) -> None:
        with pytest.raises(ConfigError):
            store.set_name(name, add_snapshot(store).snapshot_id)


def test_a_record_that_cannot_be_read_is_corrupt(store: Store) -> None:
    record = add_snapshot(store)
    with store.database.write() as db:
        db.execute("UPDATE snapshots SET record = '{\"no\": 1}'")
    with pytest.raises(Corrupt):
        store.snapshot(record.snapshot_id)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store.open(home_at(tmp_path / "home"))
    owner = store.owner_id
    store.close()
    store.close()
    assert os.listdir(store.home.locks) == []
    assert not (store.home.locks / owner).exists()
    for call in (store.snapshots, lambda: store.begin_layer(form="trusted"), lambda: store.owner_id):
        with pytest.raises(StoreError):
            call()


def test_labels_are_changed_at_once_and_only_where_they_are_what_was_seen(store: Store) -> None:
    one, other = add_snapshot(store), add_snapshot(store)
    gone = new_id("sn")
    assert store.set_labels({one.snapshot_id: "end of sb-a", other.snapshot_id: "sn\u00e4p", gone: "x"}) == 2
    assert [each.label for each in store.snapshots()] == ["end of sb-a", "sn\u00e4p"]
    assert store.snapshot(one.snapshot_id) == replace(one, label="end of sb-a")
    seen = {one.snapshot_id: "end of sb-a", other.snapshot_id: "another"}
    assert store.set_labels({one.snapshot_id: "kept", other.snapshot_id: "kept"}, instead_of=seen) == 1
    assert [each.label for each in store.snapshots()] == ["kept", "sn\u00e4p"]
    assert store.set_labels({}) == 0
    with pytest.raises(ConfigError):
        store.set_labels({one.snapshot_id: "\udcff"})
