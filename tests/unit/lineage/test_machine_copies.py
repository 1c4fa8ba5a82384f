"""Filesystem checkpoints of machines, with a real store: each holds what there was, and stores what changed."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from tests.stores import home_at

from worldfork.core.errors import NotCapturable, SandboxDied
from worldfork.lineage.live import Live
from worldfork.lineage.machines import take_disk
from worldfork.lineage.wanted import Wanted
from worldfork.records.sandbox import Base, SandboxFacts
from worldfork.records.snapshot import SnapshotRecord
from worldfork.sandbox.connection import Connection
from worldfork.store.store import Store

FORM = "trusted" if os.geteuid() == 0 else "user"
_T = TypeVar("_T")


@dataclass
class Machine:
    """What `take_disk` asks of a sandbox: its facts, a store, and a driver that copies a directory."""

    place: Any
    facts: SandboxFacts
    disk: Path
    asked: list[str] = field(default_factory=list)
    fails: Exception | None = None
    empty: bool = False

    async def work(self, call: Callable[[], _T], undo: Callable[[_T], None] | None = None) -> _T:
        return await asyncio.to_thread(call)

    def machines(self, name: str) -> Machine:
        assert name == "microvm"
        return self

    async def copy_disk(self, facts: SandboxFacts, connection: object, target: Path, *, idle: bool) -> int | None:
        self.asked.append("copy")
        if self.empty:
            return None
        shutil.copytree(self.disk, target, symlinks=True)
        if self.fails is not None:
            raise self.fails
        return 1

    async def freeze(self) -> None:
        self.asked.append("freeze")

    async def thaw(self) -> None:
        self.asked.append("thaw")

    def take(self, *, idle: bool = True) -> SnapshotRecord:
        work: Awaitable[SnapshotRecord] = take_disk(cast(Live, self), cast(Connection, self), idle, Wanted("", "local"))
        return asyncio.run(cast(Any, work))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    store = Store.open(home_at(tmp_path / "home"))
    run, disk = tmp_path / "run", tmp_path / "disk"
    run.mkdir()
    disk.mkdir()
    facts = SandboxFacts(
        sandbox_id="sb-aaaaaaaaaaaaaaaa", name="m", run=str(run), form=FORM, driver="microvm",
        base=Base("dir", "/srv/root"), snapshot_id=None, layers=(),
    )  # fmt: skip
    made = Machine(None, facts, disk)
    made.place = made
    made.store = store  # type: ignore[attr-defined]
    yield made
    store.close()


def layers_of(machine: Machine, record: SnapshotRecord) -> list[set[str]]:
    """The names in each layer of a snapshot, the topmost first."""
    store: Store = machine.place.store
    return [{path.name for path in store.layer_path(layer).rglob("*")} for layer in record.layers]


def test_what_changed_since_the_last_checkpoint_is_a_layer_over_that(machine: Machine) -> None:
    (machine.disk / "d").mkdir()
    (machine.disk / "d" / "a").write_text("a")
    (machine.disk / "b").write_text("b")
    assert layers_of(machine, machine.take()) == [{"d", "a", "b"}]
    (machine.disk / "d" / "c").write_text("c")
    assert layers_of(machine, machine.take()) == [{"d", "c"}, {"d", "a", "b"}]
    (machine.disk / "b").unlink()
    third = machine.take()
    assert layers_of(machine, third) == [{"b"}, {"d", "c"}, {"d", "a", "b"}]
    again = machine.take()
    assert (again.layers, again.snapshot_id != third.snapshot_id) == (third.layers, True)
    assert os.listdir(machine.facts.run) == ["copied.0"]


def test_a_machine_that_has_nothing_of_its_own_any_more_stands_on_its_layers_alone(machine: Machine) -> None:
    (machine.disk / "a").write_text("a")
    assert len(machine.take().layers) == 1
    machine.empty = True
    assert machine.take().layers == ()
    machine.empty = False
    assert layers_of(machine, machine.take()) == [{"a"}]


def test_what_runs_stands_still_for_the_copy_alone(machine: Machine) -> None:
    machine.take(idle=False)
    assert machine.asked == ["freeze", "copy", "thaw"]
    machine.asked.clear()
    machine.take(idle=True)
    assert machine.asked == ["copy"]


@pytest.mark.parametrize("error", [NotCapturable("a device", what="a", why="a device"), SandboxDied("it ended")])
def test_a_copy_that_fails_leaves_nothing_and_the_next_is_as_before(machine: Machine, error: Exception) -> None:
    (machine.disk / "a").write_text("a")
    first = machine.take()
    (machine.disk / "b").write_text("b")
    machine.fails = error
    with pytest.raises(type(error)):
        machine.take(idle=False)
    assert machine.asked[-1] == "thaw"
    assert os.listdir(machine.facts.run) == ["copied.0"]
    machine.fails = None
    assert layers_of(machine, machine.take()) == [{"b"}, {"a"}]
    assert len(first.layers) == 1


def test_after_the_last_snapshot_was_deleted_all_is_copied_again(machine: Machine) -> None:
    (machine.disk / "a").write_text("a")
    record = machine.take()
    store: Store = machine.place.store
    store.delete_snapshot(record.snapshot_id)
    store.collect()
    (machine.disk / "b").write_text("b")
    assert layers_of(machine, machine.take()) == [{"a", "b"}]
