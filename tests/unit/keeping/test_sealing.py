"""Layers get their digests, equal ones are shared, and nobody waits for it."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from tests.stores import add_snapshot, exit_code_of, in_child, record_of, start_child
from tests.unit.content.test_share import image_of

from worldfork.content import share
from worldfork.content.layer import walk
from worldfork.content.manifest import digest_of, read_manifest
from worldfork.core.clock import ManualClock
from worldfork.core.errors import Corrupt, NotFound, OutOfSpace, StoreError, WorldforkError
from worldfork.keeping import sealing
from worldfork.keeping.sealing import manifest_path, seal, seal_all
from worldfork.keeping.sharing import LARGE_BYTES, share_equal, share_files
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store import faultpoints
from worldfork.store.store import Store


def publish(store: Store, content: bytes | None = b"same", below: tuple[str, ...] = ()) -> SnapshotRecord:
    """A snapshot whose layer holds a file; two of the same content are equal."""
    assert isinstance(store._clock, ManualClock)
    store._clock.advance_s(1)
    draft = store.begin_layer(form="trusted")
    draft.path.mkdir(mode=0o755)
    if content is not None:
        (draft.path / "file").write_bytes(content)
        os.utime(draft.path / "file", ns=(1, 1))
    os.utime(draft.path, ns=(1, 1))
    record = record_of((draft.layer_id, *below))
    store.publish(record, [draft.layer_id])
    return record


def durable(store: Store, content: bytes | None = b"same", below: tuple[str, ...] = ()) -> SnapshotRecord:
    record = publish(store, content, below)
    store.make_durable(record.snapshot_id)
    return store.snapshot(record.snapshot_id)


@pytest.fixture
def at() -> Iterator[dict[str, threading.Event]]:
    """Put a hook in `faultpoints`; taken out again."""
    yield {}
    faultpoints.install(None)


def test_a_sealed_layer_is_known_by_what_it_holds(store: Store) -> None:
    layer_id = publish(store).layers[0]
    assert store.layer(layer_id).digest is None
    sealed = seal(store, layer_id)
    record = store.layer(layer_id)
    assert (record.digest, record.entries, record.logical_bytes, record.stored_bytes) == tuple(sealed)
    assert sealed == digest_of(walk(store.layer_path(layer_id), "trusted"))
    assert (sealed.entries, sealed.logical_bytes) == (2, 4)
    assert [entry.path for entry in read_manifest(manifest_path(store, layer_id), sealed.digest)] == ["", "file"]
    assert sorted(os.listdir(store.home.layers / layer_id)) == ["fs", "manifest"]
    assert store.holders() == []


def test_a_second_time_does_nothing_and_a_lost_manifest_is_made_again(store: Store) -> None:
    layer_id = publish(store).layers[0]
    sealed = seal(store, layer_id)
    place = manifest_path(store, layer_id)
    before = place.stat().st_ino
    assert seal(store, layer_id) == sealed
    assert place.stat().st_ino == before
    place.unlink()
    assert seal(store, layer_id) == sealed
    assert place.exists()


def test_a_lost_manifest_of_a_layer_that_changed_is_not_made_again(store: Store) -> None:
    layer_id = publish(store).layers[0]
    sealed = seal(store, layer_id)
    manifest_path(store, layer_id).unlink()
    (store.layer_path(layer_id) / "file").write_text("else")
    with pytest.raises(Corrupt) as caught:
        seal(store, layer_id)
    assert caught.value.expected == sealed.digest != caught.value.actual
    assert store.layer(layer_id).digest == sealed.digest
    assert os.listdir(store.home.layers / layer_id) == ["fs"]


def test_a_layer_that_is_none(store: Store) -> None:
    with pytest.raises(NotFound):
        seal(store, "ly_" + "0" * 16)


def test_what_cannot_be_read_is_named_and_keeps_nothing_else(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = publish(store).layers[0], publish(store, b"bad").layers[0]
    other = publish(store, b"other").layers[0]
    original = sealing.walk

    def fails(root: Path, form: str) -> object:
        for found in original(root, form):
            if bad in str(root) and found.entry.path:
                raise StoreError("'file' cannot be read: Input/output error", path="file", errno=errno.EIO)
            yield found

    monkeypatch.setattr(sealing, "walk", fails)
    report = seal_all(store)
    assert report.sealed == [good, other]
    assert [layer_id for layer_id, _ in report.failures] == [bad]
    assert "'file' cannot be read" in report.failures[0][1]
    with pytest.raises(StoreError) as caught:
        seal(store, bad)
    assert (caught.value.fields["path"], caught.value.fields["layer_id"]) == ("file", bad)
    assert caught.value.fields["errno"] == errno.EIO
    assert os.listdir(store.home.layers / bad) == ["fs"]
    monkeypatch.undo()
    assert seal_all(store).sealed == [bad]
    assert seal_all(store).sealed == []


def test_a_full_disk_is_told_and_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_id = publish(store).layers[0]

    def full(found: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(sealing, "write_manifest", full)
    with pytest.raises(OutOfSpace):
        seal(store, layer_id)
    assert os.listdir(store.home.layers / layer_id) == ["fs"]
    assert store.layer(layer_id).digest is None
    assert store.holders() == []


def test_it_stops_when_told(store: Store) -> None:
    layers = [publish(store, bytes([number])).layers[0] for number in range(3)]
    answers = iter([False, False, True])
    report = seal_all(store, stop=lambda: next(answers))
    assert report.sealed == layers[:2]


def test_a_layer_that_is_collected_meanwhile_is_no_failure(store: Store) -> None:
    first, second = publish(store), publish(store)
    known = store.layers_known()
    store.delete_snapshot(second.snapshot_id)
    store.collect()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "layers_known", lambda _: known)
        report = seal_all(store)
    assert (report.sealed, report.failures) == ([first.layers[0]], [])


STEPS = ("reading:begun", "seal:synced", "seal:renamed", "seal:lasting", "seal:written")


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_any_step_the_next_one_seals(store: Store, step: str) -> None:
    layer_id = publish(store).layers[0]
    store.make_durable(store.snapshots()[0].snapshot_id)

    def work() -> None:
        def stop(name: str) -> None:
            if name == step:
                os._exit(42)

        faultpoints.install(stop)
        other = Store.open(store.home)
        seal(other, layer_id)

    assert in_child(work) == 42
    store.sweep()
    assert store.holders() == []
    if (digest := store.layer(layer_id).digest) is not None:
        assert list(read_manifest(manifest_path(store, layer_id), digest))
    sealed = seal(store, layer_id)
    assert store.layer(layer_id).digest == sealed.digest
    assert sorted(os.listdir(store.home.layers / layer_id)) == ["fs", "manifest"]
    assert list(read_manifest(manifest_path(store, layer_id), sealed.digest))


@pytest.mark.parametrize("step", STEPS[:4])
def test_a_fork_and_a_collection_go_on_while_a_layer_is_being_sealed(store: Store, step: str) -> None:
    record = publish(store)
    reached, sealer_goes_on = os.pipe(), os.pipe()

    def work() -> None:
        def wait(name: str) -> None:
            if name == step:
                os.write(reached[1], b"x")
                os.read(sealer_goes_on[0], 1)

        other = Store.open(store.home)
        faultpoints.install(wait)
        seal(other, record.layers[0])
        other.close()

    child = start_child(work)
    os.read(reached[0], 1)
    # What a fork writes: a layer for it, and a snapshot on top of the one that is being sealed.
    second = add_snapshot(store, below=record.layers)
    store.delete_snapshot(second.snapshot_id)
    store.delete_snapshot(record.snapshot_id)
    assert store.collect().layers == [second.layers[0]], "what is being sealed is held"
    os.write(sealer_goes_on[1], b"x")
    assert exit_code_of(child) == 0
    assert store.layer(record.layers[0]).digest is not None
    assert store.collect().layers == [record.layers[0]]
    for fd in (*reached, *sealer_goes_on):
        os.close(fd)


def test_two_who_seal_the_same_layer_agree(store: Store) -> None:
    layers = [publish(store, bytes([number])).layers[0] for number in range(10)]

    def work() -> None:
        other = Store.open(store.home)
        assert seal_all(other).failures == []
        other.close()

    children = [start_child(work) for _ in range(3)]
    assert [exit_code_of(child) for child in children] == [0, 0, 0]
    for layer_id in layers:
        digest = store.layer(layer_id).digest
        assert digest is not None
        assert list(read_manifest(manifest_path(store, layer_id), digest))
        assert sorted(os.listdir(store.home.layers / layer_id)) == ["fs", "manifest"]


def test_a_lease_that_ran_out_seals_nothing(store: Store) -> None:
    layer_id = publish(store).layers[0]

    def lose(name: str) -> None:
        if name == "seal:synced":
            with store.database.write() as db:
                db.execute("DELETE FROM holders")

    faultpoints.install(lose)
    try:
        with pytest.raises(StoreError):
            seal(store, layer_id)
    finally:
        faultpoints.install(None)
    assert store.layer(layer_id).digest is None
    assert os.listdir(store.home.layers / layer_id) == ["fs"]


def test_equal_layers_become_one(store: Store) -> None:
    first, second, third = (durable(store) for _ in range(3))
    above = durable(store, b"above", second.layers)
    other = durable(store, b"other")
    ready = publish(store)
    seal_all(store)
    report = share_equal(store)
    assert (report.snapshots, report.failures) == (3, [])
    kept = first.layers[0]
    assert store.snapshot(second.snapshot_id).layers == store.snapshot(third.snapshot_id).layers == (kept,)
    assert store.snapshot(above.snapshot_id).layers == (above.layers[0], kept)
    assert store.snapshot(other.snapshot_id) == other
    assert store.snapshot(ready.snapshot_id).layers == ready.layers, "only what is on disk"
    assert set(store.collect().layers) == {second.layers[0], third.layers[0]}
    assert share_equal(store).snapshots == 0


def test_layers_of_another_form_or_without_a_seal_are_not_equal(store: Store) -> None:
    first = durable(store)
    draft = store.begin_layer(form="user")
    draft.path.mkdir(mode=0o755)
    (draft.path / "file").write_bytes(b"same")
    os.utime(draft.path / "file", ns=(1, 1))
    os.utime(draft.path, ns=(1, 1))
    user = record_of((draft.layer_id,), form="user")
    store.publish(user, [draft.layer_id])
    store.make_durable(user.snapshot_id)
    assert share_equal(store).snapshots == 0
    seal_all(store)
    if os.geteuid() == 0:
        assert store.layer(draft.layer_id).digest == store.layer(first.layers[0]).digest
    assert share_equal(store).snapshots == 0


def test_a_layer_is_never_twice_in_one_stack(store: Store) -> None:
    first = durable(store)
    middle = durable(store, b"middle", first.layers)
    again = durable(store, b"same", middle.layers)
    seal_all(store)
    assert store.layer(again.layers[0]).digest == store.layer(first.layers[0]).digest
    assert share_equal(store).snapshots == 0
    assert store.snapshot(again.snapshot_id).layers == again.layers


def test_who_stands_on_a_copy_keeps_it(store: Store) -> None:
    first, second = durable(store), durable(store)
    seal_all(store)
    with store.reading(snapshot_id=second.snapshot_id, purpose="test"):
        assert share_equal(store).snapshots == 1
        assert store.collect().layers == []
        assert (store.layer_path(second.layers[0]) / "file").read_bytes() == b"same"
    assert store.collect().layers == [second.layers[0]]
    assert store.snapshot(second.snapshot_id).layers == first.layers


def test_a_rewrite_that_fails_is_told_and_the_rest_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = durable(store, b"1"), durable(store, b"2")
    copies = [durable(store, b"1"), durable(store, b"2")]
    seal_all(store)
    original = Store.rewrite

    def fails(self: Store, run: tuple[str, ...], by: tuple[str, ...]) -> int:
        if run == copies[0].layers:
            raise WorldforkError("the disk failed")
        return original(self, run, by)

    monkeypatch.setattr(Store, "rewrite", fails)
    report = share_equal(store)
    assert report.failures == [(copies[0].layers[0], "the disk failed")]
    assert report.snapshots == 1
    assert store.snapshot(copies[1].snapshot_id).layers == other.layers
    assert store.snapshot(copies[0].snapshot_id).layers != one.layers


def test_where_files_cannot_share_bytes_it_is_said_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    big = os.urandom(LARGE_BYTES)
    durable(store, big + b"1")
    durable(store, b"small")
    seal_all(store)
    with caplog.at_level(logging.INFO, "worldfork.store"):
        durable(store, big + b"1", durable(store, b"differs").layers)
        seal_all(store)
        first, second = share_files(store), share_files(store)
    if first.shared_bytes:
        pytest.skip("this file system shares bytes")
    assert first.unsupported == second.unsupported != ""
    assert len([record for record in caplog.records if "share their bytes" in record.message]) == 1


ON_A_DISK = """
import os, subprocess, sys
from pathlib import Path
image, point = Path(sys.argv[1]), Path(sys.argv[2])
mounted = subprocess.run(["mount", "-o", "loop", str(image), str(point)], capture_output=True, text=True)
if mounted.returncode:
    print(mounted.stderr)
    sys.exit(77)
