"""What the store says it takes, against what is on the disk."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
from tests.stores import add_snapshot, in_child
from tests.unit.keeping.test_quota import MB, add_mb

from worldfork.content.layer import walk
from worldfork.content.manifest import write_manifest
from worldfork.core.ids import new_id
from worldfork.keeping.usage import measure_layers, tree_size, usage
from worldfork.store.leases import Holder
from worldfork.store.store import Store


def test_an_empty_store(store: Store) -> None:
    found = usage(store)
    assert (found.snapshots, found.layers, found.logical_bytes, found.stored_bytes) == ((), 0, 0, 0)
    assert found.reclaimable.total_bytes == 0
    assert found.ballast_bytes == 2 * MB
    assert found.free_bytes > 0


def test_shared_and_own(store: Store) -> None:
    base = add_mb(store)
    one, two = add_mb(store, below=base.layers), add_mb(store, below=base.layers)
    assert usage(store).unmeasured_layers == 3
    assert [each.unmeasured_layers for each in usage(store).snapshots] == [1, 2, 2]
    found = usage(store, measure=True)
    shares = {each.snapshot_id: each for each in found.snapshots}
    each_bytes = shares[base.snapshot_id].stored_bytes
    assert MB <= each_bytes < MB + 50_000
    assert found.stored_bytes == 3 * each_bytes
    assert found.shared_bytes == each_bytes
    assert shares[base.snapshot_id].own_bytes == 0
    for record in (one, two):
        assert shares[record.snapshot_id].stored_bytes == 2 * each_bytes
        assert shares[record.snapshot_id].own_bytes == each_bytes
    name_bytes = len("ly-") + 16
    assert found.logical_bytes == 5 * (MB + name_bytes)
    assert found.unmeasured_layers == 0
    again = usage(store)
    assert dataclasses.replace(again, free_bytes=found.free_bytes) == found, "a measurement is kept"


def test_the_sum_is_what_the_disk_says(store: Store) -> None:
    for _ in range(3):
        add_mb(store)
    told = subprocess.run(
        ["du", "-s", "--block-size=1", *(store.home.layers / each.layer_id / "fs" for each in store.layers_known())],
        capture_output=True,
        text=True,
        check=True,
    )
    on_disk = sum(int(line.split()[0]) for line in told.stdout.splitlines())
    assert usage(store, measure=True).stored_bytes == on_disk


def test_what_is_of_no_use(store: Store) -> None:
    gone = add_mb(store)
    store.delete_snapshot(gone.snapshot_id)
    (store.home.trash / "old").mkdir()
    (store.home.trash / "old" / "data").write_bytes(b"x" * (2 * MB))

    def leave_a_draft() -> None:
        draft = store.begin_layer(form="trusted")
        draft.path.mkdir()
        (draft.path / "data").write_bytes(b"x" * (3 * MB))

    assert in_child(leave_a_draft) == 0
    ours = store.begin_layer(form="trusted")
    ours.path.mkdir()
    (ours.path / "data").write_bytes(b"x" * (4 * MB))
    waste = usage(store, measure=True).reclaimable
    assert [round(size / MB) for size in (waste.unused_bytes, waste.trash_bytes, waste.dead_draft_bytes)] == [1, 2, 3]
    assert round(waste.total_bytes / MB) == 6
    assert store.sweep().failures == []
    assert store.collect().failures == []
    assert usage(store).reclaimable.total_bytes == 0


def test_a_draft_that_a_sandbox_writes_to_is_of_use(store: Store) -> None:
    """A detached sandbox whose maker died in the middle of a checkpoint."""

    def die_in_a_checkpoint() -> None:
        draft = store.begin_layer(form="trusted")
        draft.path.mkdir()
        (draft.path / "data").write_bytes(b"x" * MB)
        store.hold([Holder(new_id("sb"), layers=(draft.layer_id,))])

    assert in_child(die_in_a_checkpoint) == 0
    assert usage(store).reclaimable.total_bytes == 0


def test_what_a_sandbox_alone_stands_on(store: Store) -> None:
    record = add_mb(store)
    store.hold([Holder(new_id("sb"), layers=record.layers)])
    store.delete_snapshot(record.snapshot_id)
    found = usage(store, measure=True)
    assert (found.layers, found.reclaimable.total_bytes) == (1, 0)
    assert found.held_bytes == found.stored_bytes >= MB


def test_measured_as_sealed(store: Store, tmp_path: Path) -> None:
    """Sealing measures too, and both must say the same."""
    record = add_snapshot(store)
    top = store.layer_path(record.layers[0])
    (top / "below").mkdir()
    (top / "below" / "sparse").touch()
    os.truncate(top / "below" / "sparse", 5 * MB)
    (top / "data").write_bytes(b"x" * 10_000)
    os.link(top / "data", top / "below" / "again")
    os.symlink("x" * 200, top / "link")
    os.mkfifo(top / "fifo")
    sealed = write_manifest(walk(top, "trusted"), tmp_path / "manifest")
    assert tree_size(top) == (sealed.logical_bytes, sealed.stored_bytes)
    assert measure_layers(store)[record.layers[0]] == (sealed.logical_bytes, sealed.stored_bytes)
    kept = store.layer(record.layers[0])
    assert (kept.logical_bytes, kept.stored_bytes, kept.digest) == (sealed.logical_bytes, sealed.stored_bytes, None)


@pytest.mark.user
def test_a_closed_layer_is_left_out(store: Store) -> None:
    record, open_one = add_snapshot(store), add_snapshot(store)
    closed = store.layer_path(record.layers[0]) / "closed"
    closed.mkdir(mode=0)
    assert set(measure_layers(store)) == set(open_one.layers)
    assert usage(store).unmeasured_layers == 1
    closed.chmod(0o700)


def test_a_layer_that_is_gone_is_left_out(store: Store) -> None:
    record = add_snapshot(store)
    os.rename(store.layer_path(record.layers[0]), store.home.trash / "away")
    assert measure_layers(store) == {}


def test_a_link_in_a_tree_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * MB)
    (tmp_path / "tree").mkdir()
    os.symlink(tmp_path, tmp_path / "tree" / "out")
    size = tree_size(tmp_path / "tree")
    assert size is not None
    assert size.stored_bytes < 100_000
