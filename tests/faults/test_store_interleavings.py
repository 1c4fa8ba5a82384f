"""Two processes at one store, in every order that matters: one stands at a named step while the other does its part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.actors import Actor
from tests.stores import FORM, add_world, facts_of, home_at, record_of, strays, tokens_of, torn, write_world

from worldfork.core.errors import Locked, NotFound
from worldfork.core.ids import new_id
from worldfork.exchange.arrival import import_snapshot
from worldfork.exchange.departure import export_snapshot
from worldfork.exchange.exchange import pull, push
from worldfork.keeping import squash
from worldfork.keeping.check import check
from worldfork.keeping.sealing import seal, seal_all
from worldfork.keeping.sharing import share_equal
from worldfork.keeping.usage import measure_layers
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store.leases import Holder
from worldfork.store.store import Store


@pytest.fixture
def home(memory: Path) -> Path:
    return memory / "home"


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with closing(Store.open(home_at(home))) as opened:
        yield opened


def in_its_own(home: Path, work: Callable[[Store], object], *stops: str) -> Actor:
    """Start a process that opens the store for itself."""
    return Actor(lambda: work(Store.open(home_at(home))), *stops)


def collect(store: Store) -> list[object]:
    report = store.collect()
    return [report.layers, report.failures]


def expect_order(store: Store, *snapshots: SnapshotRecord) -> None:
    """All these snapshots are there and whole, no others, and nothing lies about."""
    assert store.sweep(grace_s=0).failures == []
    assert store.collect().failures == []
    found = store.snapshots()
    assert {record.snapshot_id for record in found} == {record.snapshot_id for record in snapshots}
    for record in found:
        assert torn(store, record) == []
    assert check(store, read_data=True).findings == []
    assert strays(store) == []


def deleted(store: Store, token: str) -> SnapshotRecord:
    record = add_world(store, token)
    store.make_durable(record.snapshot_id)
    store.delete_snapshot(record.snapshot_id)
    return record


def on_top_of(store: Store, token: str, below: SnapshotRecord) -> SnapshotRecord:
    return add_world(store, token, below=below)


# --- what is being collected is put to use ---


def test_a_claim_between_the_mark_and_the_move_keeps_the_layer(store: Store, home: Path) -> None:
    """containerd#3787, kopia#1949: an answer "it exists" has to last."""
    gone = deleted(store, "gone")
    collector = in_its_own(home, collect, "collect:committed")
    collector.meet("collect:committed")
    assert store.layer(gone.layers[0]).state == "condemned"
    with store.reading(purpose="test") as lease:
        assert lease.claim(gone.layers) == set(gone.layers)
        assert collector.end().value == [[], []]
        again = on_top_of(store, "top", gone)
    # It may be torn by a crash of the machine until it was brought to disk once more.
    assert store.layer(gone.layers[0]).state == "ready"
    store.make_durable(again.snapshot_id)
    expect_order(store, again)


def test_a_claim_while_the_layer_is_moved_finds_nothing(store: Store, home: Path) -> None:
    gone = deleted(store, "gone")
    collector = in_its_own(home, collect, "discard:moved")
    collector.meet("discard:moved")

    def claim(mine: Store) -> list[str]:
        with mine.reading(purpose="test") as lease:
            return sorted(lease.claim(gone.layers))

    claimer = in_its_own(home, claim)
    assert collector.end().value == [list(gone.layers), []]
    assert claimer.join().value == []
    expect_order(store)


def test_a_claim_after_a_collector_died_in_the_move_finds_nothing(store: Store, home: Path) -> None:
    """The row is there still, and the content is not."""
    gone = deleted(store, "gone")
    collector = in_its_own(home, collect, "discard:moved")
    collector.meet("discard:moved")
    collector.kill()
    assert store.layer(gone.layers[0]).state == "condemned"
    with store.reading(purpose="test") as lease:
        assert lease.claim(gone.layers) == set()
        draft = store.begin_layer(form=FORM, layer_id=gone.layers[0])
        write_world(draft.path, "gone")
        store.publish(gone, gone.layers)
    expect_order(store, gone)


