"""Random operations in sandboxes, with checkpoints, restores and forks between them, against a plain directory."""

from __future__ import annotations

import io
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.property.conftest import FORMS, examples, operations_for
from tests.trees import (
    FIRST,
    PYTHON,
    SOURCE,
    Holder,
    Manifest,
    Model,
    Operation,
    Program,
    differences,
    live,
    outcome_differences,
    program,
    with_links_of,
    without,
)

from worldfork import Sandbox, SnapshotInfo
from worldfork.core.errors import ConfigError
from worldfork.core.remove import remove_tree
from worldfork.exchange.arrival import import_snapshot
from worldfork.exchange.departure import export_snapshot
from worldfork.keeping.squash import squash_now
from worldfork.lineage.place import close_place, place

TREE = "/workspace/tree"


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, home: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLDFORK_FORM", request.param)
        yield request.param


@pytest.fixture(scope="module")
def world(form: str) -> SnapshotInfo:
    """The snapshot that every example begins with; its tree lies in a lower layer."""
    with Sandbox.create(network="none") as box:
        answer = ask(box, first=True)
        assert all(outcome[0] == "done" for outcome in answer["outcomes"])
        return box.checkpoint(stop=True)


@pytest.fixture(scope="module")
def plain(form: str) -> Iterator[Program]:
    """Works on plain directories as the root of a sandbox of this form does."""
    with program(alike(form)) as running:
        yield running


def alike(form: str) -> list[str]:
    # Only the root of the machine keeps the set-id bits of a file that it writes to.
    return ["unshare", "--user", "--map-root-user"] if form == "user" and os.geteuid() == 0 else []


@pytest.fixture(scope="module")
def template(plain: Program, ground: Path) -> Model:
    """The same in a plain directory."""
    root = ground / uuid.uuid4().hex
    root.mkdir()
    plain.ask(root, operations=FIRST, describe=False)
    return Model(plain, root)


def ask(box: Sandbox, *, first: bool = False, **request: Any) -> Any:
    """Have the program answer one request inside."""
    if first:
        box.make_directory(TREE)
        request["operations"] = FIRST
    words = json.dumps({"root": TREE, **request})
    result = box.run("python", [*PYTHON, "-c", SOURCE], stdin=words + "\n", timeout=30)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def judge(expected: Manifest, actual: Manifest, where: str) -> None:
    lines = differences(expected, actual)
    assert not lines, "\n".join([where, *lines])


