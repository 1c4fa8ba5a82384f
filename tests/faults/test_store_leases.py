"""Processes that are stopped for longer than their leases last, at any moment that matters, and then go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.actors import Actor
from tests.stores import FORM, add_world, facts_of, home_at, in_child, record_of, strays, torn, write_world

from worldfork.core.errors import Locked, NotFound
from worldfork.core.ids import new_id
from worldfork.exchange.arrival import import_snapshot
from worldfork.exchange.departure import export_snapshot
from worldfork.keeping import squash
from worldfork.keeping.check import check
from worldfork.keeping.sealing import seal
from worldfork.lineage import place as places
from worldfork.store import connections
from worldfork.store.leases import Holder
from worldfork.store.store import Store

TTL_S = 1.0
PATIENCE_S = 30.0


@pytest.fixture
def home(memory: Path) -> Path:
    return memory / "home"


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with closing(Store.open(home_at(home), ttl_s=TTL_S)) as opened:
        yield opened


def in_its_own(home: Path, work: Callable[[Store], object], *stops: str) -> Actor:
    """Start a process that opens the store for itself."""
    return Actor(lambda: work(Store.open(home_at(home), ttl_s=TTL_S)), *stops)


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def past_its_leases(store: Store, actor: Actor) -> None:
    """Stop a process until everybody takes its drafts and readings to be lost."""
    actor.stand_still()
    with store.database.read() as db:
        rows = db.execute(
            "SELECT owner_id, renewed_s FROM layers WHERE state = 'building'"
            " UNION SELECT owner_id, renewed_s FROM holders WHERE kind = 'reading'"
        ).fetchall()
    owners = [row for row in rows if row[0] != store.owner_id]
    assert owners
    until(lambda: not any(store.is_going(*owner) for owner in owners))


def expect_order(store: Store) -> None:
    assert store.sweep(grace_s=0).failures == []
    assert store.collect().failures == []
    for record in store.snapshots():
        assert torn(store, record) == []
    assert check(store, read_data=True).findings == []
    assert strays(store) == []


def test_a_writer_that_stood_still_publishes_nothing(store: Store, home: Path) -> None:
    """restic#3126: the lock of a sleeping laptop was removed, and its backup finished with holes."""

    def write(mine: Store) -> str:
        draft = mine.begin_layer(form=FORM)
        write_world(draft.path, "half")
        mine.set_name("here", None)  # the step at which it stands
        try:
            (draft.path / "other").write_text("half")
            return "written"
        except FileNotFoundError:
            return "gone"
        finally:
            mine.publish(record_of((draft.layer_id,), form=FORM), [draft.layer_id])

    writer = in_its_own(home, write, "set_name:committed")
    writer.meet("set_name:committed")
    past_its_leases(store, writer)
    report = store.sweep()
    assert len(report.drafts) == 1
    writer.wake()
    assert writer.end().error == "NotFound"
    assert store.snapshots() == []
    expect_order(store)


def test_a_writer_that_takes_its_time_keeps_its_draft(store: Store, home: Path) -> None:
    def write(mine: Store) -> None:
        record = add_world(mine, "slow", publish=False)
        mine.set_name("here", None)
        mine.publish(record, record.layers)

    writer = in_its_own(home, write, "set_name:committed")
    writer.meet("set_name:committed")
    end_s = time.monotonic() + 2.5 * TTL_S
    while time.monotonic() < end_s:
        assert store.sweep().drafts == []
        time.sleep(0.05)
    assert writer.end().error == ""
    assert len(store.snapshots()) == 1
    expect_order(store)


def archive_of(store: Store, path: Path) -> str:
    record = add_world(store, "top", below=add_world(store, "base"))
    with open(path, "wb", buffering=0) as sink:
        export_snapshot(store, record.snapshot_id, sink)
    return record.snapshot_id


def arrive(store: Store, path: Path) -> str:
    with open(path, "rb", buffering=0) as source:
        return import_snapshot(store, source, FORM).snapshot_id


