"""What goes for a quota: throw-away snapshots, the oldest first, and never anything else."""

from __future__ import annotations

import dataclasses

from tests.stores import problems, record_of

from worldfork.core.clock import ManualClock
from worldfork.core.ids import new_id
from worldfork.keeping.quota import enforce_quota, over_quota
from worldfork.keeping.usage import measure_layers, usage
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store import faultpoints, locks
from worldfork.store.leases import Holder
from worldfork.store.store import Store

MB = 1 << 20


def add_mb(store: Store, *, level: str = "volatile", below: tuple[str, ...] = ()) -> SnapshotRecord:
    """Publish a snapshot with a layer that takes a little more than 1 MiB."""
    draft = store.begin_layer(form="trusted")
    draft.path.mkdir()
    (draft.path / "file").write_text(draft.layer_id)
    (draft.path / "data").write_bytes(b"x" * MB)
    record = dataclasses.replace(record_of((draft.layer_id, *below)), level=level)
    store.publish(record, [draft.layer_id])
    return record


def left(store: Store) -> list[str]:
    return [record.snapshot_id for record in store.snapshots()]


def ids(*records: SnapshotRecord) -> list[str]:
    return [record.snapshot_id for record in records]


def test_no_quota_is_no_limit(store: Store) -> None:
    add_mb(store)
    assert over_quota(store, 0) == 0
    assert enforce_quota(store, 0).deleted == []


def test_how_much_it_is_over(store: Store, clock: ManualClock) -> None:
    record = add_mb(store)
    assert over_quota(store, 1) == 0, "nobody has measured anything yet"
    measure_layers(store)
    assert over_quota(store, 1) == 0, "within the quota a moment ago is good enough"
    clock.advance_s(2)
    assert MB - 100 <= over_quota(store, 100) < MB + 100_000
    assert over_quota(store, 2 * MB) == 0
    store.delete_snapshot(record.snapshot_id)
    store.collect()
    assert over_quota(store, 100) == 0, "what was over is looked at again at once"


def test_the_oldest_go_until_the_rest_fits(store: Store) -> None:
    local = add_mb(store, level="local")
    records = [add_mb(store) for _ in range(6)]
    exported = add_mb(store, level="exported")
    report = enforce_quota(store, 6 * MB)
    assert report.deleted == ids(*records[:3])
    assert report.over_bytes == 0
    assert left(store) == ids(local, *records[3:], exported)
    assert usage(store).stored_bytes <= 6 * MB
    assert enforce_quota(store, 6 * MB).deleted == []
    assert problems(store) == []


def test_unused_layers_go_before_any_snapshot(store: Store) -> None:
    first, second = add_mb(store), add_mb(store, level="local")
    store.delete_snapshot(second.snapshot_id)
    report = enforce_quota(store, 3 * MB // 2)
    assert report.layers == list(second.layers)
    assert (report.deleted, left(store)) == ([], ids(first))


def test_names_and_living_sandboxes_keep(store: Store) -> None:
    named, used, other = add_mb(store), add_mb(store), add_mb(store)
    store.set_name("mine", named.snapshot_id)
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, snapshot_id=used.snapshot_id, layers=used.layers)])
    lock = locks.take(store.lock_path(sandbox))
    assert lock is not None
    report = enforce_quota(store, 1000)
    assert report.deleted == ids(other)
    assert report.over_bytes > 2 * MB - 1000
    assert left(store) == ids(named, used)
    lock.release()


def test_the_oldest_that_may_go_make_up_for_those_that_stay(store: Store) -> None:
    named, used, third, fourth = (add_mb(store) for _ in range(4))
    store.set_name("mine", named.snapshot_id)
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, snapshot_id=used.snapshot_id)])
    lock = locks.take(store.lock_path(sandbox))
    assert lock is not None
    report = enforce_quota(store, 7 * MB // 2)
    assert (report.deleted, report.over_bytes) == (ids(third), 0)
    assert left(store) == ids(named, used, fourth)
    lock.release()


def test_a_name_after_the_look_keeps_its_snapshot(store: Store) -> None:
    record, other = add_mb(store), add_mb(store)

    def hook(name: str) -> None:
        if name == "quota:planned":
            store.set_name("mine", record.snapshot_id)

    faultpoints.install(hook)
    try:
        report = enforce_quota(store, 1000)
    finally:
        faultpoints.install(None)
    assert report.deleted == ids(other)
    assert left(store) == ids(record)


def test_what_frees_nothing_stays(store: Store) -> None:
    base = add_mb(store, level="local")
    sharing = dataclasses.replace(record_of(base.layers), level="volatile")
    store.publish(sharing, [])
    own = add_mb(store, below=base.layers)
    report = enforce_quota(store, 1000)
    assert report.deleted == ids(own)
    assert left(store) == ids(base, sharing)


def test_layers_that_throw_away_ones_share_go_with_the_last_of_them(store: Store) -> None:
    chain = [add_mb(store)]
    for _ in range(4):
        chain.append(add_mb(store, below=chain[-1].layers))
    newest = add_mb(store)
    report = enforce_quota(store, 3 * MB // 2)
    assert report.deleted == ids(*chain)
    assert left(store) == ids(newest)
    assert problems(store) == []
