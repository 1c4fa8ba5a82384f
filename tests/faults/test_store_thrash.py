"""Many processes do everything at one store at once, some of them dying: nobody ever reads what is not whole."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.stores import FORM, add_world, exit_code_of, home_at, in_child, start_child, strays, torn

from worldfork.core.errors import Corrupt, Locked, NotFound, StoreError
from worldfork.core.ids import new_id
from worldfork.exchange.arrival import import_snapshot
from worldfork.exchange.departure import export_snapshot
from worldfork.exchange.exchange import pull, push
from worldfork.keeping import squash
from worldfork.keeping.check import check
from worldfork.keeping.keep_rules import KeepRules
from worldfork.keeping.prune import prune
from worldfork.keeping.sealing import seal_all
from worldfork.keeping.sharing import share_equal
from worldfork.keeping.usage import measure_layers
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store.leases import Holder
from worldfork.store.store import Store

SECONDS = 8.0
PROCESSES = 5
TOKENS = [f"token-{number}" for number in range(6)]


class Worker:
    """One of many: does one thing after the other, and counts what it reads."""

    def __init__(self, home: Path, seed: int) -> None:
        self.store = Store.open(home_at(home))
        self.place = home.parent
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.verbs: list[Callable[[SnapshotRecord], object]] = [
            *[self.fork] * 6,
            *[self.add] * 4,
            *[self.durable] * 2,
            self.delete,
            self.collect,
            self.prune,
            self.seal,
            self.share,
            self.squash,
            self.leave,
            self.arrive,
            self.exchange,
            self.check,
            self.sweep,
        ]

    def run(self, until_s: float) -> None:
        squash.DEEP, squash._FIRST, squash._FURTHER = 4, 2, 2  # in a process of its own
        while time.monotonic() < until_s:
            known = self.store.snapshots()
            verb = self.chance.choice(self.verbs) if len(known) > 3 else self.add
            record = self.chance.choice(known[-12:]) if known else None
            try:
                if record is None:
                    add_world(self.store, self.chance.choice(TOKENS))
                else:
                    verb(record)
            except (NotFound, Locked):
                self.counts["too late"] += 1
            except Corrupt as error:
                self.counts["corrupt"] += 1
                print(f"{verb.__name__}: {error} {error.fields}", flush=True)
            self.counts[verb.__name__] += 1

    def look(self, record: SnapshotRecord) -> None:
        wrong = torn(self.store, record)
        if wrong:
            self.counts["corrupt"] += 1
            print(wrong, flush=True)

    def fork(self, record: SnapshotRecord) -> None:
        """As a sandbox that starts: hold what the record says, and once more if it is out of date."""
        sandbox = new_id("sb")
        for _ in range(2):
            try:
                self.store.hold([Holder(sandbox, snapshot_id=record.snapshot_id, layers=record.layers)])
                break
            except NotFound:
                record = self.store.snapshot(record.snapshot_id)
        else:
            return
        try:
            self.look(record)
        finally:
            self.store.release([sandbox])

    def add(self, record: SnapshotRecord) -> None:
        below = record if self.chance.random() < 0.8 and len(record.layers) < 12 else None
        add_world(self.store, self.chance.choice(TOKENS), below=below)

    def durable(self, record: SnapshotRecord) -> None:
        self.store.make_durable(record.snapshot_id)

    def delete(self, record: SnapshotRecord) -> None:
        self.store.delete_snapshot(record.snapshot_id)

    def collect(self, record: SnapshotRecord) -> None:
        assert self.store.collect().failures == []

    def prune(self, record: SnapshotRecord) -> None:
        assert prune(self.store, KeepRules(last=25)).failures == []

    def seal(self, record: SnapshotRecord) -> None:
        self.expect(seal_all(self.store).failures)

    def share(self, record: SnapshotRecord) -> None:
        self.expect(share_equal(self.store).failures)

    def squash(self, record: SnapshotRecord) -> None:
        measure_layers(self.store)
        self.expect(squash.squash_deep(self.store).failures)

    def expect(self, failures: list[tuple[str, str]]) -> None:
        assert [why for _, why in failures if "been at it" not in why] == []

    def leave(self, record: SnapshotRecord) -> None:
        draft = self.place / f"draft-{os.getpid()}"
        with open(draft, "wb", buffering=0) as sink:
            export_snapshot(self.store, record.snapshot_id, sink)
        draft.rename(self.place / f"archive-{self.chance.randrange(4)}-{os.getpid()}")

    def arrive(self, record: SnapshotRecord) -> None:
        archives = list(self.place.glob(f"archive-*-{os.getpid()}"))
        if archives:
            with open(self.chance.choice(archives), "rb", buffering=0) as source:
                self.bring(lambda: import_snapshot(self.store, source, FORM))

    def exchange(self, record: SnapshotRecord) -> None:
        push(self.store, [record.snapshot_id], str(self.place / "remote"))
        self.store.delete_snapshot(record.snapshot_id)
        self.bring(lambda: pull(self.store, [record.snapshot_id], str(self.place / "remote"), FORM)[0])

    def bring(self, work: Callable[[], SnapshotRecord]) -> None:
        try:
            with self.store.reading(snapshot_id=work().snapshot_id, purpose="test") as lease:
                self.look(self.store.snapshot(lease.snapshot_id or ""))
        except Corrupt:
            raise
        except StoreError as error:
            # It was brought back by another process, and stands on merges by now.
            if "here already, with other layers" not in str(error):
                raise

    def check(self, record: SnapshotRecord) -> None:
        found = check(self.store, read_data=self.chance.random() < 0.5)
        if not found.sound:
            self.counts["corrupt"] += 1
            print(found.findings, flush=True)

    def sweep(self, record: SnapshotRecord) -> None:
        assert self.store.sweep().failures == []


@pytest.mark.timeout(120)
def test_thrash(memory: Path) -> None:
    home = memory / "home"

    def begin() -> None:
        with closing(Store.open(home_at(home))) as store:
            for token in TOKENS:
                store.make_durable(add_world(store, token).snapshot_id)

    def work(seed: int) -> None:
        worker = Worker(home, seed)
        try:
            worker.run(until_s)
        finally:
            (memory / f"counts-{seed}").write_text(json.dumps(worker.counts))
            worker.store.close()

    assert in_child(begin) == 0
    until_s = time.monotonic() + SECONDS
    children = [start_child(lambda seed=seed: work(seed)) for seed in range(PROCESSES)]  # type: ignore[misc]
    chance = random.Random(5)
    killed = 0
    while time.monotonic() < until_s:
        # One after the other dies in the middle of something, and is followed by another.
        time.sleep(SECONDS / 10)
        index = chance.randrange(PROCESSES)
        os.kill(children[index], signal.SIGKILL)
        if exit_code_of(children[index]) == -signal.SIGKILL:
            killed += 1
        seed = PROCESSES + killed
        children[index] = start_child(lambda seed=seed: work(seed))  # type: ignore[misc]
    assert [exit_code_of(child) for child in children] == [0] * PROCESSES
    assert killed >= 5

    counts: Counter[str] = Counter()
    for path in memory.glob("counts-*"):
        counts.update(json.loads(path.read_text()))
    assert counts["corrupt"] == 0, counts
    done = {name for name in vars(Worker) if not name.startswith("_")} - {"run", "look", "expect", "bring"}
    assert {name for name in done if counts[name] > 0} == done, counts
    print(counts)
    with closing(Store.open(home_at(home))) as store:
        with suppress(Locked):
            assert store.sweep(grace_s=0).failures == []
        assert store.collect().failures == []
        for record in store.snapshots():
            assert torn(store, record) == []
        seal_all(store)
        assert check(store, read_data=True).findings == []
        assert strays(store) == []