def test_a_snapshot_on_a_condemned_layer_is_refused_whole(store: Store, home: Path) -> None:
    gone = deleted(store, "gone")
    collector = in_its_own(home, collect, "collect:committed")
    collector.meet("collect:committed")
    for use in (
        lambda: on_top_of(store, "top", gone),
        lambda: store.hold([Holder(new_id("sb"), layers=gone.layers)]),
        lambda: store.reading(layers=gone.layers, purpose="test").__enter__(),
    ):
        with pytest.raises(NotFound):
            use()
    for record in store.layers_known():
        if record.state == "building":
            store.abandon_layer(record.layer_id)
    assert collector.end().value == [list(gone.layers), []]
    expect_order(store)


def by_a_snapshot(store: Store, unused: SnapshotRecord, _: ExitStack) -> list[SnapshotRecord]:
    return [on_top_of(store, "top", unused)]


def by_a_sandbox(store: Store, unused: SnapshotRecord, _: ExitStack) -> list[SnapshotRecord]:
    store.hold([Holder(new_id("sb"), layers=unused.layers)])
    return []


def by_a_reading(store: Store, unused: SnapshotRecord, block: ExitStack) -> list[SnapshotRecord]:
    block.enter_context(store.reading(layers=unused.layers, purpose="test"))
    return []


def by_a_rewrite(store: Store, unused: SnapshotRecord, _: ExitStack) -> list[SnapshotRecord]:
    twin = next(record for record in store.snapshots() if tokens_of(record) == ["gone"])
    assert store.rewrite(twin.layers, unused.layers) == 1
    return []


@pytest.mark.parametrize("use", [by_a_snapshot, by_a_sandbox, by_a_reading, by_a_rewrite])
def test_what_is_put_to_use_after_the_collectors_look_stays(
    store: Store, home: Path, use: Callable[[Store, SnapshotRecord, ExitStack], list[SnapshotRecord]]
) -> None:
    """The collector looks while others go on, and marks by what it saw."""
    unused, twin, other = deleted(store, "gone"), add_world(store, "gone"), add_world(store, "other")
    for record in (twin, other):
        store.make_durable(record.snapshot_id)
    collector = in_its_own(home, collect, "collect:looked")
    collector.meet("collect:looked")
    with ExitStack() as block:
        new = use(store, unused, block)
        store.delete_snapshot(other.snapshot_id)
        assert collector.end().error == ""
        assert collector.value[1] == []
        assert not set(collector.value[0]) & set(unused.layers)
        assert torn(store, unused) == []
    store.release([holder.holder_id for holder in store.holders()])
    expect_order(store, twin, *new)


def test_a_publication_on_layers_that_a_snapshot_gives_up_at_the_same_time(store: Store, home: Path) -> None:
    """The parent is deleted between the child's check and its transaction; whoever comes first decides."""
    parent = add_world(store, "parent")
    child = in_its_own(home, lambda mine: on_top_of(mine, "child", parent).snapshot_id, "publish:checked")
    child.meet("publish:checked")
    store.delete_snapshot(parent.snapshot_id)
    assert store.collect().layers == list(parent.layers)
    assert child.end().error == "NotFound"
    expect_order(store)


def test_two_collectors_at_once_remove_each_layer_once(store: Store, home: Path) -> None:
    gone = [deleted(store, f"gone-{number}") for number in range(20)]
    kept = add_world(store, "kept")
    ids = sorted(layer_id for record in gone for layer_id in record.layers)
    for step in ("collect:committed", "collect:moved"):
        collector = in_its_own(home, collect, step)
        collector.meet(step)
        mine = store.collect()
        assert mine.failures == []
        assert collector.end().value[1] == []
        assert sorted(collector.value[0] + mine.layers) == ids
        gone = [deleted(store, f"gone-{number}") for number in range(20)]
        ids = sorted(layer_id for record in gone for layer_id in record.layers)
    expect_order(store, kept)


# --- what is read is deleted ---


def test_what_is_being_read_stays_until_the_block_is_left(store: Store, home: Path) -> None:
    record = add_world(store, "base")

    def read(mine: Store) -> list[str]:
        with mine.reading(snapshot_id=record.snapshot_id, purpose="test") as lease:
            return torn(mine, replace(record, layers=lease.layers))

    reader = in_its_own(home, read, "reading:begun")
    reader.meet("reading:begun")
    store.delete_snapshot(record.snapshot_id)
    assert store.collect().layers == []
    assert store.sweep().holders == []
    assert reader.end().value == []
    assert store.collect().layers == list(record.layers)
    expect_order(store)