from tests.stores import home_at
from tests.unit.keeping.test_sealing import durable
from worldfork.core.clock import ManualClock
from worldfork.keeping.sealing import seal_all
from worldfork.keeping.sharing import LARGE_BYTES, share_files
from worldfork.store.store import Store
store = Store.open(home_at(point / "home"), clock=ManualClock())
big = os.urandom(20 * LARGE_BYTES + 17)
old = durable(store, big)
changed = durable(store, big[:-1] + b"!")
fresh = durable(store, big, durable(store, b"small").layers)
(store.layer_path(fresh.layers[0]) / "twin").hardlink_to(store.layer_path(fresh.layers[0]) / "file")
os.symlink("/etc/passwd", store.layer_path(fresh.layers[0]) / "link")
sealed = seal_all(store)
assert sealed.failures == [] and len(sealed.sealed) == 4
os.sync()
free = os.statvfs(point).f_bavail
assert share_files(store, [changed.layers[0]]).shared_bytes == 0
report = share_files(store, sealed.sealed)
os.sync()
assert (report.shared_bytes, report.unsupported, report.failures) == (len(big), "", []), report
assert (os.statvfs(point).f_bavail - free) * os.statvfs(point).f_frsize > 18 * LARGE_BYTES
assert (store.layer_path(fresh.layers[0]) / "file").read_bytes() == big
assert store.holders() == []
store.close()
subprocess.run(["umount", str(point)], check=True)
"""


@pytest.mark.root
def test_large_files_share_their_bytes_where_that_can_be(tmp_path: Path) -> None:
    image = image_of("xfs", tmp_path, 400 << 20)
    point = tmp_path / "point"
    point.mkdir()
    checkout = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", ON_A_DISK, str(image), str(point)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{Path(share.__file__).parents[2]}:{checkout}"},
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"XFS cannot be mounted from a file here: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr


@pytest.mark.user
def test_a_layer_that_its_sandbox_has_closed_is_sealed_and_stays_closed(store: Store) -> None:
    draft = store.begin_layer(form="user")
    (draft.path / "shut").mkdir(parents=True)
    (draft.path / "shut" / "file").write_bytes(b"closed")
    for path in (draft.path / "shut" / "file", draft.path / "shut", draft.path):
        path.chmod(0)
    store.publish(record_of((draft.layer_id,), form="user"), [draft.layer_id])
    try:
        report = seal_all(store)
        assert (report.sealed, report.failures) == ([draft.layer_id], [])
        assert draft.path.stat().st_mode & 0o7777 == 0
        entries = list(read_manifest(manifest_path(store, draft.layer_id)))
        assert [(entry.path, entry.mode, entry.uid) for entry in entries] == [
            ("", 0, 0),
            ("shut", 0, 0),
            ("shut/file", 0, 0),
        ]
        assert entries[2].content == blake3(b"closed").hexdigest()
    finally:
        for path in (draft.path, draft.path / "shut"):
            path.chmod(0o700)
