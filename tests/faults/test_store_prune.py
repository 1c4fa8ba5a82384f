"""Prune and its collection against mounts, kills, pauses, full disks and many others at work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.test_store_crash import STOPPED, expect_order, stop_at
from tests.faults.test_store_races import read_as_a_fork
from tests.stores import add_snapshot, exit_code_of, home_at, in_child, problems, record_of, start_child

from worldfork.core.errors import Locked, NotFound
from worldfork.core.ids import new_id
from worldfork.keeping.keep_rules import KeepRules
from worldfork.keeping.prune import prune
from worldfork.keeping.quota import enforce_quota
from worldfork.keeping.usage import measure_layers
from worldfork.store import faultpoints
from worldfork.store import home as homes
from worldfork.store.leases import Holder
from worldfork.store.store import Store

NONE = KeepRules(last=0)
LOCALS = 18
"""More than one transaction deletes."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(home_at(tmp_path / "home"))
    yield opened
    opened.close()


def run_script(text: str, place: Path) -> None:
    """Run a program that mounts: in a mount namespace of its own, whose mounts end with it."""
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", text, str(place)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(homes.__file__).parents[2]), os.getcwd()])},
        check=False,
    )
    assert done.returncode == 0, done.stderr


MOUNTED = """
import subprocess, sys
from pathlib import Path
from tests.stores import add_snapshot, home_at, problems
from worldfork.keeping.keep_rules import KeepRules
from worldfork.keeping.prune import prune
from worldfork.store.store import Store
place = Path(sys.argv[1])
store = Store.open(home_at(place / "home"))
precious = place / "precious"
precious.mkdir()
(precious / "file").write_text("precious")
records = [add_snapshot(store) for _ in range(40)]
on_it = store.home.layers / records[7].layers[0]
below_it = store.layer_path(records[21].layers[0]) / "below"
below_it.mkdir()
for target in (on_it, below_it):
    subprocess.run(["mount", "--bind", str(precious), str(target)], check=True)

report = prune(store, KeepRules(last=0))
assert len(report.deleted) == 40, report
assert store.snapshots() == []
assert {str(on_it) in why or what in str(on_it) for what, why in report.failures} == {True, False}, report.failures
assert len(report.failures) == 2, report.failures
assert [path.name for path in store.home.layers.iterdir()] == [on_it.name]
assert len(list(store.home.trash.iterdir())) == 1
again = prune(store, KeepRules(last=0))
assert (again.deleted, again.layers, len(again.failures)) == ([], [], 2), again
assert (precious / "file").read_text() == "precious"

trashed = next(store.home.trash.iterdir()) / "fs" / "below"
for target in (on_it, trashed):
    subprocess.run(["umount", str(target)], check=True)
assert prune(store, KeepRules()).failures == []
assert problems(store) == [], problems(store)
assert (precious / "file").read_text() == "precious"
store.close()
"""


@pytest.mark.root
def test_what_cannot_be_deleted_stops_nothing_else(tmp_path: Path) -> None:
    run_script(MOUNTED, tmp_path)