@pytest.mark.parametrize("step", ["seal:synced", "seal:renamed", "seal:written"])
def test_a_layer_that_is_being_sealed_outlives_its_snapshot(store: Store, home: Path, step: str) -> None:
    record = add_world(store, "base")
    sealer = in_its_own(home, lambda mine: seal(mine, record.layers[0]).digest, step)
    sealer.meet(step)
    store.delete_snapshot(record.snapshot_id)
    assert store.collect().layers == []
    assert sealer.end().value.startswith("b3:")
    expect_order(store)


def test_an_export_of_what_is_deleted_meanwhile_is_whole(store: Store, home: Path, tmp_path: Path) -> None:
    record = add_world(store, "top", below=add_world(store, "base"))

    def leave(mine: Store) -> None:
        with open(tmp_path / "archive", "wb", buffering=0) as sink:
            export_snapshot(mine, record.snapshot_id, sink)

    exporter = in_its_own(home, leave, "export:sealed", "export:layer")
    exporter.meet("export:sealed")
    for one in store.snapshots():
        store.delete_snapshot(one.snapshot_id)
    assert store.collect().layers == []
    exporter.go_on()
    exporter.meet("export:layer")
    assert store.collect().layers == []
    assert exporter.end().error == ""
    expect_order(store)
    with open(tmp_path / "archive", "rb", buffering=0) as source:
        assert import_snapshot(store, source, FORM).snapshot_id == record.snapshot_id
    expect_order(store, record)


@pytest.mark.parametrize(
    ("step", "error"),
    # Once it was there, that it is gone is no failure of whoever brought it there.
    [("make_durable:written", "NotFound"), ("make_durable:directories", "NotFound"), ("make_durable:noted", "")],
)
def test_a_snapshot_that_is_deleted_on_its_way_to_the_disk(store: Store, home: Path, step: str, error: str) -> None:
    record = add_world(store, "base")
    durable = in_its_own(home, lambda mine: mine.make_durable(record.snapshot_id), step)
    durable.meet(step)
    store.delete_snapshot(record.snapshot_id)
    assert store.collect().layers == list(record.layers)
    assert durable.end().error == error, durable.message
    expect_order(store)


# --- what is rewritten ---


def chain(store: Store) -> list[SnapshotRecord]:
    found: list[SnapshotRecord] = []
    for number in range(5):
        found.append(add_world(store, f"deep-{number}", below=found[-1] if found else None))
    assert store.make_all_durable([record.snapshot_id for record in found]) == {}
    measure_layers(store)
    return found


def squash_small(store: Store) -> list[object]:
    squash.DEEP, squash._FIRST, squash._FURTHER = 3, 2, 2  # in a process of its own
    report = squash.squash_deep(store)
    return [len(report.merged), len(report.reused), report.failures]


@pytest.mark.parametrize("step", ["squash:begun", "squash:merged", "squash:published", "squash:durable"])
def test_a_collection_in_the_middle_of_a_squash_takes_nothing_of_it(store: Store, home: Path, step: str) -> None:
    snapshots = chain(store)
    squasher = in_its_own(home, squash_small, step)
    squasher.meet(step)
    assert store.collect().layers == []
    assert store.sweep().drafts == []
    assert squasher.end().value[2] == []
    assert squasher.value[0] >= 2
    expect_order(store, *snapshots)
    assert len(store.snapshots()[-1].layers) < 5


@pytest.mark.parametrize("step", ["squash:merged", "squash:durable"])
def test_a_squash_of_what_is_deleted_meanwhile(store: Store, home: Path, step: str) -> None:
    snapshots = chain(store)
    squasher = in_its_own(home, squash_small, step)
    squasher.meet(step)
    for record in snapshots[1:]:
        store.delete_snapshot(record.snapshot_id)
    store.collect()
    assert squasher.end().value[2] == []
    expect_order(store, snapshots[0])


