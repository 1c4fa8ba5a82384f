"""What a store must stand for long: many lives, clocks that jump, a log that was cut, two processes for ever at it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.actors import Actor
from tests.disks import after_a_restart
from tests.stores import (
    FORM,
    add_snapshot,
    add_world,
    exit_code_of,
    home_at,
    in_child,
    problems,
    start_child,
    strays,
    tokens_of,
    torn,
)

from worldfork.core.clock import ManualClock
from worldfork.core.ids import new_id
from worldfork.core.settings import Settings
from worldfork.keeping.check import check
from worldfork.keeping.upkeep import keep_up
from worldfork.store.leases import Holder
from worldfork.store.store import Store

LIVES = 10_000
OPERATIONS = 250


@pytest.fixture
def home(memory: Path) -> Path:
    return memory / "home"


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with closing(Store.open(home_at(home))) as opened:
        yield opened


def size_bytes(store: Store) -> int:
    return sum(os.path.getsize(f"{store.home.database}{end}") for end in ("", "-wal"))


def test_the_metadata_do_not_grow_with_what_was_deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """kopia#5057: 28,000 blobs of index, for compaction had been held up."""
    monkeypatch.setattr("worldfork.store.connections.LONG_LOG_BYTES", 256 << 10)
    kept = add_snapshot(store)
    sizes = []
    for number in range(LIVES):
        record = add_snapshot(store, below=kept.layers)
        sandbox = new_id("sb")
        store.hold([Holder(sandbox, snapshot_id=record.snapshot_id, layers=record.layers)])
        store.release([sandbox])
        store.delete_snapshot(record.snapshot_id)
        if number % 20 == 19:
            assert len(store.collect().layers) == 20
        if number % (LIVES // 4) == LIVES // 4 - 1:
            sizes.append(size_bytes(store))
    assert sizes[-1] < 1.2 * sizes[0], sizes
    assert sizes[-1] < 4 << 20
    assert problems(store) == []


def test_a_clock_that_is_set_neither_ends_a_lease_nor_prolongs_it(home: Path) -> None:
    """keiretsu-labs#2746: a store that trusted timestamps refused to be cleaned up."""
    for jump_s in (10 * 365 * 86400.0, -10 * 365 * 86400.0):
        clock = ManualClock()
        with closing(Store.open(home_at(home), clock=clock)) as store:
            record = add_world(store, "base")
            draft = store.begin_layer(form=FORM)
            sandbox = new_id("sb")
            store.hold([Holder(sandbox, snapshot_id=record.snapshot_id)])
            with store.reading(layers=record.layers, purpose="test") as lease:
                clock.jump_s(jump_s)
                report = store.sweep()
                assert report.drafts == report.holders == []
                lease.check()
                clock.advance_s(store.ttl_s + 1)
                report = store.sweep()
                assert report.drafts == [draft.layer_id]
                assert sorted(report.holders) == sorted([sandbox, lease.reading_id])
                # Said by the block that is left, too: it is not what is tested here.
                store._end_reading = lambda _: True  # type: ignore[method-assign]
            store.delete_snapshot(record.snapshot_id)
            store.collect()
            assert strays(store) == []


def test_a_log_that_was_cut_at_any_byte_ends_with_a_whole_transaction(home: Path, memory: Path) -> None:
    """borg#364: the last record was read although it was cut short."""

    def write() -> None:
        store = Store.open(home_at(home))
        store.make_durable(add_world(store, "base").snapshot_id)
        (memory / "before").write_text(str(os.path.getsize(f"{store.home.database}-wal")))
        add_world(store, "last")
        os._exit(0)

    assert in_child(write) == 0
    log = home / "db.sqlite-wal"
    before, after = int((memory / "before").read_text()), log.stat().st_size
    assert after > before
    found = set()
    for size in sorted({*range(before, after, 389), before + 1, before + 24, after - 1, after}):
        left = memory / "left"
        shutil.copytree(home, left, symlinks=True)
        os.truncate(left / "db.sqlite-wal", size)
        with closing(Store.open(home_at(left))) as store:
            tokens = sorted(tokens_of(record)[0] for record in store.snapshots())
            assert tokens[0] == "base"
            found.add(len(tokens))
            for record in store.snapshots():
                assert torn(store, record) == []
            assert check(store, read_data=True).findings == []
            assert store.sweep(grace_s=0).failures == store.collect().failures == []
            assert strays(store) == []
        shutil.rmtree(left)
    assert found == {1, 2}


def test_two_processes_never_undo_what_the_other_did(store: Store, home: Path) -> None:
    """buildah#966: lists that were kept in memory were written back over those of another process."""

    def work(seed: int) -> None:
        chance = random.Random(seed)
        mine: dict[str, str] = {}
        names: dict[str, str] = {}
        held: dict[str, str] = {}
        with closing(Store.open(home_at(home))) as own:
            for _ in range(OPERATIONS):
                verb = chance.choice(["add", "add", "delete", "name", "hold", "release", "collect", "durable", "sweep"])
                if verb == "add" or not mine:
                    record = add_snapshot(own)
                    mine[record.snapshot_id] = record.layers[0]
                    continue
                chosen = chance.choice(sorted(mine))
                if verb == "delete" and chosen not in held.values():
                    own.delete_snapshot(chosen)
                    del mine[chosen]
                    names = {name: snapshot_id for name, snapshot_id in names.items() if snapshot_id != chosen}
                elif verb == "name":
                    name = f"{seed}-{chance.randrange(5)}"
                    own.set_name(name, chosen)
                    names[name] = chosen
                elif verb == "hold":
                    sandbox = new_id("sb")
                    own.hold([Holder(sandbox, snapshot_id=chosen)])
                    held[sandbox] = chosen
                elif verb == "release" and held:
                    sandbox = chance.choice(sorted(held))
                    own.release([sandbox])
                    del held[sandbox]
                elif verb == "collect":
                    assert own.collect().failures == []
                elif verb == "durable":
                    own.make_durable(chosen)
                elif verb == "sweep":
                    assert own.sweep().failures == []
                there = {record.snapshot_id: record.layers[0] for record in own.snapshots()}
                assert mine.items() <= there.items()
                assert names.items() <= own.names().items()
                assert held.keys() <= {holder.holder_id for holder in own.holders()}
                for layer_id in mine.values():
                    assert (own.layer_path(layer_id) / "file").read_text() == layer_id
            own.release(list(held))

    children = [start_child(lambda seed=seed: work(seed)) for seed in range(2)]  # type: ignore[misc]
    assert [exit_code_of(child) for child in children] == [0, 0]
    store.sweep()
    store.collect()
    assert problems(store) == []


def test_upkeep_clears_what_a_dead_process_was_reading_and_making(store: Store, home: Path) -> None:
    """containerd#6294: leases ran out, and nothing looked."""
    base = add_world(store, "base")

    def hold() -> None:
        mine = Store.open(home_at(home))
        mine.begin_layer(form=FORM).path.mkdir()
        with mine.reading(layers=base.layers, purpose="test"):
            mine.set_name("here", None)

    holder = Actor(hold, "set_name:committed")
    holder.meet("set_name:committed")
    store.delete_snapshot(base.snapshot_id)
    settings = Settings(home=home, scratch=home)
    assert keep_up(store, settings).collected == []
    holder.kill()
    report = keep_up(store, settings)
    assert report.collected == list(base.layers)
    assert report.failures == []
    store.sweep()  # the lock file of the dead is no use to anybody
    assert strays(store) == []


def test_a_restart_during_a_collection(store: Store, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was condemned before a crash of the machine is not put to use again after it, since it may be torn."""
    gone = add_world(store, "gone")
    store.delete_snapshot(gone.snapshot_id)
    collector = Actor(lambda: Store.open(home_at(home)).collect().layers, "collect:committed")
    collector.meet("collect:committed")
    collector.kill()
    store.close()
    with monkeypatch.context() as patch:
        after_a_restart(patch.setattr)
        with closing(Store.open(home_at(home))) as later:
            with later.reading(purpose="test") as lease:
                assert lease.claim(gone.layers) == set()
            assert later.collect().layers == list(gone.layers)
            later.sweep()
            assert strays(later) == []