@pytest.mark.parametrize("step", ["import:begun", "import:path", "import:read"])
def test_an_import_that_stood_still_publishes_nothing(store: Store, home: Path, tmp_path: Path, step: str) -> None:
    with closing(Store.open(home_at(tmp_path / "elsewhere"))) as other:
        snapshot_id = archive_of(other, tmp_path / "archive")
    importer = in_its_own(home, lambda mine: arrive(mine, tmp_path / "archive"), step)
    importer.meet(step)
    past_its_leases(store, importer)
    # Whoever comes second does not wait for ever for what may never go on.
    with pytest.raises(Locked):
        arrive(store, tmp_path / "archive")
    assert store.sweep().drafts
    assert store.collect().failures == []
    importer.wake()
    assert importer.end().error in ("StoreError", "NotFound", "Corrupt"), importer.message
    assert store.snapshots() == []
    assert arrive(store, tmp_path / "archive") == snapshot_id
    expect_order(store)
    assert store.snapshot(snapshot_id).state == "durable"


def test_two_that_bring_the_same_layer_and_the_first_one_stands_still(store: Store, home: Path) -> None:
    """The first one's draft is lost and its id given to the second, which it must not disturb."""
    layer_id = new_id("ly")

    def bring(mine: Store) -> None:
        draft = mine.begin_layer(form=FORM, layer_id=layer_id)
        try:
            mine.publish(record_of((draft.layer_id,), form=FORM), [layer_id])
        finally:
            mine.abandon_layer(layer_id, owner_id=mine.owner_id)

    for step in ("begin_layer:announced", "begin_layer:made"):
        first = in_its_own(home, bring, step)
        first.meet(step)
        with pytest.raises(Locked) as caught:
            store.begin_layer(form=FORM, layer_id=layer_id)
        assert len(caught.value.holders) == 1
        past_its_leases(store, first)
        draft = store.begin_layer(form=FORM, layer_id=layer_id)
        write_world(draft.path, "second")
        first.wake()
        assert first.end().error in ("NotFound", "StoreError"), first.message
        assert store.layer(layer_id).state == "building"
        record = add_world(store, "above", publish=False)
        mine = record_of((record.layers[0], layer_id), form=FORM)
        mine = type(mine)(**{**vars(mine), "facts": facts_of(["above", "second"])})
        store.publish(mine, mine.layers)
        expect_order(store)
        store.delete_snapshot(mine.snapshot_id)
        store.collect()
        expect_order(store)


@pytest.mark.parametrize("step", ["reading:begun", "seal:synced"])
def test_a_seal_that_stood_still_says_nothing_of_a_layer_that_went(store: Store, home: Path, step: str) -> None:
    record = add_world(store, "base")
    sealer = in_its_own(home, lambda mine: seal(mine, record.layers[0]), step)
    sealer.meet(step)
    store.delete_snapshot(record.snapshot_id)
    assert store.collect().layers == []
    past_its_leases(store, sealer)
    assert len(store.sweep().holders) == 1
    assert store.collect().layers == list(record.layers)
    sealer.wake()
    assert sealer.end().error in ("NotFound", "StoreError"), sealer.message
    expect_order(store)


def deep(store: Store) -> list[str]:
    record = None
    found = []
    for number in range(5):
        record = add_world(store, f"deep-{number}", below=record)
        found.append(record.snapshot_id)
    assert store.make_all_durable(found) == {}
    return found


def squash_small(store: Store) -> list[object]:
    squash.DEEP, squash._FIRST, squash._FURTHER = 3, 2, 2  # in a process of its own
    from worldfork.keeping.usage import measure_layers

    measure_layers(store)
    report = squash.squash_deep(store)
    return [len(report.merged), report.failures]


@pytest.mark.parametrize("step", ["squash:merged", "squash:durable"])
def test_a_squash_that_stood_still_puts_nobody_onto_a_merge_with_holes(store: Store, home: Path, step: str) -> None:
    snapshots = deep(store)
    squasher = in_its_own(home, squash_small, step)
    squasher.meet(step)
    past_its_leases(store, squasher)
    store.sweep()
    for snapshot_id in snapshots[1:]:
        store.delete_snapshot(snapshot_id)
    store.collect()
    squasher.wake()
    squasher.end()
    assert squasher.error == ""
    assert [record.snapshot_id for record in store.snapshots()] == snapshots[:1]
    expect_order(store)


