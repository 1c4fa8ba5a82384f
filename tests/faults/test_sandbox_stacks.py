"""Merges that a sandbox is about to stand on, and that are collected before it holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.victims import deepen, start_afresh, wait_clean

from worldfork import Sandbox
from worldfork.keeping.squash import squash_now
from worldfork.lineage import place as places
from worldfork.lineage.stacks import DEEPEST
from worldfork.store import faultpoints
from worldfork.store.store import Store


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    faultpoints.install(None)
    places.close_places()


def collect_merges() -> list[str]:
    """Collect what nobody holds, as if whoever made it had stood still since."""
    store = places.place().store
    with store.database.write() as db:
        db.execute("UPDATE layers SET renewed_s = 0 WHERE covers IS NOT NULL")
    return store.collect().layers


def chain_of(base: str, depth: int) -> str:
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        return deepen(sandbox.checkpoint(), depth)


def test_a_checkpoint_goes_on_without_a_merge_that_went(own_home: Path, base: str) -> None:
    chain = chain_of(base, 40)
    store = places.place().store
    with Sandbox.create(snapshot_id=chain) as sandbox:
        layers = store.snapshot(chain).layers
        assert len(squash_now(store, layers, 20)) <= 20
        merges = [record.layer_id for record in store.layers_known() if record.covers]
        store.make_layers_durable(merges)
        sandbox.write_file("/g", b"second")
        gone: list[list[str]] = []

        def hook(name: str) -> None:
            # It has looked which layers to stand on.
            if name == "begin_layer:made" and not gone:
                gone.append(collect_merges())

        faultpoints.install(hook)
        snapshot = sandbox.checkpoint()
        faultpoints.install(None)
        assert set(gone[0]) == set(merges)
        assert store.snapshot(snapshot.snapshot_id).layers[1:] == layers
        assert (sandbox.read_file("/f"), sandbox.read_file("/g")) == (b"first", b"second")
    start_afresh()
    assert wait_clean(own_home) == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_start_never_falls_back_to_what_is_too_deep(
    own_home: Path, base: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    chain = chain_of(base, 490)
    gone: list[list[str]] = []

    def squash_and_stand_still(store: Store, layers: Sequence[str], at_most: int) -> tuple[str, ...]:
        merged = squash_now(store, layers, at_most)
        if not gone:
            gone.append(collect_merges())
        return merged

    monkeypatch.setattr("worldfork.keeping.squash.squash_now", squash_and_stand_still)
    results = Sandbox.fork_snapshot(chain, number)
    for sandbox in results.unwrap():
        assert sandbox.read_file("/f") == b"first"
        assert sandbox.info().layers <= DEEPEST
        sandbox.terminate()
    assert gone[0]
    places.close_places()
    start_afresh()
    assert wait_clean(own_home) == []
