"""What is written down of a sandbox and its copies: damaged, lost, or refused in the middle of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.victims import start_afresh, wait_clean

from worldfork import Sandbox
from worldfork.core.errors import Corrupt, OutOfSpace
from worldfork.lineage import place as places
from worldfork.store import faultpoints
from worldfork.store.leases import Holder


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    faultpoints.install(None)
    places.close_places()


def at_step(step: str, call: Callable[[], object]) -> list[str]:
    """Have something happen when a named step is passed for the first time; returns what is filled then."""
    passed: list[str] = []

    def hook(name: str) -> None:
        if name == step and not passed:
            passed.append(name)
            call()

    faultpoints.install(hook)
    return passed


def expect_files(snapshot_id: str, files: dict[str, bytes]) -> None:
    with Sandbox.create(snapshot_id=snapshot_id, network="none") as restored:
        assert {path: restored.read_file(path) for path in files} == files


def test_a_snapshot_that_is_published_is_returned(own_home: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease cannot be brought up to date after the publication: the next checkpoint does it."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        store = places.place().store
        hold_on = store.hold_on
        refused = []

        def full(holder: Holder) -> None:
            if '"generation":1' in holder.facts:
                refused.append(holder)
                raise OutOfSpace("the disk is full", scope="host")
            hold_on(holder)

        with monkeypatch.context() as patch:
            patch.setattr(store, "hold_on", full)
            first = sandbox.checkpoint()
        assert len(refused) == 1
        assert [taken.snapshot_id for taken in sandbox.list_snapshots()] == [first.snapshot_id]
        sandbox.write_file("/g", b"second")
        second = sandbox.checkpoint()
        expect_files(first.snapshot_id, {"/f": b"first"})
        expect_files(second.snapshot_id, {"/f": b"first", "/g": b"second"})
        assert len(store.snapshot(second.snapshot_id).layers) == len(store.snapshot(first.snapshot_id).layers) + 1
    start_afresh()
    assert wait_clean(own_home) == []


def test_damaged_facts_are_named_and_the_sandbox_goes_on(own_home: Path, base: str) -> None:
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        store = places.place().store
        whole = store.holder(sandbox.sandbox_id).facts
        for damaged in ("{", "[]", "{}", '{"base": 1}', whole.replace('"layers"', '"liars"')):
            store.update_facts(sandbox.sandbox_id, damaged)
            for stop in (False, True):
                with pytest.raises(Corrupt, match=sandbox.sandbox_id):
                    sandbox.checkpoint(stop=stop)
            assert sandbox.read_file("/f") == b"first"
        store.update_facts(sandbox.sandbox_id, whole)
        expect_files(sandbox.checkpoint().snapshot_id, {"/f": b"first"})
    assert wait_clean(own_home) == []


@pytest.mark.parametrize("notes", [b"", b"{", b"\xff", b"[]", b'{"layers": [], "entries": []}', b'{"layers": 1}'])
def test_damaged_notes_of_a_copy_cost_a_whole_one(own_home: Path, base: str, notes: bytes) -> None:
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        sandbox.start_process("sleep", ["1000"])
        sandbox.checkpoint()
        (path,) = (own_home / "run" / sandbox.sandbox_id).glob("copied.*")
        path.write_bytes(notes)
        sandbox.write_file("/g", b"second")
        expect_files(sandbox.checkpoint().snapshot_id, {"/f": b"first", "/g": b"second"})
    assert wait_clean(own_home) == []


def test_the_last_copy_stays_while_it_is_copied_over(own_home: Path, base: str) -> None:
    """Its snapshot is deleted and its layers collected in the middle of the next checkpoint, which stands on them."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        sandbox.start_process("sleep", ["1000"])
        first = sandbox.checkpoint()
        store = places.place().store
        sandbox.write_file("/g", b"second")
        gone: list[str] = []

        def collect() -> None:
            store.delete_snapshot(first.snapshot_id)
            gone.extend(store.collect().layers)

        passed = at_step("checkpoint:frozen", collect)
        second = sandbox.checkpoint()
        assert passed
        assert gone == []
        expect_files(second.snapshot_id, {"/f": b"first", "/g": b"second"})
        # Nobody holds it any longer than that.
        store.delete_snapshot(second.snapshot_id)
        assert len(store.collect().layers) == 2
        third = sandbox.checkpoint()
        expect_files(third.snapshot_id, {"/f": b"first", "/g": b"second"})
    start_afresh()
    assert wait_clean(own_home) == []
