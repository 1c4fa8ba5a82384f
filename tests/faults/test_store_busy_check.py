"""A check beside writers, deleters, collectors, sealers and squashers, some of them killed, reports nothing false."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.full_layers import FORMS, fill
from tests.stores import exit_code_of, home_at, record_of, start_child

from worldfork.core.errors import Locked, NotFound, StoreError
from worldfork.core.ids import new_id
from worldfork.core.settings import Settings
from worldfork.keeping.check import check
from worldfork.keeping.sealing import seal
from worldfork.keeping.upkeep import keep_up
from worldfork.store.home import Home
from worldfork.store.leases import Holder
from worldfork.store.store import Store

ROUNDS = 300
MOST_SNAPSHOTS = 12


def work(home: Home, form: str, seed: int, stop: int) -> None:
    """Do what processes do with a store until somebody closes the other end of `stop`."""
    chance = random.Random(seed)
    store = Store.open(home)
    os.set_blocking(stop, False)
    while True:
        with contextlib.suppress(BlockingIOError):
            if os.read(stop, 1) == b"":
                os._exit(0)
        verb = chance.choice(
            ["add", "add", "add", "delete", "delete", "seal", "durable", "fork", "collect", "upkeep", "sweep"]
        )
        # Others delete and collect what this one has just read of.
        with contextlib.suppress(NotFound, Locked):
            one_step(store, form, verb, chance)


def one_step(store: Store, form: str, verb: str, chance: random.Random) -> None:
    known = store.snapshots()
    chosen = chance.choice(known) if known else None
    if verb == "add" and len(known) < MOST_SNAPSHOTS:
        draft = store.begin_layer(form=form)
        fill(draft.path, form)
        (draft.path / draft.layer_id).write_text(draft.layer_id)
        below = chosen.layers if chosen is not None and chance.random() < 0.7 else ()
        try:
            store.publish(record_of((draft.layer_id, *below), form=form), [draft.layer_id])
        except NotFound:
            store.abandon_layer(draft.layer_id)
    elif verb == "collect":
        assert store.collect().failures == []
    elif verb == "sweep":
        assert store.sweep().failures == []
    elif verb == "upkeep":
        keep_up(store, Settings(home=store.home.root, scratch=store.home.scratch))
    elif chosen is None:
        return
    elif verb == "delete" and len(known) > 3:
        store.delete_snapshot(chosen.snapshot_id)
    elif verb == "seal":
        seal(store, chance.choice(chosen.layers))
    elif verb == "durable":
        with contextlib.suppress(StoreError):
            store.make_durable(chosen.snapshot_id)
        store.set_name(f"name-{chance.randrange(3)}", chosen.snapshot_id)
    elif verb == "fork":
        sandbox = new_id("sb")
        store.hold([Holder(sandbox, snapshot_id=chosen.snapshot_id, layers=chosen.layers)])
        store.release([sandbox])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_false_is_reported(tmp_path: Path, form: str) -> None:
    home = home_at(tmp_path / "home")
    store = Store.open(home)
    seen = {"sealed": 0, "unsealed": 0, "moving": 0, "gone": 0}
    stop, go_on = os.pipe()

    def start(seed: int) -> int:
        def run() -> None:
            os.close(go_on)
            work(home, form, seed, stop)

        return start_child(run)

    workers = [start(seed) for seed in range(3)]
    end_s = time.monotonic() + 120
    for number in range(ROUNDS):
        report = check(store, read_data=number % 3 == 0)
        assert [str(finding) for finding in report.findings] == [], f"round {number}"
        assert report.sound
        assert not [note for note in report.notes if "was not looked at" in note]
        for name in seen:
            seen[name] += getattr(report, name)
        if number % 40 == 20:
            os.kill(workers[0], signal.SIGKILL)
            assert exit_code_of(workers.pop(0)) == -signal.SIGKILL
            workers.append(start(1000 + number))
        if time.monotonic() > end_s and number > 100:
            break
    os.close(go_on)
    assert [exit_code_of(worker) for worker in workers] == [0] * len(workers)
    os.close(stop)
    store.sweep()
    store.collect()
    assert check(store, read_data=True).findings == []
    # It has met all that could have misled it.
    assert all(seen.values()), seen
    store.close()