FULL = """
import dataclasses, errno, subprocess, sys
from pathlib import Path
from tests.stores import add_snapshot, home_at, problems, record_of
from worldfork.keeping.keep_rules import KeepRules
from worldfork.keeping.prune import prune
from worldfork.keeping.quota import enforce_quota
from worldfork.store.store import Store
from worldfork.keeping.usage import usage
place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(place)], check=True)

def fill():
    with open(place / "filler", "ab", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC

store = Store.open(home_at(place / "home"))
keep = add_snapshot(store)
store.make_durable(keep.snapshot_id)
store.set_name("keep", keep.snapshot_id)
records = []
for number in range(6):
    draft = store.begin_layer(form="trusted")
    draft.path.mkdir()
    (draft.path / "file").write_text(draft.layer_id)
    (draft.path / "large").write_bytes(b"x" * (1 << 20))
    record = dataclasses.replace(record_of((draft.layer_id,)), level="volatile" if number < 3 else "local")
    store.publish(record, [draft.layer_id])
    records.append(record)
fill()
# The log has room for a few transactions more; take that away.
from worldfork.core.errors import OutOfSpace
from worldfork.core.ids import new_id
from worldfork.store.leases import Holder
held = []
for _ in range(3000):
    held.append(new_id("sb"))
    try:
        store.hold([Holder(held[-1], facts='"' + "x" * 2000 + '"')])
    except OutOfSpace:
        break
else:
    raise AssertionError("the disk never filled")
assert usage(store, measure=True).layers == 7
planned = prune(store, KeepRules(last=3), dry_run=True)
assert len(planned.deleted) == 3, planned
assert len(store.snapshots()) == 7

report = enforce_quota(store, 4 << 20)
assert report.deleted[:1] == [records[0].snapshot_id] and report.failures == [], report
assert report.over_bytes == 0, report
fill()
import json, os
here = str(place / "home")
for verb in (["df"], ["tree"], ["prune", "--keep-last", "1", "--dry-run"], ["prune", "--keep-last", "1"]):
    line = [sys.executable, "-c", "from worldfork.cli.main import main; main()", *verb, "--json"]
    settings = {**os.environ, "WORLDFORK_HOME": here, "WORLDFORK_SCRATCH": here, "WORLDFORK_UPKEEP": "off"}
    done = subprocess.run(line, capture_output=True, text=True, env=settings, check=False)
    assert done.returncode == 0, (verb, done.stderr)
    fill()
said = json.loads(done.stdout)
assert len(said["deleted"]) == 2 and said["layers"], said
assert {record.snapshot_id for record in store.snapshots()} == {keep.snapshot_id, records[5].snapshot_id}
fill()
store.release(held)
assert prune(store, KeepRules(last=0)).failures == []
assert store.sweep().failures == []
assert store.sweep().failures == []
assert [record.snapshot_id for record in store.snapshots()] == [keep.snapshot_id]
assert store.snapshot(keep.snapshot_id).state == "durable"
assert problems(store) == [], problems(store)
store.close()
"""


@pytest.mark.root
def test_a_full_disk(tmp_path: Path) -> None:
    run_script(FULL, tmp_path)


def fill_store(home: Path) -> None:
    """Make what a prune and a quota find to do."""
    store = Store.open(home_at(home))
    base = add_snapshot(store)
    store.set_name("base", base.snapshot_id)
    for number in range(LOCALS):
        record = add_snapshot(store, below=base.layers if number % 2 else ())
        if number == 10:
            store.hold([Holder(new_id("sb"), layers=record.layers)])
    for _ in range(3):
        draft = store.begin_layer(form="trusted")
        draft.path.mkdir()
        (draft.path / "file").write_text(draft.layer_id)
        store.publish(dataclasses.replace(record_of((draft.layer_id,)), level="volatile"), [draft.layer_id])
    os._exit(0)


def test_a_stop_at_any_step(tmp_path: Path) -> None:
    step = 0
    names: set[str] = set()
    while True:
        step += 1
        home = tmp_path / f"home-{step}"

        def work(step: int = step, home: Path = home) -> None:
            store = Store.open(home_at(home))
            passed = stop_at(step)
            enforce_quota(store, 1)
            prune(store, KeepRules(last=2), measure=True)
            (tmp_path / "steps").write_text("\n".join(passed))
            os._exit(0)

        assert in_child(lambda home=home: fill_store(home)) == 0  # type: ignore[misc]
        with Store.open(home_at(home)).database.read() as db:
            known = [row[0] for row in db.execute("SELECT snapshot_id FROM snapshots ORDER BY number")]
        code = in_child(work)
        assert code in (0, STOPPED)
        store = expect_order(home, f"step {step}")
        left = [record.snapshot_id for record in store.snapshots()]
        # The volatile ones at the end may go for the quota; of the others the oldest go first.
        assert set(known[LOCALS - 1 : LOCALS + 1]) <= set(left)
        assert left[0] == known[0]
        assert left == [one for one in known if one in set(left)]
        locals_left = [one for one in left[1:] if one in set(known[1 : LOCALS + 1])]
        assert locals_left == known[LOCALS + 1 - len(locals_left) : LOCALS + 1]
        assert prune(store, KeepRules(last=2)).failures == []
        assert problems(store) == []
        assert prune(store, KeepRules(last=2)).deleted == []
        store.close()
        if code == 0:
            names.update((tmp_path / "steps").read_text().split("\n"))
            break
    assert step > 20
    assert {"prune:planned", "prune:written", "prune:committed", "prune:collected", "measure:written"} <= names


