"""A damaged layer is repaired from a copy that proves to be what was lost, or not at all."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.full_layers import FORMS, add_full, change, flip_a_bit, keeping_times
from tests.stores import add_snapshot, exit_code_of, home_at, in_child, start_child

from worldfork.core.errors import NotFound
from worldfork.core.ids import new_id
from worldfork.keeping.check import check
from worldfork.keeping.repair import RepairReport, repair
from worldfork.keeping.sealing import manifest_path, seal
from worldfork.keeping.sharing import share_equal
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store import faultpoints
from worldfork.store.leases import Holder
from worldfork.store.store import Store

STOPPED = 42


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_hook() -> Iterator[None]:
    yield
    faultpoints.install(None)


class Copies:
    """Whole layers elsewhere, by their digests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self.fetched: list[str] = []

    def keep(self, store: Store, layer_id: str) -> None:
        digest = str(store.layer(layer_id).digest)
        copy_tree(store.layer_path(layer_id), self.directory / digest)

    def fetch(self, digest: str, target: Path, form: str) -> None:
        self.fetched.append(digest)
        if not (self.directory / digest).exists():
            raise NotFound(f"there is no copy of {digest}")
        copy_tree(self.directory / digest, target)


def copy_tree(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", "--", source, target], check=True)


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path / "copies")


def add(store: Store, copies: Copies, form: str, *, durable: bool = True) -> SnapshotRecord:
    record = add_full(store, form)
    if durable:
        store.make_durable(record.snapshot_id)
    copies.keep(store, record.layers[0])
    return store.snapshot(record.snapshot_id)


def mend(store: Store, copies: Copies) -> RepairReport:
    report = check(store, read_data=True)
    assert not report.sound
    return repair(store, report, copies.fetch)


def bit_in_a_file(store: Store, layer_id: str) -> None:
    keeping_times(store.layer_path(layer_id), lambda root: flip_a_bit(root / "full" / "text"))


REPLACED: list[Callable[[Store, str], object]] = [
    bit_in_a_file,
    lambda store, layer_id: os.truncate(store.layer_path(layer_id) / "full/deep/more", 10),
    lambda store, layer_id: (store.layer_path(layer_id) / "fifo").unlink(),
    lambda store, layer_id: (store.layer_path(layer_id) / "extra").touch(),
]


@pytest.mark.parametrize("damage", REPLACED, ids=["bit", "shortened", "missing", "extra"])
def test_snapshots_come_to_stand_on_the_copy(
    store: Store, copies: Copies, form: str, damage: Callable[[Store, str], object]
) -> None:
    record = add(store, copies, form)
    other = add_snapshot(store, form=form, below=record.layers)
    store.make_durable(other.snapshot_id)
    old = record.layers[0]
    digest = store.layer(old).digest
    damage(store, old)
    [repaired] = mend(store, copies).repaired
    assert (repaired.layer_id, repaired.how, repaired.snapshots) == (old, "replaced", 2)
    new = repaired.by
    assert new is not None
    assert store.snapshot(record.snapshot_id).layers == (new,)
    assert store.snapshot(other.snapshot_id).layers == (other.layers[0], new)
    assert store.layer(new).digest == digest
    assert store.layer(new).state == "durable"
    assert check(store, read_data=True).sound
    assert store.collect().layers == [old]
    assert check(store, read_data=True).sound


@pytest.mark.parametrize("whole", [True, False])
def test_a_missing_directory_is_put_in_place(store: Store, copies: Copies, form: str, whole: bool) -> None:
    record = add(store, copies, form)
    layer_id = record.layers[0]
    place = store.layer_path(layer_id)
    shutil.rmtree(place.parent if whole else place)
    if not whole:
        place.write_text("in its way")
    [repaired] = mend(store, copies).repaired
    assert (repaired.layer_id, repaired.how, repaired.by) == (layer_id, "put in place", None)
    assert store.snapshot(record.snapshot_id).layers == (layer_id,)
    report = check(store, read_data=True)
    assert report.sound
    assert report.sealed == report.layers == 1
    assert os.listdir(store.home.layers) == [layer_id]