def test_a_checkpoint_on_the_old_layers_during_a_squash(store: Store, home: Path) -> None:
    """A sandbox lives on the old ones; what it adds is whole, and comes onto the merge with the next squash."""
    snapshots = chain(store)
    squasher = in_its_own(home, squash_small, "squash:durable")
    squasher.meet("squash:durable")
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, snapshot_id=snapshots[-1].snapshot_id, layers=snapshots[-1].layers)])
    late = on_top_of(store, "late", snapshots[-1])
    assert squasher.end().value[2] == []
    assert store.collect().failures == []
    assert store.snapshot(late.snapshot_id).layers == late.layers
    assert torn(store, late) == []
    store.make_durable(late.snapshot_id)
    measure_layers(store)
    again = in_its_own(home, squash_small).join()
    assert again.value[1] >= 1
    assert again.value[2] == []
    store.release([sandbox])
    expect_order(store, *snapshots, late)
    assert len(store.snapshot(late.snapshot_id).layers) < len(late.layers)


def test_two_squashes_at_once(store: Store, home: Path) -> None:
    snapshots = chain(store)
    first = in_its_own(home, squash_small, "squash:published")
    first.meet("squash:published")
    second = in_its_own(home, squash_small).join()
    assert second.value[2] == []
    assert first.end().value[2] == []
    expect_order(store, *snapshots)


def twins(store: Store) -> list[SnapshotRecord]:
    found = []
    for _ in range(2):
        record = add_world(store, "twin")
        place = store.layer_path(record.layers[0])
        for path in (place, *place.rglob("*")):
            os.utime(path, ns=(0, 0), follow_symlinks=False)
        store.make_durable(record.snapshot_id)
        found.append(record)
    assert seal_all(store).failures == []
    return found


@pytest.mark.parametrize("which", [0, 1])
def test_equal_layers_of_which_one_snapshot_is_deleted_before_they_are_shared(
    store: Store, home: Path, which: int
) -> None:
    records = twins(store)
    kept, gone = records[1 - which], records[which]
    sharer = in_its_own(home, lambda mine: share_equal(mine).failures, "reading:begun")
    sharer.meet("reading:begun")
    store.delete_snapshot(gone.snapshot_id)
    store.collect()
    assert sharer.end().value == []
    expect_order(store, kept)


def test_a_fork_of_layers_that_were_just_exchanged(store: Store, home: Path) -> None:
    """It names layers that it read before; those that no snapshot lists any more may be gone."""
    older, newer = twins(store)
    forker = in_its_own(home, lambda mine: fork(mine, newer.snapshot_id), "sweep:holder_cleared")
    # Between reading the snapshot and holding its layers, the fork's process stops.
    forker.meet("sweep:holder_cleared")
    assert share_equal(store).snapshots == 1
    [copy] = set(newer.layers) - set(store.snapshot(newer.snapshot_id).layers) or set(older.layers)
    assert store.collect().layers == [copy]
    assert forker.end().value == ["NotFound", []]
    store.release([holder.holder_id for holder in store.holders()])
    expect_order(store, older, newer)


def fork(store: Store, snapshot_id: str) -> list[object]:
    """Hold what a snapshot's record says, and once more if that was out of date."""
    from worldfork.store.faultpoints import fault

    record = store.snapshot(snapshot_id)
    fault("sweep:holder_cleared")
    first = ""
    try:
        store.hold([Holder(new_id("sb"), snapshot_id=snapshot_id, layers=record.layers)])
    except NotFound as error:
        first = type(error).__name__
        record = store.snapshot(snapshot_id)
        store.hold([Holder(new_id("sb"), snapshot_id=snapshot_id, layers=record.layers)])
    return [first, torn(store, record)]


def test_a_rewrite_onto_a_layer_that_is_being_collected_is_refused(store: Store, home: Path) -> None:
    gone, twin = deleted(store, "twin"), add_world(store, "twin")
    store.make_durable(twin.snapshot_id)
    collector = in_its_own(home, collect, "collect:committed")
    collector.meet("collect:committed")
    with pytest.raises(NotFound):
        store.rewrite(twin.layers, gone.layers)
    assert collector.end().value == [list(gone.layers), []]
    expect_order(store, twin)


def test_a_rewrite_does_not_touch_what_is_on_its_way_to_the_disk(store: Store, home: Path) -> None:
    older, newer = add_world(store, "twin"), add_world(store, "twin")
    store.make_durable(older.snapshot_id)
    durable = in_its_own(home, lambda mine: mine.make_durable(newer.snapshot_id), "make_durable:noted")
    durable.meet("make_durable:noted")
    assert store.rewrite(newer.layers, older.layers) == 0
    assert durable.end().error == ""
    assert store.rewrite(newer.layers, older.layers) == 1
    expect_order(store, older, newer)


