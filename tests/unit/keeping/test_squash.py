"""Squash: which runs are merged, and that nobody notices but by the length of a stack."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest
from tests.stores import exit_code_of, home_at, record_of, start_child

from worldfork.content.merged import MergedView, state_digest
from worldfork.core.ids import new_id
from worldfork.keeping import squash
from worldfork.keeping.squash import Run, plan, shortest, squash_deep, squash_now
from worldfork.records.snapshot import LayerRecord, SnapshotRecord
from worldfork.store import faultpoints
from worldfork.store.leases import Holder
from worldfork.store.store import Store

FORM = "trusted" if os.geteuid() == 0 else "user"
STOPPED = 42


def layer_record(layer_id: str, *, size_bytes: int | None = 4096, level: int = 0) -> LayerRecord:
    return LayerRecord(layer_id, FORM, "durable", None, None, 0.0, stored_bytes=size_bytes, level=level)


def known(stack: list[str], **different: LayerRecord) -> dict[str, LayerRecord]:
    return {name: layer_record(name) for name in stack} | different


def names(count: int) -> list[str]:
    """Of a stack, top first; the lowest is l0."""
    return [f"l{number}" for number in range(count)][::-1]


def run_of(first: int, last: int, level: int = 1) -> Run:
    return Run(tuple(f"l{number}" for number in range(last, first - 1, -1)), level)


@pytest.mark.parametrize(
    ("depth", "runs"),
    [
        (1, []),
        (64, []),
        (65, [run_of(1, 32), run_of(33, 64)]),
        (96, [run_of(1, 32), run_of(33, 64)]),
        (97, [run_of(1, 32), run_of(33, 64), run_of(65, 96)]),
    ],
)
def test_runs_begin_above_the_lowest_layer(depth: int, runs: list[Run]) -> None:
    assert plan(names(depth), known(names(depth))) == runs


def test_deeper_snapshots_of_a_chain_share_the_runs_of_all_before() -> None:
    stack = names(300)
    before: list[Run] = []
    for depth in range(65, 301):
        runs = plan(stack[-depth:], known(stack))
        assert runs[: len(before)] == before
        before = runs


@pytest.mark.parametrize("reason", ["large", "unmeasured", "unknown"])
def test_some_layers_end_a_run(reason: str) -> None:
    stack = names(80)
    facts = known(stack)
    if reason == "unknown":
        del facts["l20"]
    else:
        facts["l20"] = layer_record("l20", size_bytes=None if reason == "unmeasured" else squash.LARGE_BYTES + 1)
    assert plan(stack, facts) == [run_of(21, 52)]


def test_a_layer_at_the_limit_is_merged() -> None:
    stack = names(70)
    assert plan(stack, known(stack, l20=layer_record("l20", size_bytes=squash.LARGE_BYTES)))[0] == run_of(1, 32)


def test_levels_are_merged_apart() -> None:
    stack = names(70)
    facts = known(stack)
    for number in range(1, 40):
        facts[f"l{number}"] = layer_record(f"l{number}", level=1)
    assert plan(stack, facts) == [run_of(1, 16, 2), run_of(17, 32, 2)]
    facts["l5"] = layer_record("l5", level=2)
    assert plan(stack, facts) == [run_of(6, 21, 2), run_of(22, 37, 2)]


def write_layer(path: Path, number: int) -> None:
    """A change as a sandbox makes it: a new file, an old one changed, one deleted."""
    path.mkdir()
    (path / "deep").mkdir()
    (path / "deep" / f"file{number % 7}").write_text(f"{number}\n")
    (path / f"new{number}").write_text("x" * number)
    if number > 3:
        os.mknod(path / f"new{number - 3}", 0o020000, 0)


def grow(store: Store, count: int, below: SnapshotRecord | None = None) -> list[SnapshotRecord]:
    """A chain of durable snapshots."""
    chain = [below] if below is not None else []
    for _ in range(count):
        draft = store.begin_layer(form=FORM)
        layers = chain[-1].layers if chain else ()
        write_layer(draft.path, len(layers))
        record = record_of((draft.layer_id, *layers), form=FORM)
        store.publish(record, [draft.layer_id])
        chain.append(record)
    made = chain[1:] if below is not None else chain
    assert store.make_all_durable([record.snapshot_id for record in made]) == {}
    measure(store)
    return made


def measure(store: Store) -> None:
    with store.database.write() as db:
        db.execute("UPDATE layers SET stored_bytes = 4096 WHERE stored_bytes IS NULL")


def shown(store: Store, layers: tuple[str, ...]) -> str:
    return state_digest(MergedView([store.layer_path(layer_id) for layer_id in layers], FORM))


def expect_whole(store: Store, chain: list[SnapshotRecord], states: list[str]) -> None:
    """Every snapshot is there under its id, durable, and holds what it held."""
    for record, state in zip(chain, states, strict=True):
        present = store.snapshot(record.snapshot_id)
        assert present.state == "durable"
        assert {store.layer(layer_id).state for layer_id in present.layers} == {"durable"}
        assert shown(store, present.layers) == state


def test_deep_snapshots_come_to_stand_on_few_layers(store: Store) -> None:
    chain = grow(store, 100)
    states = [shown(store, record.layers) for record in chain]
    report = squash_deep(store)
    assert report.failures == []
    assert len(report.merged) == 3
    assert report.snapshots == (100 - 32) + (100 - 64) + (100 - 96)
    expect_whole(store, chain, states)
    assert [len(store.snapshot(chain[depth - 1].snapshot_id).layers) for depth in (32, 33, 64, 65, 97, 100)] == [
        32, 2, 33, 3, 4, 7,
    ]  # fmt: skip
    merge = store.layer(report.merged[0])
    assert (merge.level, merge.covers) == (1, chain[32].layers[:-1])
    again = squash_deep(store)
    assert (again.merged, again.reused, again.snapshots) == ([], [], 0)
    for record in chain[:99]:
        store.delete_snapshot(record.snapshot_id)
    assert store.collect().failures == []
    assert {path.name for path in store.home.layers.iterdir()} == set(store.snapshot(chain[99].snapshot_id).layers)
    expect_whole(store, chain[99:], states[99:])


def test_whoever_stands_on_the_old_layers_keeps_them(store: Store) -> None:
    chain = grow(store, 70)
    old = chain[-1].layers
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, snapshot_id=chain[-1].snapshot_id, layers=old)])
    state = shown(store, old)
    squash_deep(store)
    for record in chain[:-1]:
        store.delete_snapshot(record.snapshot_id)
    store.collect()
    assert shown(store, old) == state
    assert len(shortest(store, old)) == 1 + 2 + 5
    assert shown(store, shortest(store, old)) == state


def test_a_chain_that_grows_on_old_layers_uses_the_merges_that_are_there(store: Store) -> None:
    chain = grow(store, 70)
    report = squash_deep(store)
    more = grow(store, 1, chain[-1])
    state = shown(store, more[0].layers)
    again = squash_deep(store)
    assert (again.merged, sorted(again.reused), again.snapshots) == ([], sorted(report.merged), 2)
    expect_whole(store, more, [state])
    assert len(store.snapshot(more[0].snapshot_id).layers) == 9


def test_merges_of_merges(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squash, "_FIRST", 4)
    monkeypatch.setattr(squash, "_FURTHER", 3)
    chain = grow(store, 75)
    state = shown(store, chain[-1].layers)
    squash_deep(store)
    measure(store)
    monkeypatch.setattr(squash, "DEEP", 8)
    squash_deep(store)
    present = store.snapshot(chain[-1].snapshot_id).layers
    assert [store.layer(layer_id).level for layer_id in present] == [0, 0, *[2] * 6, 0]
    assert shown(store, present) == state
    assert shortest(store, chain[-1].layers) == present


def test_one_failure_does_not_keep_the_rest(store: Store) -> None:
    chain = grow(store, 100)
    states = [shown(store, record.layers) for record in chain]
    broken = store.layer_path(chain[40].layers[0])
    (broken / "deep" / "file0").unlink(missing_ok=True)
    os.symlink("nowhere", broken / "a-link")
    os.setxattr(broken / "deep", f"{FORM}.overlay.redirect", b"not/allowed")
    report = squash_deep(store)
    assert [what for what, _ in report.failures] == [chain[64].layers[0]]
    assert "deep" in report.failures[0][1]
    assert len(report.merged) == 2
    expect_whole(store, chain[:40], states[:40])
    assert [path.name for path in store.home.layers.iterdir() if not (path / "fs").is_dir()] == []


def stop_at(step: int) -> list[str]:
    passed: list[str] = []

    def hook(name: str) -> None:
        passed.append(name)
        if len(passed) == step:
            os._exit(STOPPED)

    faultpoints.install(hook)
    return passed


def squashing(home: Path, step: int) -> None:
    passed = stop_at(step)
    store = Store.open(home_at(home))
    squash_deep(store)
    store.collect()
    store.close()
    (home / "passed").write_text("\n".join(passed))


@pytest.mark.slow
def test_it_may_be_killed_at_every_step(tmp_path: Path) -> None:
    first = Store.open(home_at(tmp_path / "first"))
    chain = grow(first, 66)
    states = [shown(first, record.layers) for record in chain[60:]]
    first.close()
    for step in range(1, 200):
        home = tmp_path / str(step)
        subprocess.run(["cp", "-a", tmp_path / "first", home], check=True)
        code = exit_code_of(start_child(partial(squashing, home, step)))
        store = Store.open(home_at(home))
        store.sweep()
        store.collect()
        expect_whole(store, chain[60:], states)
        used = {layer_id for record in store.snapshots() for layer_id in record.layers}
        assert {path.name for path in store.home.layers.iterdir()} == used
        report = squash_deep(store)
        assert report.failures == []
        # One run less is shallow enough.
        assert len(store.snapshot(chain[65].snapshot_id).layers) in (1 + 2 + 1, 1 + 33 + 1)
        expect_whole(store, chain[60:], states)
        store.close()
        if code != STOPPED:
            break
    assert code == 0
    passed = (home / "passed").read_text().split("\n")
    assert step == len(passed) + 1
    wanted = {"squash:begun", "squash:merged", "merge:committed", "squash:published", "squash:durable"}
    assert wanted | {"rewrite:committed", "squash:rewritten"} < set(passed)


def test_shortest_changes_nothing_where_there_is_nothing(store: Store) -> None:
    chain = grow(store, 5)
    assert shortest(store, chain[-1].layers) == chain[-1].layers


def test_shortest_wants_what_survives_a_crash(store: Store) -> None:
    chain = grow(store, 12)
    fewer = squash_now(store, chain[-1].layers, 4)
    assert len(fewer) <= 4
    assert shortest(store, chain[-1].layers) == chain[-1].layers
    store.make_layers_durable(fewer)
    assert shortest(store, chain[-1].layers) == fewer


@pytest.mark.parametrize("at_most", [2, 3, 10, 50, 100, 200])
def test_squash_now_reaches_what_is_asked_for(store: Store, at_most: int) -> None:
    chain = grow(store, 100)
    state = shown(store, chain[-1].layers)
    fewer = squash_now(store, chain[-1].layers, at_most)
    assert len(fewer) <= at_most
    assert fewer[-1] == chain[-1].layers[-1]
    assert shown(store, fewer) == state
    assert (fewer == chain[-1].layers) == (at_most >= 100)
    merged = [layer_id for layer_id in fewer if layer_id not in chain[-1].layers]
    assert squash_now(store, chain[-1].layers, at_most) == fewer, "what it made is used again"
    assert {store.layer(layer_id).state for layer_id in merged} <= {"ready"}


def test_squash_now_makes_what_the_background_would(store: Store) -> None:
    chain = grow(store, 100)
    with store.database.write() as db:
        db.execute("UPDATE layers SET stored_bytes = NULL")  # of a chain that lives nothing is sealed yet
    fewer = squash_now(store, chain[-1].layers, 50)
    assert len(fewer) == 100 - 2 * 31
    measure(store)
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, layers=fewer)])
    report = squash_deep(store)
    assert len(report.reused) == 2
    assert len(report.merged) == 1


def test_squash_now_leaves_the_largest_to_the_last(store: Store) -> None:
    chain = grow(store, 12)
    stack = chain[-1].layers
    with store.database.write() as db:
        sizes = {stack[3]: squash.LARGE_BYTES + 1, stack[7]: squash.HUGE_BYTES + 1}
        for layer_id, size_bytes in sizes.items():
            db.execute("UPDATE layers SET stored_bytes = ? WHERE layer_id = ?", (size_bytes, layer_id))
    assert {stack[3], stack[7]} < set(squash_now(store, stack, 8))
    fewer = squash_now(store, stack, 4)
    assert stack[7] in fewer
    assert stack[3] not in fewer
    assert len(squash_now(store, stack, 2)) == 2