def test_a_manifest_is_made_anew_of_what_was_sealed(store: Store, copies: Copies, form: str) -> None:
    for damage in (Path.unlink, flip_a_bit, lambda path: os.truncate(path, 0)):
        record = add(store, copies, form)
        layer_id = record.layers[0]
        damage(manifest_path(store, layer_id))
        [repaired] = mend(store, copies).repaired
        assert (repaired.layer_id, repaired.how) == (layer_id, "sealed again")
        assert copies.fetched == []
        assert check(store, read_data=True).sound


def test_with_a_lost_manifest_and_damaged_content_the_copy_counts(store: Store, copies: Copies, form: str) -> None:
    record = add(store, copies, form)
    manifest_path(store, record.layers[0]).unlink()
    bit_in_a_file(store, record.layers[0])
    [repaired] = mend(store, copies).repaired
    assert repaired.how == "replaced"
    assert check(store, read_data=True).sound


def test_what_has_no_copy_is_listed_and_left(store: Store, copies: Copies, form: str) -> None:
    lost, found = add_full(store, form), add(store, copies, form)
    with_text = store.layer_path(lost.layers[0]) / "empty"
    unsealed = add_snapshot(store, form=form)
    shutil.rmtree(store.layer_path(unsealed.layers[0]))
    with_text.write_text("x")
    shutil.rmtree(copies.directory)
    copies.directory.mkdir()
    copies.keep(store, found.layers[0])
    # What differs by its content alone has another digest, so the one is no copy of the other.
    (store.layer_path(found.layers[0]) / "fifo").unlink()
    (copies.directory / str(store.layer(found.layers[0]).digest)).rename(copies.directory / "b3:other")
    report = check(store)
    done = repair(store, report, copies.fetch)
    assert done.repaired == []
    assert {what for what, _ in done.left} == {f"layer {one.layers[0]}" for one in (lost, found, unsealed)}
    assert "was not sealed" in dict(done.left)[f"layer {unsealed.layers[0]}"]
    assert check(store).counts == report.counts
    assert len(os.listdir(store.home.layers)) == 3
    assert {one.state for one in store.layers_known()} == {"durable", "ready"}


def test_a_copy_that_is_something_else_is_refused(store: Store, copies: Copies, form: str) -> None:
    record = add(store, copies, form)
    bit_in_a_file(store, record.layers[0])
    (copies.directory / str(store.layer(record.layers[0]).digest) / "extra").touch()
    done = mend(store, copies)
    assert done.repaired == []
    [(what, why)] = done.left
    assert (what, "is not what it held" in why) == (f"layer {record.layers[0]}", True)
    assert store.snapshot(record.snapshot_id).layers == record.layers
    assert os.listdir(store.home.layers) == [record.layers[0]]


def test_snapshots_that_were_not_durable_are_made_so_and_go_along(store: Store, copies: Copies, form: str) -> None:
    record = add(store, copies, form, durable=False)
    bit_in_a_file(store, record.layers[0])
    [repaired] = mend(store, copies).repaired
    assert store.snapshot(record.snapshot_id).layers == (repaired.by,)
    assert store.snapshot(record.snapshot_id).state == "durable"


def test_a_living_sandbox_keeps_its_layer_and_nobody_else_gets_it(store: Store, copies: Copies, form: str) -> None:
    record = add(store, copies, form)
    old, sandbox = record.layers[0], new_id("sb")
    store.hold([Holder(sandbox, layers=record.layers)])
    bit_in_a_file(store, old)
    done = mend(store, copies)
    [repaired] = done.repaired
    assert done.notes == [f"{sandbox} go on with the damaged layer {old} until they end"]
    assert store.collect().layers == []
    # Who shares equal layers prefers the oldest of them.
    assert share_equal(store).snapshots == 0
    seal(store, old)
    assert share_equal(store).snapshots == 0
    assert store.snapshot(record.snapshot_id).layers == (repaired.by,)
    assert check(store, read_data=True).sound
    store.release([sandbox])
    assert store.collect().layers == [old]


def test_metadata_is_not_repaired(store: Store, copies: Copies) -> None:
    record, damaged = add(store, copies, "user"), add_snapshot(store, form="user")
    change(store, "UPDATE snapshots SET record = '{' WHERE snapshot_id = ?", damaged.snapshot_id)
    change(store, "UPDATE layers SET level = -1 WHERE layer_id = ?", damaged.layers[0])
    bit_in_a_file(store, record.layers[0])
    done = mend(store, copies)
    assert [one.layer_id for one in done.repaired] == [record.layers[0]]
    assert done.left == [
        (f"layer {damaged.layers[0]}", "metadata is not repaired"),
        (f"snapshot {damaged.snapshot_id}", "metadata is not repaired"),
    ]


