"""Every named step of everything that writes: an exit there, and a crash of the machine that loses what was not synced.

After each the store opens and `check` passes; what was announced as durable is whole; what was only ready is whole or
gone; a sweep and a collection leave nothing lying about; and what was broken off can be done again.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from tests.deeds import WORKS, Diary, Work
from tests.disks import LOSSES, NO_LOSS, STOPPED, Disk, Kept, after_a_restart, stop_on, what_is_in
from tests.stores import home_at, in_child, strays, torn

from worldfork.core.clock import ManualClock
from worldfork.keeping.check import check
from worldfork.keeping.sealing import seal_all
from worldfork.store.store import Store
from worldfork.store.sweep import SweepReport


def run(work: Callable[[Store, Diary], None], home: Path, diary: Diary) -> None:
    clock = ManualClock()
    work(Store.open(home_at(home), clock=clock), diary)


def expect_sound(home: Path, diary: Diary, where: str, *, lost: bool) -> None:
    with closing(Store.open(home_at(home))) as store:
        assert check(store, read_data=True).findings == [], where
        expect_what_was_announced(store, diary, where, lost=lost)


def expect_order(home: Path, diary: Diary, where: str, *, lost: bool) -> None:
    """Sweep and collect what is left: nothing lies about, and all that was announced is still there."""
    store = Store.open(home_at(home))
    assert store.sweep(grace_s=0).failures == [], where
    assert store.collect().failures == [], where
    expect_what_was_announced(store, diary, where, lost=lost)
    # A manifest that was broken off is left to the next seal.
    assert seal_all(store).failures == [], where
    assert check(store, read_data=True).findings == [], where
    assert strays(store) == [], where
    assert store.sweep() == SweepReport(), where
    store.close()


def expect_what_was_announced(store: Store, diary: Diary, where: str, *, lost: bool) -> None:
    there = {record.snapshot_id: record for record in store.snapshots()}
    deleted = set(diary.said("deleting"))
    for record in there.values():
        assert torn(store, record) == [], where
        assert record.state == "durable" or not lost, where
    for snapshot_id in set(diary.said("durable")) - deleted:
        assert there[snapshot_id].state == "durable", where
    if not lost:
        assert set(diary.said("ready")) - deleted <= there.keys(), where
    for snapshot_id in diary.said("named")[-1:]:
        assert store.named("main") == snapshot_id, where


def stops(name: str, tmp_path: Path, kept: list[Kept], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stop a work at each of its steps, and look at each disk that may be left; return the steps' names."""
    work = WORKS[name]
    template, first = tmp_path / "template", Diary(tmp_path / "first")
    assert in_child(lambda: run(work.prepare, template, first)) == 0
    steps: list[str] = []
    seen: set[object] = set()
    while True:
        home, diary = tmp_path / "home", Diary(tmp_path / "diary")
        subprocess.run(["cp", "-a", str(template), str(home)], check=True)
        shutil.copyfile(first.path, diary.path)
        disk = Disk(home)
        try:
            code, step = stop_on(disk, partial(run, work.do, home, diary), len(steps) + 1)
            assert code == (STOPPED if step else 0), (name, steps)
            for loss in kept:
                where = f"{name}, {step or 'the end'}, kept: {loss}"
                left = home.with_name("left")
                disk.crash(left, loss)
                facts = what_is_in(left), diary.path.read_text(), loss == NO_LOSS
                if facts not in seen:
                    seen.add(facts)
                    expect_after(left, loss, diary, work, where, monkeypatch)
                shutil.rmtree(left)
        finally:
            disk.close()
            shutil.rmtree(home)
        if not step:
            return steps
        steps.append(step)


def expect_after(left: Path, loss: Kept, diary: Diary, work: Work, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Diary(diary.path.with_name("mine"))
    shutil.copyfile(diary.path, mine.path)
    lost = loss != NO_LOSS
    with monkeypatch.context() as patch:
        if lost:
            after_a_restart(patch.setattr)
        if not work.heals:
            expect_sound(left, mine, where, lost=lost)
        if not (work.heals or work.at_once):
            expect_order(left, mine, where, lost=lost)
        # Once more, by a process that knows nothing of the first: it has to come through.
        if lost:
            mine.forget("ready")
        assert in_child(lambda: run(work.do, left, mine)) == 0, where
        expect_order(left, mine, f"{where}, done again", lost=False)
    mine.path.unlink()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", WORKS)
def test_a_stop_or_a_crash_at_any_step(name: str, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = [NO_LOSS, *(LOSSES[1::2] if WORKS[name].known else LOSSES)]
    steps = stops(name, memory, losses, monkeypatch)
    assert len(steps) >= WORKS[name].least, steps
    for verb in WORKS[name].verbs:
        assert any(step.startswith(f"{verb}:") for step in steps), (verb, steps)