# --- the same ids twice ---


def archive(path: Path, at: Path) -> SnapshotRecord:
    with closing(Store.open(home_at(at))) as other:
        record = add_world(other, "top", below=add_world(other, "base"))
        with open(path, "wb", buffering=0) as sink:
            export_snapshot(other, record.snapshot_id, sink)
    return record


def arrive(store: Store, path: Path) -> str:
    with open(path, "rb", buffering=0) as source:
        return import_snapshot(store, source, FORM).snapshot_id


@pytest.mark.parametrize("step", ["import:begun", "import:sealed", "import:published"])
def test_two_that_import_the_same(store: Store, home: Path, memory: Path, step: str) -> None:
    record = archive(memory / "archive", memory / "elsewhere")
    first = in_its_own(home, lambda mine: arrive(mine, memory / "archive"), step)
    first.meet(step)
    second = in_its_own(home, lambda mine: arrive(mine, memory / "archive"))
    assert first.end().value == second.join().value == record.snapshot_id
    expect_order(store, record)


@pytest.mark.parametrize("step", ["begin_layer:announced", "import:path", "import:sealed", "import:published"])
def test_an_import_by_whoever_comes_after_one_that_was_killed(
    store: Store, home: Path, memory: Path, step: str
) -> None:
    """containers/storage#1136: a layer that a killed pull left made all later ones fail."""
    record = archive(memory / "archive", memory / "elsewhere")
    first = in_its_own(home, lambda mine: arrive(mine, memory / "archive"), step)
    first.meet(step)
    second = in_its_own(home, lambda mine: arrive(mine, memory / "archive"))
    first.kill()
    assert second.join().value == record.snapshot_id
    expect_order(store, record)


@pytest.mark.parametrize("step", ["begin_layer:announced", "begin_layer:made"])
def test_a_sweep_beside_a_draft_that_has_just_begun(store: Store, home: Path, step: str) -> None:
    writer = in_its_own(home, lambda mine: add_world(mine, "new").snapshot_id, step)
    writer.meet(step)
    report = store.sweep(grace_s=0)
    assert report.drafts == report.leftovers == []
    assert store.collect().layers == []
    [draft] = [record.layer_id for record in store.layers_known() if record.state == "building"]
    with pytest.raises(Locked):
        store.begin_layer(form=FORM, layer_id=draft)
    assert writer.end().error == ""
    [record] = store.snapshots()
    expect_order(store, record)


def test_a_draft_given_up_by_its_id_when_it_is_no_longer_ones_own(store: Store) -> None:
    """An importer that lost its draft gives it up by its id, which may be somebody else's by then."""
    layer_id = new_id("ly")
    with closing(Store.open(store.home)) as first:
        first.begin_layer(form=FORM, layer_id=layer_id)
        lost_owner = first.owner_id
    draft = store.begin_layer(form=FORM, layer_id=layer_id)
    write_world(draft.path, "mine")
    store.abandon_layer(layer_id, owner_id=lost_owner)
    record = replace(record_of((layer_id,), form=FORM), facts=facts_of(["mine"]))
    store.publish(record, [layer_id])
    expect_order(store, record)


def test_a_push_that_begins_while_another_clears_up(store: Store, home: Path, memory: Path) -> None:
    """Between making its draft and locking it, a push looks dead."""
    record = add_world(store, "base")

    def send(mine: Store) -> list[str]:
        return push(mine, [record.snapshot_id], str(memory / "remote")).snapshots

    sender = in_its_own(home, send, "push:begun")
    sender.meet("push:begun")
    [draft] = (memory / "remote" / "drafts").iterdir()
    draft.unlink()  # as one who took it to be dead
    assert sender.end().value == [record.snapshot_id], sender.message
    with closing(Store.open(home_at(memory / "elsewhere"))) as other:
        [arrived] = pull(other, [record.snapshot_id], str(memory / "remote"), FORM)
        assert torn(other, arrived) == []
    assert list((memory / "remote" / "drafts").iterdir()) == []