def test_what_is_sound_by_now_and_what_is_gone(store: Store, copies: Copies, form: str) -> None:
    mended, gone = add(store, copies, form), add(store, copies, form)
    for record in (mended, gone):
        keeping_times(store.layer_path(record.layers[0]), lambda root: (root / "extra").touch())
    report = check(store)
    keeping_times(store.layer_path(mended.layers[0]), lambda root: (root / "extra").unlink())
    store.delete_snapshot(gone.snapshot_id)
    store.collect()
    done = repair(store, report, copies.fetch)
    assert (done.repaired, copies.fetched) == ([], [])
    assert done.notes == [f"layer {mended.layers[0]} is sound by now"]
    assert [what for what, _ in done.left] == [f"layer {gone.layers[0]}"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_stop_at_any_step(tmp_path: Path, copies: Copies) -> None:
    form = FORMS[0]
    passed_all: set[str] = set()
    step = 0
    while True:
        step += 1
        home = home_at(tmp_path / f"home-{step}")

        def damaged(home=home, form=form) -> None:  # type: ignore[no-untyped-def]
            store = Store.open(home)
            for number in range(3):
                record = add_full(store, form)
                store.make_durable(record.snapshot_id)
                if not (copies.directory / str(store.layer(record.layers[0]).digest)).exists():
                    copies.keep(store, record.layers[0])
                if number == 0:
                    bit_in_a_file(store, record.layers[0])
                elif number == 1:
                    shutil.rmtree(store.layer_path(record.layers[0]))
                else:
                    manifest_path(store, record.layers[0]).unlink()
            store.close()

        def mending(step=step, home=home) -> None:  # type: ignore[no-untyped-def]
            store = Store.open(home)
            report = check(store, read_data=True)
            assert len(report.damaged_layers) == 3
            passed: list[str] = []

            def hook(name: str) -> None:
                if name.startswith(
                    ("repair:", "merge:", "rewrite:", "seal:", "make_layers_durable:", "abandon_layer:")
                ):
                    passed.append(name)
                    if len(passed) == step:
                        os._exit(STOPPED)

            faultpoints.install(hook)
            assert len(repair(store, report, copies.fetch).repaired) == 3
            (tmp_path / "steps").write_text("\n".join(passed))
            os._exit(0)

        assert in_child(damaged) == 0
        code = in_child(mending)
        assert code in (0, STOPPED)
        store = Store.open(home)
        store.sweep()
        again = check(store, read_data=True)
        if not again.sound:
            assert repair(store, again, copies.fetch).left == [], f"step {step}"
        assert check(store, read_data=True).sound, f"step {step}"
        assert len(store.snapshots()) == 3
        store.sweep()
        assert store.collect().failures == []
        assert len(os.listdir(store.home.layers)) == 3, f"step {step}"
        assert check(store, read_data=True).sound, f"step {step}"
        store.close()
        if code == 0:
            passed_all.update((tmp_path / "steps").read_text().split("\n"))
            break
    expected = {"fetched", "published", "rewritten", "forgotten", "manifest_placed", "placed", "manifest_gone"}
    assert {f"repair:{name}" for name in expected} <= passed_all


def test_two_repairs_at_once_and_one_that_is_killed(store: Store, copies: Copies) -> None:
    form = FORMS[0]
    record = add(store, copies, form)
    bit_in_a_file(store, record.layers[0])
    report = check(store, read_data=True)
    told, tell = os.pipe()

    def stay() -> None:
        def hook(name: str) -> None:
            if name == "repair:fetched":
                os.write(tell, b"x")
                signal.pause()

        faultpoints.install(hook)
        repair(Store.open(store.home), report, copies.fetch)

    def follow() -> None:
        done = repair(Store.open(store.home), report, copies.fetch)
        assert len(done.repaired) == 1

    first = start_child(stay)
    assert os.read(told, 1) == b"x"
    second = start_child(follow)
    os.kill(first, signal.SIGKILL)
    assert exit_code_of(first) == -signal.SIGKILL
    assert exit_code_of(second) == 0
    os.close(told)
    os.close(tell)
    assert check(store, read_data=True).sound