@dataclass
class Line:
    """One sandbox at a time, its model, and every snapshot on the way with what it must hold."""

    world: SnapshotInfo
    model: Model
    form: str
    place: Path
    box: Sandbox
    name: str | None = None
    """Of the processes, one inside and one beside, that hold files open."""
    inside: int = 0
    beside: Holder | None = None
    made: list[Sandbox] = field(default_factory=list)
    taken: list[tuple[SnapshotInfo, Manifest]] = field(default_factory=list)

    def work(self, operations: list[Operation]) -> Manifest:
        answer = ask(self.box, operations=operations, holder=self.name)
        outcomes, expected = self.model.apply(operations, answer["outcomes"], self.name)
        seen: Manifest = answer["manifest"]
        judge(live(without(expected, "mtime_ns"), self.form), live(without(seen, "mtime_ns"), self.form), "live")
        lines = outcome_differences(operations, answer["outcomes"], outcomes, base_dirs_move=self.form == "trusted")
        assert not lines, "\n".join(lines)
        return with_links_of(seen, expected)

    def hold(self) -> None:
        """Have a process run inside, and its like beside."""
        if self.name is not None:
            return
        self.name = f"worldfork-tree-{uuid.uuid4().hex}"
        self.inside = self.box.start_process("python", [*PYTHON, "-c", SOURCE, "hold", self.name]).pid
        next(iter(self.box.follow_stdout(self.inside)))
        self.beside = Holder(self.name, alike(self.form))

    def let_go(self) -> None:
        if self.name is not None and self.beside is not None:
            self.box.kill_process(self.inside)
            self.beside.end()
        self.name = self.beside = None

    def step(self, operations: list[Operation], how: str, then: str) -> None:
        if how == "busy":
            self.hold()
        else:
            self.let_go()
        seen = self.work(operations)
        snapshot = self.box.checkpoint(stop=how == "stop")
        if how == "idle":
            self.model.seal()
        self.taken.append((snapshot, seen))
        if then == "squash":
            self.squash(snapshot)
        if then == "travel":
            self.travel(snapshot, seen)
        child = self.restored(snapshot, seen)
        if then == "twins":
            twin = self.keep(child.fork(1).unwrap()[0])
            judge(seen, ask(twin)["manifest"], "in the fork of a fork")
            twin.terminate()
        if then == "live" and how != "stop":
            twin = self.keep(self.box.fork(1).unwrap()[0])
            judge(seen, ask(twin)["manifest"], "in a fork of the live sandbox")
            twin.terminate()
        if then == "drop" and how != "stop":
            child.terminate()
            self.taken.pop()
            Sandbox.delete_snapshot(snapshot.snapshot_id)
        elif then == "move" or how == "stop":
            self.move_to(child)
        else:
            child.terminate()

    def squash(self, snapshot: SnapshotInfo) -> None:
        """Have all layers of a snapshot but the lowest merged into one."""
        store = place().store
        store.make_durable(snapshot.snapshot_id)
        layers = store.snapshot(snapshot.snapshot_id).layers
        if len(layers) > 2:
            with store.reading(layers=layers, purpose="test"):
                by = squash_now(store, layers, 2)
                store.make_layers_durable(by)
                assert store.rewrite(layers, by) > 0
            assert store.snapshot(snapshot.snapshot_id).layers == by
            store.collect()

    def travel(self, snapshot: SnapshotInfo, seen: Manifest) -> None:
        """Export a snapshot, import it into another home, and look at it there; its archive there is the same."""
        with io.BytesIO() as archive, io.BytesIO() as again:
            export_snapshot(place().store, snapshot.snapshot_id, archive)
            archive.seek(0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("WORLDFORK_HOME", str(self.place / f"home-{uuid.uuid4().hex}"))
                there = place()
                try:
                    if self.form == "user" and "security.capability" in json.dumps(seen):
                        with pytest.raises(ConfigError, match=r"security\.capability"):
                            import_snapshot(there.store, archive, self.form)
                        return
                    import_snapshot(there.store, archive, self.form)
                    with Sandbox.create(snapshot_id=snapshot.snapshot_id) as child:
                        judge(seen, ask(child)["manifest"], "in another home")
                    export_snapshot(there.store, snapshot.snapshot_id, again)
                finally:
                    close_place(there)
            assert again.getvalue() == archive.getvalue()

    def restored(self, snapshot: SnapshotInfo, seen: Manifest) -> Sandbox:
        child = self.keep(Sandbox.create(snapshot_id=snapshot.snapshot_id))
        judge(seen, ask(child)["manifest"], "in the restored sandbox")
        return child

    def move_to(self, child: Sandbox) -> None:
        if self.beside is not None:
            self.beside.end()
            self.name = self.beside = None
        self.box.terminate()
        self.box = child
        self.model = self.model.clone(self.place / uuid.uuid4().hex)

    def keep(self, box: Sandbox) -> Sandbox:
        self.made.append(box)
        return box

    def end(self) -> None:
        if self.beside is not None:
            self.beside.end()
        for box in (self.box, *self.made):
            box.terminate()

    def look_back(self) -> None:
        """Whatever came later, each snapshot holds what it held."""
        for snapshot, seen in self.taken:
            self.restored(snapshot, seen).terminate()


HOW = ("idle", "busy", "busy", "busy", "stop")
THEN = ("stay", "move", "twins", "live", "drop", "squash", "squash", "travel")


def steps(form: str) -> st.SearchStrategy[Any]:
    step = st.tuples(st.lists(operations_for(form), max_size=10), st.sampled_from(HOW), st.sampled_from(THEN))
    return st.lists(step, min_size=1, max_size=5)


def test_snapshots_hold_what_was_there(
    form: str, world: SnapshotInfo, template: Model, plain: Program, ground: Path
) -> None:
    @examples(12)
    @given(steps(form))
    def check(scenario: Any) -> None:
        place = ground / uuid.uuid4().hex
        place.mkdir()
        box = Sandbox.create(snapshot_id=world.snapshot_id)
        line = Line(world, template.clone(place / "model"), form, place, box)
        try:
            for operations, how, then in scenario:
                line.step(operations, how, then)
            line.look_back()
        finally:
            line.end()
            plain.ask(place, forget=True, describe=False)
            remove_tree(place)
        for snapshot, _ in reversed(line.taken):
            Sandbox.delete_snapshot(snapshot.snapshot_id)

    check()
