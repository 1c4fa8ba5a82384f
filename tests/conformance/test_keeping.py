"""What is kept: levels, names, prune, looking in, comparing, moving to another home, upkeep, checks."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from tests.conformance.conftest import Pace, Sandboxes, share_images
from tests.conformance.inside import shell

from worldfork import (
    ConfigError,
    NotFound,
    Sandbox,
    SnapshotInfo,
    SnapshotLevel,
    SnapshotStatus,
    SnapshotStore,
)
from worldfork.core.errors import PathError
from worldfork.keeping.upkeep import keep_up
from worldfork.lineage.place import close_place, place


@pytest.fixture
def kept() -> SnapshotStore:
    return SnapshotStore()


def another_home(patch: pytest.MonkeyPatch, directory: Path) -> None:
    share_images(Path(os.environ["WORLDFORK_HOME"]), directory)
    patch.setenv("WORLDFORK_HOME", str(directory))
    patch.setenv("WORLDFORK_SCRATCH", str(directory))


@pytest.mark.behaviour("keeping-1")
def test_a_throw_away(sandboxes: Sandboxes, box: Sandbox) -> None:
    box.write_file("/srv/f", b"1")
    snapshot = box.checkpoint(level="volatile")
    assert (snapshot.level, snapshot.status) == (SnapshotLevel.VOLATILE, SnapshotStatus.LOCAL_READY)
    assert sandboxes.restore(snapshot).read_file("/srv/f") == b"1"
    assert snapshot.snapshot_id not in place().store.pending_durability()
    with pytest.raises(ConfigError, match="throw-away"):
        box.checkpoint(level="volatile", wait_until="completed")
    # What stands on it and is to last takes its layers along.
    box.write_file("/srv/g", b"2")
    lasting = box.checkpoint(wait_until="completed")
    assert lasting.status == SnapshotStatus.COMPLETED
    assert Sandbox.get_snapshot(snapshot.snapshot_id).status == SnapshotStatus.LOCAL_READY


@pytest.mark.behaviour("keeping-2")
def test_to_the_remote(sandboxes: Sandboxes, box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(Sandbox.list_all_snapshots())
    with pytest.raises(ConfigError, match="WORLDFORK_REMOTE"):
        box.checkpoint(level="exported")
    assert len(Sandbox.list_all_snapshots()) == before
    with monkeypatch.context() as patch:
        another_home(patch, tmp_path / "home")
        patch.setenv("WORLDFORK_REMOTE", str(tmp_path / "remote"))
        here = place()
        try:
            with Sandbox.create(network="none") as other:
                other.write_file("/srv/f", b"far")
                snapshot = other.checkpoint(level="exported", wait_until="completed")
            found = SnapshotStore().find(snapshot.snapshot_id)
            assert (found.status, found.exported) == (SnapshotStatus.COMPLETED, str(tmp_path / "remote"))
        finally:
            close_place(here)
    SnapshotStore().pull([snapshot.snapshot_id], str(tmp_path / "remote"))
    assert sandboxes.restore(snapshot).read_file("/srv/f") == b"far"


@pytest.mark.behaviour("keeping-3")
@pytest.mark.behaviour("keeping-4")
def test_names_and_prune(box: Sandbox, kept: SnapshotStore) -> None:
    taken: list[SnapshotInfo] = []
    for number in range(5):
        box.write_file("/srv/f", b"%d" % number)
        taken.append(box.checkpoint(label=f"prune {number}"))
    ids = [one.snapshot_id for one in taken]
    kept.tag(ids[0], "first of five")
    kept.tag(ids[1], "second of five")
    kept.untag("second of five")
    assert kept.tags()["first of five"] == ids[0]
    assert kept.find("first of five").snapshot_id == ids[0]
    with pytest.raises(NotFound):
        kept.find("second of five")
    others = [info.snapshot_id for info in kept.list() if info.snapshot_id not in ids]
    rules = {"keep_last": 1, "keep_labels": ("prune 2", "[!p]*"), "keep_names": None}
    plan = kept.prune(**rules, dry_run=True)  # type: ignore[arg-type]  # each has its own type
    assert set(ids) & set(plan.deleted) == {ids[1], ids[3]}
    assert {info.snapshot_id for info in kept.list()} >= set(ids)
    done = kept.prune(**rules)  # type: ignore[arg-type]  # each has its own type
    assert sorted(done.deleted) == sorted(plan.deleted)
    left = {info.snapshot_id for info in kept.list()}
    assert left & set(ids) == {ids[0], ids[2], ids[4]}
    assert set(others) - left <= set(plan.deleted)
    assert kept.read_file(ids[0], "/srv/f") == b"0"
    assert kept.read_file(ids[2], "/srv/f") == b"2"


@pytest.mark.behaviour("keeping-5")
def test_looking_in(box: Sandbox, kept: SnapshotStore) -> None:
    box.write_file("/srv/dir/f", b"content")
    shell(box, "ln -s /srv/dir /srv/link; ln -s ../../../../../etc/passwd /srv/out; chmod 640 /srv/dir/f")
    snapshot = box.checkpoint()
    box.write_file("/srv/dir/f", b"later")
    assert kept.read_file(snapshot.snapshot_id, "/srv/link/f") == b"content"
    listed = kept.list_directory(snapshot.snapshot_id, "/srv/link")
    assert [(entry.name, entry.size, entry.mode) for entry in listed] == [("f", 7, 0o640)]
    names = {entry.name: entry.link_target for entry in kept.list_directory(snapshot.snapshot_id, "/srv")}
    assert names == {"dir": None, "link": "/srv/dir", "out": "../../../../../etc/passwd"}
    assert kept.read_file(snapshot.snapshot_id, "/srv/out") == box.read_file("/etc/passwd")
    with pytest.raises(PathError):
        kept.read_file(snapshot.snapshot_id, "/srv/nothing")
    with pytest.raises(NotFound):
        kept.read_file("no such name", "/srv/f")


@pytest.mark.behaviour("keeping-6")
def test_comparing(box: Sandbox, kept: SnapshotStore) -> None:
    box.write_file("/srv/text", b"one\ntwo\n")
    box.write_file("/srv/gone", b"x")
    old = box.checkpoint()
    box.write_file("/srv/text", b"one\nthree\n")
    shell(box, "rm /srv/gone; echo new > /srv/new; chmod 700 /srv")
    new = box.checkpoint()
    found = {change.path: change for change in kept.diff(old.snapshot_id, new.snapshot_id, "/srv", patches=True)}
    assert {path: change.change for path, change in found.items()} == {
        "/srv": "changed",
        "/srv/gone": "removed",
        "/srv/new": "added",
        "/srv/text": "changed",
    }
    assert found["/srv"].what == ("mode",)
    patch = found["/srv/text"].patch
    assert patch is not None
    assert b"-two\n+three\n" in patch
    assert (found["/srv/text"].old_bytes, found["/srv/text"].new_bytes) == (8, 10)
    assert kept.diff(new.snapshot_id, new.snapshot_id) == []


@pytest.mark.behaviour("keeping-7")
def test_the_digest_of_a_state(box: Sandbox, kept: SnapshotStore) -> None:
    shell(box, "mkdir -p /srv/a/b; echo x > /srv/a/b/f; ln -s f /srv/a/b/l; touch -d @1 /srv/a/b/f /srv/a/b /srv/a")
    start = box.checkpoint()
    with start.fork().unwrap()[0] as moved, start.fork().unwrap()[0] as copied, start.fork().unwrap()[0] as idle:
        shell(moved, "mv /srv/a /srv/c || { cp -a /srv/a /srv/c && rm -r /srv/a; }")
        shell(copied, "cp -a /srv/a /srv/c; rm -r /srv/a")
        shell(idle, "mv /srv/a/b/f /srv/a/b/g; mv /srv/a/b/g /srv/a/b/f; touch /srv/z; rm /srv/z")
        ends = [one.checkpoint() for one in (moved, copied, idle)]
    digests = [kept.digest(one.snapshot_id) for one in (start, *ends)]
    assert digests[1] == digests[2] != digests[0]
    assert digests[3] == digests[0]
    assert kept.find(start.snapshot_id).digest == digests[0]


@pytest.mark.behaviour("keeping-8")
def test_to_another_home_and_back(
    sandboxes: Sandboxes, box: Sandbox, kept: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell(box, "mkdir -p /srv/d; echo kept > /srv/d/f; ln /srv/d/f /srv/d/g; rm -rf /var/tmp; mkdir /var/tmp")
    snapshot = box.checkpoint(label="travels")
    digest = kept.digest(snapshot.snapshot_id)
    archive, again = io.BytesIO(), io.BytesIO()
    kept.export(snapshot.snapshot_id, archive)
    kept.export(snapshot.snapshot_id, again)
    assert archive.getvalue() == again.getvalue()
    archive.seek(0)
    with monkeypatch.context() as patch:
        another_home(patch, tmp_path / "home")
        there = place()
        try:
            arrived = SnapshotStore().import_(archive)
            assert (arrived.snapshot_id, arrived.label) == (snapshot.snapshot_id, "travels")
            assert SnapshotStore().digest(arrived.snapshot_id) == digest
            with Sandbox.create(snapshot_id=arrived.snapshot_id) as child:
                assert shell(child, "cat /srv/d/f; stat -c %h /srv/d/f; ls -A /var/tmp") == "kept\n2"
                child.write_file("/srv/d/f", b"changed there")
                grown = child.checkpoint()
            SnapshotStore().push([grown.snapshot_id], str(tmp_path / "remote"))
        finally:
            close_place(there)
    kept.pull([grown.snapshot_id], str(tmp_path / "remote"))
    assert sandboxes.restore(grown).read_file("/srv/d/f") == b"changed there"
    assert sandboxes.restore(snapshot).read_file("/srv/d/f") == b"kept\n"


@pytest.mark.timeout(180)
@pytest.mark.behaviour("keeping-9")
def test_upkeep_beside_live_sandboxes(sandboxes: Sandboxes, box: Sandbox, kept: SnapshotStore) -> None:
    here = place()
    taken = []
    for number in range(70):
        box.write_file("/srv/n", b"%d" % number)
        box.write_file(f"/srv/only-{number}", b"%d" % number)
        taken.append(box.checkpoint())
    early = sandboxes.restore(taken[40])
    for future in [here.durability(one.snapshot_id) for one in taken]:
        if future is not None:
            future.result(60)
    report = keep_up(here.store, here.settings)
    assert report.failures == []
    assert len(report.merged) >= 2
    assert kept.find(taken[69].snapshot_id).layers < 20
    assert early.read_file("/srv/n") == b"40"
    assert box.read_file("/srv/only-3") == b"3"
    for number in (0, 31, 40, 69):
        child = sandboxes.restore(taken[number])
        assert shell(child, "cat /srv/n; ls /srv | wc -l") == f"{number}{number + 2}"
    # Whoever stood on the old layers goes on, and comes to stand on fewer at the next checkpoint.
    box.write_file("/srv/n", b"70")
    later = box.checkpoint()
    assert later.layers < 20
    assert shell(sandboxes.restore(later), "cat /srv/n; ls /srv | wc -l") == "7071"
    assert shell(early, "ls /srv | wc -l") == "42"


@pytest.mark.behaviour("keeping-10")
def test_a_check(box: Sandbox, kept: SnapshotStore) -> None:
    box.write_file("/srv/f", b"sound")
    snapshot = box.checkpoint(wait_until="completed")
    here = place()
    keep_up(here.store, here.settings)
    assert kept.check(read_data=True).sound
    layer_id = here.store.snapshot(snapshot.snapshot_id).layers[0]
    file = here.store.layer_path(layer_id) / "srv/f"
    before = os.lstat(file)
    file.write_bytes(b"sOund")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:
        assert kept.check().sound, "nothing but the content tells"
        report = kept.check(read_data=True)
        assert not report.sound
        found = "\n".join(str(finding) for finding in report.findings)
        assert layer_id in found
        assert "srv/f" in found
    finally:
        file.write_bytes(b"sound")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert kept.check(read_data=True).sound


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.behaviour("keeping-11")
def test_more_checkpoints_than_the_kernel_takes_layers(sandboxes: Sandboxes, box: Sandbox, pace: Pace) -> None:
    first, count = None, pace.times(600)
    for number in range(count):
        box.write_file("/srv/n", b"%d" % number)
        if number % 100 == 0:
            box.write_file(f"/srv/only-{number}", b"x")
        last = box.checkpoint(level="volatile")
        first = first or last
    assert first is not None
    assert last.layers < 500
    child = sandboxes.restore(last)
    assert shell(child, "cat /srv/n; ls /srv | wc -l") == f"{count - 1}{(count - 1) // 100 + 2}"
    assert shell(sandboxes.restore(first), "cat /srv/n; ls /srv | wc -l") == "02"
    child.write_file("/srv/n", b"600")
    assert sandboxes.restore(child.checkpoint()).read_file("/srv/n") == b"600"