def test_a_squash_that_stood_still_beside_living_snapshots_is_done_again(store: Store, home: Path) -> None:
    deep(store)
    squasher = in_its_own(home, squash_small, "squash:merged")
    squasher.meet("squash:merged")
    past_its_leases(store, squasher)
    assert len(store.sweep().drafts) == 1
    squasher.wake()
    assert squasher.end().error == ""
    expect_order(store)
    again = in_its_own(home, squash_small).join()
    assert again.value[0] >= 1
    assert again.value[1] == []
    expect_order(store)
    assert len(store.snapshots()[-1].layers) < 5


def test_an_export_that_stood_still_fails(store: Store, home: Path, tmp_path: Path) -> None:
    record = add_world(store, "top", below=add_world(store, "base"))

    def leave(mine: Store) -> None:
        with open(tmp_path / "archive", "wb", buffering=0) as sink:
            export_snapshot(mine, record.snapshot_id, sink)

    exporter = in_its_own(home, leave, "export:layer")
    exporter.meet("export:layer")
    past_its_leases(store, exporter)
    store.sweep()
    for one in store.snapshots():
        store.delete_snapshot(one.snapshot_id)
    assert len(store.collect().layers) == 2
    exporter.wake()
    assert exporter.end().error in ("StoreError", "NotFound", "Corrupt"), exporter.message
    expect_order(store)


def test_a_collector_that_stood_still_removes_nothing_that_was_put_to_use_again(store: Store, home: Path) -> None:
    """kopia#1949: a collection went on after five hours of sleep, and removed what had come to be needed."""
    gone, kept = add_world(store, "gone"), add_world(store, "kept")
    for record in (gone, kept):
        store.delete_snapshot(record.snapshot_id)
    collector = in_its_own(home, lambda mine: mine.collect().layers, "collect:committed")
    collector.meet("collect:committed")
    collector.stand_still()
    time.sleep(TTL_S)
    with store.reading(purpose="test") as lease:
        assert lease.claim([*kept.layers, *gone.layers, new_id("ly")]) == {*kept.layers, *gone.layers}
        store.publish(kept, [])
    collector.wake()
    # Of what was claimed and then let go without a snapshot it knows nothing either: the next one does.
    assert collector.end().value == []
    assert store.collect().layers == list(gone.layers)
    expect_order(store)
    assert [record.snapshot_id for record in store.snapshots()] == [kept.snapshot_id]


