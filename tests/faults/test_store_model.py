"""A store against a model of itself: random lives, with restarts, crashes of the machine and a log that is moved."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.stores import add_world, home_at, strays, torn

from worldfork.core.errors import Locked
from worldfork.core.ids import new_id
from worldfork.keeping.check import check
from worldfork.keeping.sealing import seal_all
from worldfork.keeping.sharing import share_equal
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store import home as homes
from worldfork.store import owner as owners
from worldfork.store.leases import Holder
from worldfork.store.store import Store

TOKENS = ("a", "b", "c")
WHICH = st.integers(0, 1 << 16)


class Life(RuleBasedStateMachine):
    """What the store is told, told to a few dictionaries too."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="wf-store-", dir="/dev/shm"))
        self.boot = 0
        self.patches = [
            mock.patch("worldfork.store.connections.LONG_LOG_BYTES", 64 << 10),
            *[mock.patch.object(module, "boot_id", self.boot_id) for module in (owners, homes)],
        ]
        for patch in self.patches:
            patch.start()
        self.there: dict[str, SnapshotRecord] = {}
        self.durable: set[str] = set()
        self.names: dict[str, str] = {}
        self.held: dict[str, str] = {}
        self.store = Store.open(home_at(self.directory / "home"))

    def boot_id(self) -> str:
        return f"boot-{self.boot}"

    def teardown(self) -> None:
        self.store.close()
        for patch in self.patches:
            patch.stop()
        shutil.rmtree(self.directory)

    def chosen(self, which: int) -> SnapshotRecord:
        return list(self.there.values())[which % len(self.there)]

    @rule(token=st.sampled_from(TOKENS), level=st.sampled_from(["local", "local", "volatile"]))
    def begins(self, token: str, level: str) -> None:
        record = add_world(self.store, token, level=level)
        self.there[record.snapshot_id] = record

    @precondition(lambda self: self.there)
    @rule(token=st.sampled_from(TOKENS), which=WHICH)
    def goes_on(self, token: str, which: int) -> None:
        below = self.store.snapshot(self.chosen(which).snapshot_id)
        if len(below.layers) < 6:
            record = add_world(self.store, token, below=below)
            self.there[record.snapshot_id] = record

    @precondition(lambda self: self.there)
    @rule(which=WHICH)
    def becomes_durable(self, which: int) -> None:
        record = self.chosen(which)
        self.store.make_durable(record.snapshot_id)
        self.durable.add(record.snapshot_id)

    @precondition(lambda self: self.there)
    @rule(which=WHICH, name=st.sampled_from(["x", "y"]))
    def is_named(self, which: int, name: str) -> None:
        self.names[name] = self.chosen(which).snapshot_id
        self.store.set_name(name, self.names[name])

    @precondition(lambda self: self.there)
    @rule(which=WHICH)
    def is_held(self, which: int) -> None:
        sandbox = new_id("sb")
        self.held[sandbox] = self.chosen(which).snapshot_id
        self.store.hold([Holder(sandbox, snapshot_id=self.held[sandbox])])

    @precondition(lambda self: self.held)
    @rule(which=WHICH)
    def is_released(self, which: int) -> None:
        sandbox = sorted(self.held)[which % len(self.held)]
        del self.held[sandbox]
        self.store.release([sandbox])

    @precondition(lambda self: self.there)
    @rule(which=WHICH)
    def is_deleted(self, which: int) -> None:
        snapshot_id = self.chosen(which).snapshot_id
        try:
            self.store.delete_snapshot(snapshot_id)
        except Locked:
            assert snapshot_id in self.held.values()
            return
        assert snapshot_id not in self.held.values()
        self.forget({snapshot_id})

    def forget(self, gone: set[str]) -> None:
        self.there = {one: record for one, record in self.there.items() if one not in gone}
        self.names = {name: one for name, one in self.names.items() if one not in gone}
        self.durable -= gone

    @rule()
    def collects(self) -> None:
        assert self.store.collect().failures == []

    @rule()
    def seals_and_shares(self) -> None:
        assert seal_all(self.store).failures == share_equal(self.store).failures == []

    @rule()
    def moves_its_log(self) -> None:
        self.store.database.checkpoint()

    @rule()
    def is_opened_again(self) -> None:
        """Its process ends, and the sandboxes that it had made with it."""
        self.store.close()
        self.store = Store.open(self.store.home)
        assert sorted(self.store.sweep().holders) == sorted(self.held)
        self.held.clear()

    @rule()
    def is_opened_after_a_crash(self) -> None:
        self.store.close()
        self.boot += 1
        self.store = Store.open(home_at(self.directory / "home"))
        self.forget(self.there.keys() - self.durable)
        assert sorted(self.store.sweep().holders) == sorted(self.held)
        self.held.clear()

    @invariant()
    def is_as_told(self) -> None:
        found = {record.snapshot_id: record for record in self.store.snapshots()}
        assert list(found) == list(self.there)
        assert {one for one, record in found.items() if record.state == "durable"} == self.durable
        assert self.store.names() == self.names
        for record in found.values():
            assert torn(self.store, record) == []

    @rule()
    def is_in_order(self) -> None:
        assert check(self.store, read_data=True).findings == []
        if not self.held:
            self.store.sweep()
            self.store.collect()
            assert strays(self.store) == []


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)


def test_a_store_is_as_it_was_told() -> None:
    run_state_machine_as_test(Life, settings=SETTINGS)
