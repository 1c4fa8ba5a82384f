"""What the dead leave behind goes; what the living use stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.stores import add_snapshot, in_child, problems, record_of

from worldfork.core.clock import ManualClock
from worldfork.core.errors import StoreError
from worldfork.core.ids import new_id
from worldfork.store import home as homes
from worldfork.store import locks, owner
from worldfork.store.leases import Holder
from worldfork.store.store import Store
from worldfork.store.sweep import SweepReport

NOTHING = SweepReport()


def test_nothing_is_found_in_a_clean_store(store: Store) -> None:
    add_snapshot(store)
    assert store.sweep() == NOTHING
    assert store.collect().layers == []


def test_drafts_of_dead_owners_go_and_ours_stay(store: Store) -> None:
    ours = store.begin_layer(form="trusted")
    ours.path.mkdir()

    def leave_one() -> None:
        draft = store.begin_layer(form="trusted")
        draft.path.mkdir()
        os._exit(0)

    assert in_child(leave_one) == 0
    report = store.sweep()
    assert len(report.drafts) == 1
    assert report.failures == []
    assert ours.path.exists()
    assert os.listdir(store.home.layers) == [ours.layer_id]
    assert os.listdir(store.home.trash) == []
    assert store.sweep() == NOTHING


def test_a_draft_under_a_living_sandbox_stays(store: Store) -> None:
    sandbox = new_id("sb")

    def die_in_a_checkpoint() -> None:
        draft = store.begin_layer(form="trusted")
        draft.path.mkdir()
        store.hold([Holder(sandbox, layers=(draft.layer_id,))])
        os._exit(0)

    lock = locks.take(store.lock_path(sandbox))
    assert lock is not None
    assert in_child(die_in_a_checkpoint) == 0
    assert store.sweep().drafts == []
    lock.release()
    report = store.sweep()
    assert (len(report.holders), len(report.drafts)) == (1, 1)


def test_dead_holders_are_shown_first_and_then_forgotten(store: Store, clock: ManualClock) -> None:
    dead, alive = new_id("sb"), new_id("sb")
    store.hold([Holder(dead, facts='{"cgroup": "x"}'), Holder(alive)])
    clock.advance_s(100)
    lock = locks.take(store.lock_path(alive))
    assert lock is not None
    store.lock_path(dead).touch()
    shown: list[str] = []
    report = store.sweep(dead=lambda holder: shown.append(holder.facts))
    assert shown == ['{"cgroup": "x"}']
    assert report.holders == [dead]
    assert [holder.holder_id for holder in store.holders()] == [alive]
    assert not store.lock_path(dead).exists()
    lock.release()


def test_one_failure_does_not_stop_the_rest(store: Store, clock: ManualClock) -> None:
    first, second = new_id("sb"), new_id("sb")
    store.hold([Holder(first), Holder(second)])
    clock.advance_s(100)

    def fail_once(holder: Holder) -> None:
        if holder.holder_id == first:
            raise RuntimeError("the cgroup is busy")

    report = store.sweep(dead=fail_once)
    assert report.holders == [second]
    assert report.failures == [(first, "the cgroup is busy")]
    assert store.sweep().holders == [first]
    assert store.sweep() == NOTHING


def test_strays_go(store: Store) -> None:
    stray = store.home.layers / new_id("ly")
    (stray / "fs").mkdir(parents=True)
    (store.home.tmp.parent / "another-boot").mkdir()
    (store.home.tmp / "ours").touch()
    (store.home.locks / new_id("ow")).touch()
    (store.home.locks / "flight-of-a-killed-process").touch()
    (store.home.trash / "old").mkdir()
    report = store.sweep()
    assert report.failures == []
    assert len(report.leftovers) == 7, "the stray layer and the tmp directory pass through the trash"
    assert problems(store) == []
    assert (store.home.tmp / "ours").exists()
    assert store.sweep() == NOTHING


def test_after_a_crash_of_the_machine_what_was_not_durable_is_gone_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    safe = add_snapshot(store)
    store.make_durable(safe.snapshot_id)
    noted = add_snapshot(store)
    with store.database.write() as db:
        db.execute("UPDATE snapshots SET state = 'synced' WHERE snapshot_id = ?", (noted.snapshot_id,))
    assert store.snapshot(noted.snapshot_id).state == "ready"
    lost = add_snapshot(store, below=safe.layers)
    store.set_name("lost", lost.snapshot_id)
    store.set_name("safe", safe.snapshot_id)
    store.close()
    for module in (owner, homes):
        monkeypatch.setattr(module, "boot_id", lambda: "another-boot")
    later = Store.open(store.home)
    later.home.tmp.mkdir()
    assert [record.snapshot_id for record in later.snapshots()] == [safe.snapshot_id, noted.snapshot_id]
    assert {record.state for record in later.snapshots()} == {"durable"}
    assert later.names() == {"safe": safe.snapshot_id}
    later.collect()
    later.sweep()
    assert problems(later) == []
    assert later.sweep() == NOTHING
    later.close()


def test_trash_of_another_file_system_is_refused(store: Store) -> None:
    path = Path("/dev/shm") / f"worldfork-test-{os.getpid()}"
    if os.stat("/dev/shm").st_dev == os.stat(store.home.trash).st_dev:
        pytest.skip("both on one file system")
    path.mkdir()
    try:
        with pytest.raises(StoreError):
            store.trash(path)
        assert path.exists()
    finally:
        path.rmdir()
    store.trash(store.home.run / "none")


MOUNTED = """
import subprocess, sys
from pathlib import Path
from tests.stores import add_snapshot, home_at
from worldfork.store.store import Store
place = Path(sys.argv[1])
store = Store.open(home_at(place / "home"))
first, second = add_snapshot(store), add_snapshot(store)
(place / "host").mkdir()
(place / "host" / "keep").write_text("x")
inside = store.layer_path(first.layers[0]) / "mnt"
inside.mkdir()
subprocess.run(["mount", "--bind", str(place / "host"), str(inside)], check=True)
store.delete_snapshot(first.snapshot_id)
store.delete_snapshot(second.snapshot_id)
report = store.collect()
assert len(report.failures) == 1 and len(report.layers) == 2, report
assert (place / "host" / "keep").read_text() == "x"
assert len(store.sweep().failures) == 1
assert (place / "host" / "keep").read_text() == "x"
trashed = next(store.home.trash.glob("*/fs/mnt"))
subprocess.run(["umount", str(trashed)], check=True)
report = store.sweep()
assert report.failures == [] and len(report.leftovers) == 1, report
assert not list(store.home.trash.iterdir()) and (place / "host" / "keep").exists()
store.close()
"""


@pytest.mark.root
def test_a_layer_with_a_mount_in_it_never_costs_what_is_mounted(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", MOUNTED, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(homes.__file__).parents[2]), os.getcwd()])},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_living_owner_tells_that_another_boot_id_is_of_this_boot(store: Store) -> None:
    """A container may have been given one of its own."""
    record = add_snapshot(store)
    with store.database.write() as db:
        db.execute("UPDATE snapshots SET boot_id = 'a container'")
        db.execute("UPDATE layers SET boot_id = 'a container'")
    beside = store.home.tmp.parent / "a container"
    beside.mkdir()
    assert store.recover() == []
    assert store.sweep() == SweepReport()
    assert beside.is_dir()
    with store.database.write() as db:
        db.execute("UPDATE snapshots SET owner_id = 'ow-gone'")
        db.execute("UPDATE layers SET owner_id = 'ow-gone'")
    assert store.recover() == [record.snapshot_id]


def test_a_stray_that_has_come_to_have_a_row_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_id = new_id("ly")
    (store.home.layers / layer_id).mkdir()
    clear = store._clear_stray_layer

    def import_it_meanwhile(report: SweepReport, name: str) -> None:
        (store.home.layers / name).rmdir()
        draft = store.begin_layer(form="trusted", layer_id=name)
        draft.path.mkdir()
        store.publish(record_of((name,)), [name])
        clear(report, name)

    monkeypatch.setattr(store, "_clear_stray_layer", import_it_meanwhile)
    report = store.sweep()
    assert (report.leftovers, report.failures) == ([], [])
    assert store.layer_path(layer_id).is_dir()


def test_what_comes_alive_while_it_is_cleared_is_left_alone(store: Store, clock: ManualClock) -> None:
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, layers=add_snapshot(store).layers)])
    clock.advance_s(1000)
    locked: list[bool] = []

    def dead(holder: Holder) -> None:
        # Its PID 1, which takes its lock just now, does not get it any more.
        locked.append(store.is_alive(holder.holder_id))

    assert store.sweep(dead=dead).holders == [sandbox]
    assert locked == [True]
    assert not store.lock_path(sandbox).exists()