def test_an_interrupted_prune_goes_on_where_it_was(store: Store) -> None:
    records = [add_snapshot(store) for _ in range(60)]
    passed: list[str] = []

    def interrupt(name: str) -> None:
        passed.append(name)
        if passed.count("prune:committed") == 2:
            faultpoints.install(None)
            raise KeyboardInterrupt

    faultpoints.install(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            prune(store, KeepRules(last=5))
    finally:
        faultpoints.install(None)
    left = [record.snapshot_id for record in store.snapshots()]
    assert left == [record.snapshot_id for record in records[-len(left) :]]
    assert 5 < len(left) < 60
    report = prune(store, KeepRules(last=5))
    assert (report.deleted, report.failures) == (left[:-5], [])
    assert problems(store) == []


def test_two_at_once_delete_each_once(store: Store, tmp_path: Path) -> None:
    records = [add_snapshot(store) for _ in range(200)]
    start, go = os.pipe()

    def work(number: int) -> None:
        os.close(go)
        os.read(start, 1)
        report = prune(store, KeepRules(last=10))
        assert report.failures == []
        (tmp_path / f"deleted-{number}").write_text(json.dumps(report.deleted))

    children = [start_child(lambda number=number: work(number)) for number in range(4)]  # type: ignore[misc]
    os.close(start)
    os.close(go)
    assert [exit_code_of(child) for child in children] == [0] * 4
    deleted = [one for number in range(4) for one in json.loads((tmp_path / f"deleted-{number}").read_text())]
    assert sorted(deleted) == sorted(record.snapshot_id for record in records[:-10])
    assert prune(store, KeepRules(last=10)).deleted == []
    store.sweep()
    assert problems(store) == []


def test_a_collector_that_stood_still_removes_nothing_reused(store: Store) -> None:
    """A collector is stopped between mark and sweep, a writer reuses what it marked, and it goes on."""
    reused, gone = add_snapshot(store), add_snapshot(store)

    def prune_and_stop() -> None:
        def hook(name: str) -> None:
            if name == "collect:committed":
                os.kill(os.getpid(), signal.SIGSTOP)

        faultpoints.install(hook)
        report = prune(store, NONE)
        assert report.layers == list(gone.layers), report

    child = start_child(prune_and_stop)
    status = os.waitpid(child, os.WUNTRACED)[1]
    assert os.WIFSTOPPED(status)
    assert store.layer(reused.layers[0]).state == "condemned"
    with store.reading(purpose="import") as reading:
        assert reading.claim(reused.layers) == set(reused.layers)
        again = record_of(reused.layers)
        store.publish(again, [])
    os.kill(child, signal.SIGCONT)
    assert exit_code_of(child) == 0
    assert (store.layer_path(reused.layers[0]) / "file").read_text() == reused.layers[0]
    store.make_durable(again.snapshot_id)
    assert [record.snapshot_id for record in store.snapshots()] == [again.snapshot_id]
    store.sweep()
    assert problems(store) == []


def test_a_prune_that_stood_still_spares_what_was_saved_meanwhile(store: Store) -> None:
    """One is stopped between its look and its first deletion: what others named and forked since stays."""
    records = [add_snapshot(store) for _ in range(30)]

    def prune_and_stop() -> None:
        def hook(name: str) -> None:
            if name == "prune:planned":
                os.kill(os.getpid(), signal.SIGSTOP)

        faultpoints.install(hook)
        prune(store, NONE)

    child = start_child(prune_and_stop)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    named, forked, newer = records[3], records[25], add_snapshot(store)
    store.set_name("saved", named.snapshot_id)
    sandbox = new_id("sb")
    store.hold([Holder(sandbox, snapshot_id=forked.snapshot_id, layers=forked.layers)])
    os.kill(child, signal.SIGCONT)
    assert exit_code_of(child) == 0
    kept = [record.snapshot_id for record in (named, forked, newer)]
    assert [record.snapshot_id for record in store.snapshots()] == kept
    store.release([sandbox])
    store.sweep()
    assert problems(store) == []


def test_what_the_rules_keep_is_kept_beside_32_publishers(store: Store, tmp_path: Path) -> None:
    done = tmp_path / "done"

    def publish(number: int) -> None:
        chance = random.Random(number)
        for count in range(8):
            draft = store.begin_layer(form="trusted")
            draft.path.mkdir()
            (draft.path / "file").write_text(draft.layer_id)
            keep = chance.random() < 0.5
            record = dataclasses.replace(record_of((draft.layer_id,)), label="keep" if keep else "drop")
            store.publish(record, [draft.layer_id])
            if keep:
                with (tmp_path / f"kept-{number}").open("a") as lines:
                    lines.write(f"{record.snapshot_id}\n")
            with contextlib.suppress(NotFound):
                read_as_a_fork(store, record.snapshot_id)
                if not keep and count % 4 == 3:
                    store.set_name(f"name-{number}-{count}", record.snapshot_id)

    def prune_until_done() -> None:
        deleted = 0
        while True:
            last = done.exists()
            report = prune(store, KeepRules(labels=("keep",)))
            assert report.failures == [], report.failures
            deleted += len(report.deleted)
            if last:
                break
        assert deleted > 0

    pruners = [start_child(prune_until_done) for _ in range(2)]
    publishers = [start_child(lambda number=number: publish(number)) for number in range(32)]  # type: ignore[misc]
    codes = [exit_code_of(child) for child in publishers]
    done.touch()
    assert [exit_code_of(child) for child in pruners] == [0, 0]
    assert codes == [0] * 32
    announced = {line for path in tmp_path.glob("kept-*") for line in path.read_text().split()}
    names = set(store.names().values())
    left = {record.snapshot_id: record.label for record in store.snapshots()}
    assert {one for one, label in left.items() if label == "keep"} == announced
    store.sweep()
    assert prune(store, KeepRules(labels=("keep",))).failures == []
    assert {record.snapshot_id for record in store.snapshots()} == announced | names
    assert problems(store) == []


def test_thrash(store: Store) -> None:
    """Writers, readers, deleters, pruners, collectors and a quota at once: nobody ever reads what is not whole."""

    def work(seed: int) -> None:
        chance = random.Random(seed)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            known = store.snapshots()
            verb = chance.choice(["add", "add", "fork", "delete", "prune", "prune", "quota", "tag", "durable", "claim"])
            with contextlib.suppress(NotFound, Locked):
                if verb == "add" or len(known) < 3:
                    add_snapshot(store, below=chance.choice(known).layers if known and chance.random() < 0.5 else ())
                elif verb == "delete":
                    store.delete_snapshot(chance.choice(known).snapshot_id)
                else:
                    _thrash_one(store, verb, chance, chance.choice(known).snapshot_id)

    children = [start_child(lambda seed=seed: work(seed)) for seed in range(6)]  # type: ignore[misc]
    time.sleep(0.7)
    os.kill(children[0], signal.SIGKILL)
    codes = [exit_code_of(child) for child in children]
    assert codes == [-signal.SIGKILL, 0, 0, 0, 0, 0]
    store.sweep(grace_s=0)
    assert prune(store, KeepRules(last=5)).failures == []
    assert len(store.snapshots()) >= 3
    assert problems(store) == []


def _thrash_one(store: Store, verb: str, chance: random.Random, snapshot_id: str) -> None:
    if verb == "fork":
        read_as_a_fork(store, snapshot_id)
    elif verb == "prune":
        rules = KeepRules(last=chance.randrange(3, 12), ancestors=chance.random() < 0.5)
        assert prune(store, rules, dry_run=chance.random() < 0.2).failures == []
    elif verb == "quota":
        assert enforce_quota(store, 100_000).failures == []
    elif verb == "tag":
        store.set_name(f"name-{chance.randrange(5)}", snapshot_id)
    elif verb == "durable":
        store.make_durable(snapshot_id)
    else:
        layers = store.snapshot(snapshot_id).layers
        with store.reading(purpose="thrash") as reading:
            for layer_id in reading.claim(layers):
                assert (store.layer_path(layer_id) / "file").read_text() == layer_id


def test_many_deletions_while_the_list_is_read(store: Store) -> None:
    for _ in range(120):
        add_snapshot(store)

    def delete_all() -> None:
        for record in reversed(store.snapshots()):
            with contextlib.suppress(NotFound):
                store.delete_snapshot(record.snapshot_id)

    def look(call: Callable[[], object]) -> None:
        while store.snapshots():
            call()

    children = [start_child(delete_all) for _ in range(2)]
    children.append(start_child(lambda: look(lambda: measure_layers(store))))
    children.append(start_child(lambda: look(lambda: prune(store, KeepRules(last=1), dry_run=True))))
    children.append(start_child(lambda: look(lambda: prune(store, KeepRules(last=60)))))
    assert [exit_code_of(child) for child in children] == [0] * 5
    assert prune(store, KeepRules()).failures == []
    store.sweep()
    assert problems(store) == []
