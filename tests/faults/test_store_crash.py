"""Stop at every named step: what was announced exists, nothing is half there, and one sweep puts all in order."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.stores import add_memory, add_snapshot, home_at, in_child, make_memory, problems

from worldfork.core.clock import ManualClock
from worldfork.core.ids import new_id
from worldfork.store import faultpoints
from worldfork.store.leases import Holder
from worldfork.store.store import Store
from worldfork.store.sweep import SweepReport

STOPPED = 42
Announce = Callable[[str, str], None]


def whole_life(store: Store, clock: ManualClock, announce: Announce) -> None:
    """Everything that a store does, once."""
    first = add_snapshot(store)
    announce("ready", first.snapshot_id)
    store.make_durable(first.snapshot_id)
    announce("durable", first.snapshot_id)
    second = add_snapshot(store, below=first.layers)
    announce("ready", second.snapshot_id)
    sandbox, other = new_id("sb"), new_id("sb")
    store.hold([Holder(sandbox, snapshot_id=second.snapshot_id), Holder(other, layers=first.layers)])
    store.set_name("main", second.snapshot_id)
    announce("named", second.snapshot_id)
    draft = store.begin_layer(form="trusted")
    draft.path.mkdir()
    store.abandon_layer(draft.layer_id)
    third = add_snapshot(store, below=second.layers)
    announce("ready", third.snapshot_id)
    awake = add_memory(store, below=second.layers)
    announce("ready", awake.snapshot_id)
    store.make_durable(awake.snapshot_id)
    announce("durable", awake.snapshot_id)
    gone = add_memory(store, below=second.layers)
    announce("ready", gone.snapshot_id)
    announce("deleting", gone.snapshot_id)
    store.delete_snapshot(gone.snapshot_id)
    announce("deleting", first.snapshot_id)
    store.delete_snapshot(first.snapshot_id)
    store.collect()
    announce("deleting", third.snapshot_id)
    store.delete_snapshot(third.snapshot_id)
    store.release([other])
    store.collect()
    with store.single_flight("key"):
        clock.advance_s(1000)
        store.sweep()
    store.make_durable(second.snapshot_id)
    announce("durable", second.snapshot_id)
    store.close()


def leave_a_mess(store: Store) -> None:
    """Everything that a sweep and a collection find to do."""
    keep, gone = add_snapshot(store), add_snapshot(store)
    store.set_name("keep", keep.snapshot_id)
    store.hold([Holder(new_id("sb"), snapshot_id=keep.snapshot_id), Holder(new_id("sb"), layers=gone.layers)])
    for _ in range(2):
        store.begin_layer(form="trusted").path.mkdir()
    store.delete_snapshot(gone.snapshot_id)
    (store.home.layers / new_id("ly")).mkdir()
    forgotten = add_memory(store, below=keep.layers)
    store.delete_snapshot(forgotten.snapshot_id)
    make_memory(store.begin_memory(new_id("sn")).with_name(f".new-{new_id('sn')}-{new_id('ow')}"), "half")
    make_memory(store.home.memory / ".gone-1234", "less than half")
    (store.home.tmp.parent / "another-boot").mkdir()
    (store.home.trash / "old" / "er").mkdir(parents=True)
    add_snapshot(store)
    add_memory(store, below=keep.layers)
    with store.database.write() as db:
        db.execute("UPDATE snapshots SET boot_id = 'another-boot' WHERE number IN (4, 5)")


def stop_at(step: int) -> list[str]:
    """End this process at the step-th named step."""
    passed: list[str] = []

    def hook(name: str) -> None:
        passed.append(name)
        if len(passed) == step:
            os._exit(STOPPED)

    faultpoints.install(hook)
    return passed


def read_announcements(path: Path) -> list[tuple[str, str]]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [(line.split(" ")[0], line.split(" ")[1]) for line in lines]


def expect_what_was_announced(store: Store, announced: list[tuple[str, str]], where: str) -> None:
    states = {record.snapshot_id: record.state for record in store.snapshots()}
    deleted = {snapshot_id for word, snapshot_id in announced if word == "deleting"}
    for word, snapshot_id in announced:
        if snapshot_id in deleted:
            continue
        assert snapshot_id in states, f"{where}: {word} {snapshot_id} is gone"
        if word == "durable":
            assert states[snapshot_id] == "durable", where
        if word == "named":
            assert store.named("main") == snapshot_id, where


def expect_order(home: Path, where: str) -> Store:
    """Open the store after a stop and clean it up; it must then be spotless and a second look find nothing."""
    store = Store.open(home_at(home))
    report = store.sweep()
    assert report.failures == [], where
    assert store.collect().failures == [], where
    assert problems(store) == [], where
    assert store.sweep() == SweepReport(), where
    assert store.collect().layers == [], where
    return store


@pytest.mark.timeout(180)
def test_a_stop_at_any_step_of_a_whole_life(tmp_path: Path) -> None:
    names: set[str] = set()
    step = 0
    while True:
        step += 1
        home, diary = tmp_path / f"home-{step}", tmp_path / f"diary-{step}"

        def live(step: int = step, home: Path = home, diary: Path = diary) -> None:
            clock = ManualClock()
            store = Store.open(home_at(home), clock=clock)
            passed = stop_at(step)

            def announce(word: str, snapshot_id: str) -> None:
                with diary.open("a") as lines:
                    lines.write(f"{word} {snapshot_id}\n")

            whole_life(store, clock, announce)
            (tmp_path / "steps").write_text("\n".join(passed))

        code = in_child(live)
        assert code in (0, STOPPED)
        store = expect_order(home, f"step {step}")
        expect_what_was_announced(store, read_announcements(diary), f"step {step}")
        store.close()
        if code == 0:
            names.update((tmp_path / "steps").read_text().split("\n"))
            break
    assert step > 30
    for verb in ("begin_layer", "publish", "hold", "make_durable", "set_name", "delete_snapshot", "release", "collect"):
        assert any(name.startswith(f"{verb}:") for name in names), verb


def test_a_stop_at_any_step_of_cleaning_up(tmp_path: Path) -> None:
    step = 0
    while True:
        step += 1
        home = tmp_path / f"home-{step}"

        def clean(step: int = step, home: Path = home) -> None:
            store = Store.open(home_at(home))
            stop_at(step)
            store.sweep()
            store.collect()
            os._exit(0)

        def make(home: Path = home) -> None:
            leave_a_mess(Store.open(home_at(home)))
            os._exit(0)

        assert in_child(make) == 0
        code = in_child(clean)
        assert code in (0, STOPPED)
        store = expect_order(home, f"step {step}")
        assert len(store.snapshots()) == 1
        assert store.named("keep") == store.snapshots()[0].snapshot_id
        store.close()
        if code == 0:
            break
    assert step > 10