def test_a_process_stopped_in_a_transaction_keeps_others_for_a_bounded_time(
    store: Store, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = add_world(store, "base")
    other = add_world(store, "other")
    store.delete_snapshot(other.snapshot_id)
    monkeypatch.setattr(connections, "BUSY_S", 0.3)
    collector = in_its_own(home, lambda mine: mine.collect().layers, "collect:forgotten")
    collector.meet("collect:forgotten")
    collector.stand_still()
    for call in (
        lambda: store.hold([Holder(new_id("sb"), snapshot_id=record.snapshot_id)]),
        lambda: add_world(store, "new"),
        lambda: store.delete_snapshot(record.snapshot_id),
    ):
        with pytest.raises(Locked):
            call()
    # Who only reads goes on.
    assert torn(store, store.snapshot(record.snapshot_id)) == []
    collector.wake()
    assert collector.end().value == list(other.layers)
    add_world(store, "new")
    expect_order(store)


def test_what_a_stopped_process_promised_is_brought_to_disk_by_others(store: Store, home: Path) -> None:
    def promise(mine: Store) -> str:
        record = add_world(mine, "promised")
        mine.make_durable(record.snapshot_id)
        return record.snapshot_id

    owner = in_its_own(home, promise, "publish:committed", "make_durable:noted")
    owner.meet("publish:committed")
    assert store.pending_durability() == []
    owner.stand_still()
    until(lambda: bool(store.pending_durability()))
    [snapshot_id] = store.pending_durability()
    assert store.make_all_durable([snapshot_id]) == {}
    assert store.snapshot(snapshot_id).state == "durable"
    owner.wake()
    # It finds that it is done.
    assert owner.end().value == snapshot_id
    expect_order(store)


def test_whoever_waits_for_a_stopped_process_hears_of_it(store: Store, home: Path) -> None:
    record = add_world(store, "base")
    holder = store.begin_layer(form=FORM)

    def sweep(mine: Store) -> list[str]:
        return mine.sweep(grace_s=0).drafts

    store.hold([Holder(new_id("sb"), snapshot_id=record.snapshot_id)])
    sweeper = in_its_own(home, sweep, "sweep:holder_cleared")
    sweeper.meet("sweep:holder_cleared")
    sweeper.stand_still()
    sealer = in_its_own(home, lambda mine: seal(mine, record.layers[0]).digest, "seal:synced")
    sealer.meet("seal:synced")
    sealer.stand_still()
    began_s = time.monotonic()
    for call in (store.sweep, lambda: seal(store, record.layers[0])):
        with pytest.raises(Locked) as caught:
            call()
        assert "stopped" in caught.value.remedy
        assert caught.value.retryable
    assert time.monotonic() - began_s < 20 * TTL_S
    # Nobody else waits.
    store.collect()
    add_world(store, "more")
    with store.single_flight("something else"):
        pass
    for actor in (sweeper, sealer):
        actor.wake()
        assert actor.end().error == "", actor.message
    store.abandon_layer(holder.layer_id)
    store.sweep()
    expect_order(store)


def test_a_killed_owner_is_swept_at_once(store: Store, home: Path) -> None:
    """containerd#6294, restic#5090: what dead owners held stayed until their leases ran out, or for ever."""
    base = add_world(store, "base")

    def hold(mine: Store) -> None:
        mine.begin_layer(form=FORM).path.mkdir()
        with mine.reading(layers=base.layers, purpose="test"), mine.single_flight("key"):
            mine.set_name("here", None)

    holder = in_its_own(home, hold, "set_name:committed")
    holder.meet("set_name:committed")
    store.delete_snapshot(base.snapshot_id)
    assert store.sweep().drafts == store.sweep().holders == []
    assert store.collect().layers == []
    holder.kill()
    report = store.sweep()
    assert len(report.drafts) == len(report.holders) == 1
    assert store.collect().layers == list(base.layers)
    with store.single_flight("key", wait_s=0):
        pass
    expect_order(store)
    assert os.listdir(store.home.layers) == []


def test_a_lost_reading_says_so_on_leaving(store: Store, home: Path) -> None:
    base = add_world(store, "base")

    def read(mine: Store) -> list[str]:
        with mine.reading(snapshot_id=base.snapshot_id, purpose="test"):
            mine.set_name("here", None)
        return torn(mine, base)

    reader = in_its_own(home, read, "set_name:committed")
    reader.meet("set_name:committed")
    past_its_leases(store, reader)
    with pytest.raises(NotFound):
        store.delete_snapshot(new_id("sn"))
    store.sweep()
    reader.wake()
    assert reader.end().error == "StoreError"
    assert "stood still" in reader.message
    expect_order(store)


def test_a_home_is_settled_although_a_sweep_stands_still(
    store: Store, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a dead process had promised is brought to disk by whoever opens the home next, and nobody waits for ever."""
    promised: list[str] = []
    owner = in_its_own(home, lambda mine: add_world(mine, "promised").snapshot_id, "publish:committed")
    owner.meet("publish:committed")
    owner.kill()
    promised += [record.snapshot_id for record in store.snapshots()]
    store.hold([Holder(new_id("sb"), snapshot_id=promised[0])])
    sweeper = in_its_own(home, lambda mine: mine.sweep(grace_s=0).holders, "sweep:holder_cleared")
    sweeper.meet("sweep:holder_cleared")
    sweeper.stand_still()
    monkeypatch.setenv("WORLDFORK_HOME", str(home))
    monkeypatch.setenv("WORLDFORK_LEASE_TTL_S", f"{TTL_S:.0f}")

    def visit() -> None:
        places.place()
        places.close_places()  # which waits for what it has begun

    assert in_child(visit) == 0
    assert store.snapshot(promised[0]).state == "durable"
    sweeper.wake()
    assert len(sweeper.end().value) == 1
    expect_order(store)
