"""Who holds what, and who counts as alive."""

from __future__ import annotations

import contextlib
import os
import resource

import pytest
from tests.stores import add_snapshot, in_child

from worldfork.core.clock import ManualClock
from worldfork.core.errors import ConfigError, NotFound
from worldfork.core.ids import new_id
from worldfork.store import locks
from worldfork.store.leases import Holder
from worldfork.store.store import Store


def test_what_is_held_is_listed(store: Store, clock: ManualClock) -> None:
    record = add_snapshot(store)
    first = Holder(new_id("sb"), snapshot_id=record.snapshot_id, facts='{"pid": 1}')
    clock.advance_s(1)
    store.hold([first])
    clock.advance_s(1)
    second = Holder(new_id("sb"), layers=record.layers)
    store.hold([second])
    assert [holder.holder_id for holder in store.holders()] == [first.holder_id, second.holder_id]
    found = store.holder(first.holder_id)
    assert (found.snapshot_id, found.facts, found.owner_id) == (record.snapshot_id, '{"pid": 1}', store.owner_id)
    assert store.holder(second.holder_id).layers == record.layers
    store.update_facts(first.holder_id, '{"pid": 2}')
    assert store.holder(first.holder_id).facts == '{"pid": 2}'


def test_all_hold_or_none(store: Store) -> None:
    record = add_snapshot(store)
    good = Holder(new_id("sb"), snapshot_id=record.snapshot_id)
    for bad in (
        Holder(new_id("sb"), snapshot_id=new_id("sn")),
        Holder(new_id("sb"), layers=(*record.layers, new_id("ly"))),
        Holder(new_id("sb"), snapshot_id=record.snapshot_id, layers=(new_id("ly"),)),
    ):
        with pytest.raises(NotFound):
            store.hold([good, bad])
    with pytest.raises(ConfigError):
        store.hold([good, Holder("../evil")])
    assert store.holders() == []


def test_holding_again_moves_on_and_keeps_owner_and_age(store: Store, clock: ManualClock) -> None:
    first, second = add_snapshot(store), add_snapshot(store)
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, snapshot_id=first.snapshot_id)])
    before = store.holder(sandbox)
    clock.advance_s(5)
    store.hold([Holder(sandbox, layers=second.layers, facts='{"n": 1}')])
    after = store.holder(sandbox)
    assert (after.snapshot_id, after.layers, after.facts) == (None, second.layers, '{"n": 1}')
    assert (after.owner_id, after.created_s) == (before.owner_id, before.created_s)


def test_holding_on_changes_what_is_held_and_brings_nothing_back(store: Store) -> None:
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, facts='"before"')])
    store.hold_on(Holder(sandbox, facts='"after"'))
    assert store.holder(sandbox).facts == '"after"'
    store.release([sandbox])
    with pytest.raises(NotFound) as caught:
        store.hold_on(Holder(sandbox, facts='"again"'))
    assert caught.value.fields["holder_id"] == sandbox
    assert store.holders() == []


def test_this_owners_drafts_can_be_held_and_others_cannot(store: Store) -> None:
    draft = store.begin_layer(form="trusted")
    store.hold([Holder(new_id("sb"), layers=(draft.layer_id,))])
    other = Store.open(store.home)
    with pytest.raises(NotFound):
        other.hold([Holder(new_id("sb"), layers=(draft.layer_id,))])
    other.close()


def test_release_is_for_many_and_idempotent(store: Store) -> None:
    ids = [new_id("sb") for _ in range(5)]
    store.hold([Holder(sandbox) for sandbox in ids])
    (store.lock_path(ids[0])).write_text("")
    store.release(ids)
    store.release(ids)
    assert store.holders() == []
    assert not store.lock_path(ids[0]).exists()
    with pytest.raises(NotFound):
        store.holder(ids[0])
    with pytest.raises(NotFound):
        store.update_facts(ids[0], "{}")


def test_release_does_without_a_free_descriptor(store: Store) -> None:
    sandbox = new_id("sb")
    store.hold([Holder(sandbox)])
    store.lock_path(sandbox).write_text("")
    held: list[int] = []

    def run_out() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))

    def work() -> None:
        assert store.holders() != []
        run_out()
        try:
            store.release([sandbox])
        finally:
            for descriptor in held:
                os.close(descriptor)
        assert store.holders() == []
        assert store.lock_path(sandbox).exists()

    assert in_child(work) == 0
    assert store.sweep().leftovers == [f"locks/{sandbox}"]


def test_a_process_may_hold_by_its_own_lock(store: Store) -> None:
    store.hold([Holder(store.owner_id, kind="process")])
    assert store.is_living(store.holder(store.owner_id), grace_s=0)
    store.release([store.owner_id])
    assert store.is_alive(store.owner_id)


def test_alive_is_who_holds_the_lock(store: Store, clock: ManualClock) -> None:
    sandbox = new_id("sb")
    store.hold([Holder(sandbox)])
    clock.advance_s(1000)
    assert not store.is_living(store.holder(sandbox))
    lock = locks.take(store.lock_path(sandbox))
    assert lock is not None
    assert store.is_alive(sandbox)
    assert store.is_living(store.holder(sandbox))
    lock.release()
    assert not store.is_alive(sandbox)


def test_a_new_holder_has_a_grace_while_its_maker_lives(store: Store, clock: ManualClock) -> None:
    sandbox = new_id("sb")
    store.hold([Holder(sandbox)])
    assert not store.is_alive(sandbox)
    assert store.is_living(store.holder(sandbox))
    clock.advance_s(29)
    assert store.is_living(store.holder(sandbox))
    clock.advance_s(2)
    assert not store.is_living(store.holder(sandbox))

    orphan = new_id("sb")
    assert in_child(lambda: store.hold([Holder(orphan)])) == 0
    assert not store.is_living(store.holder(orphan))


def test_the_owner_is_alive_and_looking_does_not_kill_it(store: Store) -> None:
    owner = store.owner_id
    other = Store.open(store.home)
    assert other.owner_id != owner
    for _ in range(3):
        assert other.is_alive(owner)
        assert store.is_alive(owner)
    assert in_child(lambda: assert_alive(store, owner)) == 0
    other.close()
    assert in_child(lambda: assert_alive(store, owner)) == 0


def assert_alive(store: Store, owner: str) -> None:
    assert store.owner_id != owner, "a forked child is an owner of its own"
    assert store.is_alive(owner)
