"""A check tells every kind of damage, names it, goes on behind it, and leaves everything as it is."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.full_layers import FORMS, OLD_NS, add_full, change, flip_a_bit, keeping_times
from tests.stores import add_snapshot, exit_code_of, start_child

from worldfork.content import hashing
from worldfork.content.layer import NOBODY
from worldfork.content.manifest import read_manifest
from worldfork.core.clock import ManualClock
from worldfork.core.ids import new_id
from worldfork.keeping import layer_check
from worldfork.keeping.check import check
from worldfork.keeping.findings import MOST_PER_SUBJECT, CheckReport
from worldfork.keeping.sealing import manifest_path, seal
from worldfork.store import faultpoints
from worldfork.store.leases import Holder
from worldfork.store.store import Store


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def no_hook() -> Iterator[None]:
    yield
    faultpoints.install(None)


def lines(report: CheckReport) -> list[str]:
    return [str(finding) for finding in report.findings]


def exchange(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def copy_of_its_own(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def test_a_sound_store_has_no_findings(store: Store, form: str) -> None:
    first = add_full(store, form)
    second = add_full(store, form, sealed=False, below=first.layers)
    store.make_durable(second.snapshot_id)
    store.set_name("main", second.snapshot_id)
    store.hold([Holder(new_id("sb"), snapshot_id=second.snapshot_id, layers=second.layers)])
    draft = store.begin_layer(form=form)
    for read_data in (False, True):
        report = check(store, read_data)
        assert lines(report) == []
        assert report.sound
        assert report.notes == []
        assert (report.snapshots, report.names, report.holders) == (2, 1, 1)
        assert (report.layers, report.sealed, report.unsealed, report.moving) == (2, 1, 1, 1)
        assert report.entries == store.layer(first.layers[0]).entries
        # What has two names is read once.
        assert report.read_bytes == (9 + 256 * 500 + 4 + (1 << 20) if read_data else 0)
    store.abandon_layer(draft.layer_id)


DAMAGE: list[tuple[str, str, str, str, Callable[[Path], object]]] = [
    # name, path, expected, found, how
    ("shortened", "/full/deep/more", "128000 bytes", "100 bytes", lambda r: os.truncate(r / "full/deep/more", 100)),
    ("emptied", "/full/deep/more", "128000 bytes", "0 bytes", lambda r: os.truncate(r / "full/deep/more", 0)),
    ("longer", "/empty", "0 bytes", "7 bytes", lambda r: os.truncate(r / "empty", 7)),
    ("missing", "/empty", "a file", "nothing", lambda r: (r / "empty").unlink()),
    ("a directory missing", "/bare", "a directory", "nothing", lambda r: (r / "bare").rmdir()),
    ("whiteout missing", "/gone", "a whiteout", "nothing", lambda r: (r / "gone").unlink()),
    ("extra", "/bare/extra", "nothing", "a file", lambda r: (r / "bare/extra").touch()),
    ("mode", "/empty", "mode 0644", "mode 4755", lambda r: (r / "empty").chmod(0o4755)),
    ("mode of the root", "/", "mode 0755", "mode 0700", lambda r: r.chmod(0o700)),
    ("time", "/link", "time 1600000000.123456789", "time 1.000000001", None),  # type: ignore[list-item]
    ("target", "/link", "a link to full/text", "a link to x",
     lambda r: exchange(r / "link", lambda path: path.symlink_to("x"))),
    ("kind", "/fifo", "a FIFO", "a directory", lambda r: exchange(r / "fifo", Path.mkdir)),
    ("a hard link apart", "/second-name", "the same file as /full/text", "a file of its own",
     lambda r: copy_of_its_own(r / "second-name")),
    ("xattr changed", "/full", "user.note=kept", "user.note=lost",
     lambda r: os.setxattr(r / "full", "user.note", b"lost")),
    ("xattr gone", "/full", "user.note=kept", "no user.note", lambda r: os.removexattr(r / "full", "user.note")),
    ("xattr added", "/empty", "no user.new", "user.new=\\x00", lambda r: os.setxattr(r / "empty", "user.new", b"\0")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "expected", "found", "how"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE]
)
def test_damage_that_attributes_tell(
    store: Store, form: str, path: str, expected: str, found: str, how: Callable[[Path], object] | None
) -> None:
    sound = add_full(store, form)
    layer_id = add_full(store, form).layers[0]
    root = store.layer_path(layer_id)
    if how is None:
        os.utime(root / "link", ns=(1_000_000_001, 1_000_000_001), follow_symlinks=False)
    else:
        keeping_times(root, how)
    if path.startswith("/second") or (path in ("/link", "/fifo") and how is not None):
        os.utime(root / path[1:], ns=(OLD_NS, OLD_NS), follow_symlinks=False)
    for read_data in (False, True):
        report = check(store, read_data)
        assert report.damaged_layers == [layer_id]
        assert not report.sound
        [finding] = report.findings
        assert (finding.subject, finding.path) == (layer_id, path)
        if path == "/fifo":
            assert (finding.expected, finding.found) == (expected, found)
        else:
            assert expected in finding.expected.split(", ")
            assert found in finding.found.split(", ")
        assert str(finding) == f"layer {layer_id}: {path}: expected {finding.expected}, found {finding.found}"
        assert report.sealed == 2
    assert sound.layers[0] not in report.damaged_layers


@pytest.mark.root
def test_damage_that_only_root_can_do(store: Store, form: str) -> None:
    layer_id = add_full(store, form).layers[0]
    root = store.layer_path(layer_id)
    os.chown(root / "empty", 0, 77)
    (root / "device").unlink()
    os.mknod(root / "device", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    os.utime(root / "device", ns=(OLD_NS, OLD_NS))
    os.utime(root, ns=(OLD_NS, OLD_NS))
    os.removexattr(root / "hiding", f"{form}.overlay.opaque")
    assert lines(check(store)) == [
        f"layer {layer_id}: /device: expected device 1:3, found device 1:5",
        f"layer {layer_id}: /empty: expected user 1234, group 1234, found user 0, group 77",
        f"layer {layer_id}: /hiding: expected opaque, found not opaque",
    ]


@pytest.mark.root
def test_an_owner_that_looks_like_nobody_from_outside_its_range_is_no_fault(store: Store) -> None:
    layer_id = add_full(store, "user", sealed=False).layers[0]
    path = store.layer_path(layer_id) / "empty"
    os.chown(path, NOBODY, NOBODY)
    seal(store, layer_id)
    os.chown(path, 1234, 99)
    assert lines(check(store)) == []
    os.chown(path, 0, 99)
    assert lines(check(store)) == [f"layer {layer_id}: /empty: expected user {NOBODY}, found user 0"]


@pytest.mark.root
def test_a_redirect_is_content(store: Store) -> None:
    layer_id = add_full(store, "trusted").layers[0]
    os.setxattr(store.layer_path(layer_id) / "bare", "trusted.overlay.redirect", b"/other")
    assert lines(check(store)) == [f"layer {layer_id}: /bare: expected redirect /elsewhere, found redirect /other"]


def test_the_overlay_own_ties_are_no_content(store: Store, form: str) -> None:
    layer_id = add_full(store, form).layers[0]
    prefix = "trusted" if form == "trusted" else "user"
    os.setxattr(store.layer_path(layer_id) / "full", f"{prefix}.overlay.impure", b"y")
    assert lines(check(store)) == []


@pytest.mark.parametrize("path", ["full/text", "full/deep/more", "holes"])
def test_a_flipped_bit_is_found_by_reading(store: Store, form: str, path: str) -> None:
    layer_id = add_full(store, form).layers[0]
    root = store.layer_path(layer_id)
    keeping_times(root, lambda root: flip_a_bit(root / path))
    assert lines(check(store)) == []
    [finding] = check(store, read_data=True).findings
    assert (finding.subject, finding.path) == (layer_id, f"/{path}")
    assert finding.expected.startswith("content ")
    assert finding.found.startswith("content ")
    assert finding.expected != finding.found


def test_a_file_that_cannot_be_read_does_not_keep_the_rest_from_being_read(
    store: Store, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_id = add_full(store, form).layers[0]
    keeping_times(store.layer_path(layer_id), lambda root: flip_a_bit(root / "full/text"))
    real = hashing.hash_file

    def bad_sector(fd: int, size_bytes: int, sparse: bool) -> str:
        if size_bytes == 256 * 500:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size_bytes, sparse)

    monkeypatch.setattr(hashing, "hash_file", bad_sector)
    report = check(store, read_data=True)
    assert [(finding.path, finding.found.split(" ")[0]) for finding in report.findings] == [
        ("/full/deep/more", "content"),
        ("/full/text", "content"),
    ]
    assert "Input/output error" in report.findings[0].found


@pytest.mark.user
def test_what_this_user_closed_to_itself_is_looked_at_all_the_same(store: Store) -> None:
    layer_id = add_full(store, "user", sealed=False).layers[0]
    root = store.layer_path(layer_id)
    (root / "full" / "text").chmod(0)
    (root / "full" / "deep").chmod(0)
    seal(store, layer_id)
    for read_data in (False, True):
        assert lines(check(store, read_data)) == []
    (root / "full" / "deep").chmod(0o755)
    keeping_times(root, lambda root: flip_a_bit(root / "full" / "deep" / "more"))
    (root / "full" / "deep").chmod(0)
    assert lines(check(store)) == []
    assert [finding.path for finding in check(store, read_data=True).findings] == ["/full/deep/more"]
    (root / "full" / "deep").chmod(0o700)
    assert lines(check(store)) == [f"layer {layer_id}: /full/deep: expected mode 0000, found mode 0700"]


def test_a_name_that_is_not_utf8(store: Store, form: str) -> None:
    layer_id = add_full(store, form).layers[0]
    name = os.fsdecode(b"full/not-utf8-\xff")
    os.truncate(store.layer_path(layer_id) / name, 1)
    os.utime(store.layer_path(layer_id) / name, ns=(OLD_NS, OLD_NS))
    [finding] = check(store).findings
    assert finding.path == f"/{name}"


def test_many_findings_are_counted_and_some_are_kept(store: Store, form: str) -> None:
    worst, other = add_full(store, form).layers[0], add_full(store, form).layers[0]

    def add_files(root: Path) -> None:
        for number in range(100):
            (root / "bare" / f"extra-{number}").touch()

    keeping_times(store.layer_path(worst), add_files)
    keeping_times(store.layer_path(other), lambda root: (root / "fifo").unlink())
    report = check(store)
    assert report.total == 101
    assert len(report.findings) == MOST_PER_SUBJECT + 1
    assert report.counts == {("layer", worst): 100, ("layer", other): 1}
    assert report.to_json()["findings_total"] == 101


def damaged_manifests(store: Store, other: str) -> dict[str, Callable[[Path], object]]:
    return {
        "no manifest (": lambda path: path.write_bytes(b"what is this"),
        "no manifest (Compressed file ended": lambda path: os.truncate(path, path.stat().st_size // 2),
        str(store.layer(other).digest): lambda path: shutil.copyfile(manifest_path(store, other), path),
        "no manifest (Compressed": lambda path: os.truncate(path, 0),
        "nothing": lambda path: path.unlink(),
        "Is a directory": lambda path: exchange(path, Path.mkdir),
    }


def test_damaged_manifests(store: Store, form: str) -> None:
    other = add_snapshot(store, form=form).layers[0]
    seal(store, other)
    for found, how in damaged_manifests(store, other).items():
        record = add_full(store, form)
        layer_id = record.layers[0]
        how(manifest_path(store, layer_id))
        mine = [one for one in check(store).findings if one.subject == layer_id]
        [finding] = mine
        assert (finding.path, finding.expected) == ("manifest", store.layer(layer_id).digest)
        assert found in finding.found
        store.delete_snapshot(record.snapshot_id)
        store.collect()


def test_a_flipped_bit_in_a_manifest(store: Store, form: str) -> None:
    layer_id = add_full(store, form).layers[0]
    path = manifest_path(store, layer_id)
    whole, entries = path.read_bytes(), list(read_manifest(path))
    for position in range(0, len(whole), max(1, len(whole) // 40)):
        data = bytearray(whole)
        data[position] ^= 0x10
        path.write_bytes(data)
        report = check(store)
        if report.sound:
            # A bit of the compressed form that says nothing of what was compressed.
            assert list(read_manifest(path)) == entries
            continue
        [finding] = report.findings
        assert (finding.path, finding.expected) == ("manifest", store.layer(layer_id).digest)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("what", ["fs", "all", "file"])
def test_a_missing_directory(store: Store, form: str, sealed: bool, what: str) -> None:
    layer_id = add_full(store, form, sealed=sealed).layers[0]
    sound = add_full(store, form, sealed=sealed).layers[0]
    place = store.home.layers / layer_id
    shutil.rmtree(place if what == "all" else place / "fs")
    if what == "file":
        (place / "fs").write_text("no directory")
    report = check(store)
    assert report.damaged_layers == [layer_id]
    found = {finding.path: (finding.expected, finding.found) for finding in report.findings}
    assert found["fs"] == ("a directory", "something else" if what == "file" else "nothing")
    assert set(found) == ({"fs", "manifest"} if sealed and what == "all" else {"fs"})
    assert sound not in report.damaged_layers
    assert report.layers == 2


def test_what_lies_about_is_a_note(store: Store) -> None:
    add_snapshot(store, form="user")
    (store.home.layers / new_id("ly")).mkdir()
    (store.home.trash / "old").mkdir()
    (store.home.tmp.parent / "another-boot").mkdir()
    report = check(store)
    assert report.sound
    assert [note.split(":")[0] for note in report.notes] == ["layers/", "trash/", "tmp/"]


def test_what_a_crash_of_the_machine_made_worthless_is_a_note(store: Store) -> None:
    lost, kept = add_snapshot(store, form="user"), add_snapshot(store, form="user")
    store.make_durable(kept.snapshot_id)
    shutil.rmtree(store.layer_path(lost.layers[0]))
    assert not check(store).sound
    for table in ("snapshots", "layers"):
        change(store, f"UPDATE {table} SET boot_id = 'another-boot', owner_id = 'of then'")
    report = check(store)
    assert report.sound
    assert (report.snapshots, report.layers, report.moving) == (1, 1, 1)
    assert any(lost.snapshot_id in note for note in report.notes)
    assert any(lost.layers[0] in note for note in report.notes)
    assert store.recover() == [lost.snapshot_id]
    assert check(store).sound


def picture(store: Store) -> list[object]:
    """Everything that a check could have changed."""
    seen: list[object] = []
    for path in sorted(store.home.root.rglob("*")):
        if not path.name.startswith("db.sqlite") and path.parent != store.home.locks:
            info = os.lstat(path)
            seen.append((str(path), info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns))
    with store.database.read() as db:
        for table in ("layers", "snapshots", "names", "holders", "counters"):
            seen += [(table, *row) for row in db.execute(f"SELECT * FROM {table}")]
    return seen


def test_nothing_is_changed(store: Store, form: str) -> None:
    record = add_full(store, form)
    add_full(store, form, sealed=False)
    keeping_times(store.layer_path(record.layers[0]), lambda root: flip_a_bit(root / "full/text"))
    shutil.rmtree(store.layer_path(add_full(store, form).layers[0]))
    (store.home.trash / "old").mkdir()
    before = picture(store)
    for read_data in (False, True):
        assert not check(store, read_data).sound
        assert picture(store) == before


def test_access_times_stay(store: Store, form: str) -> None:
    layer_id = add_full(store, form).layers[0]
    path = store.layer_path(layer_id) / "full" / "text"
    os.utime(path, ns=(1, OLD_NS))
    assert check(store, read_data=True).sound
    assert os.stat(path).st_atime_ns == 1


def test_a_layer_that_is_removed_meanwhile_is_no_fault(store: Store, form: str) -> None:
    records = [add_full(store, form) for _ in range(3)]
    going = {record.layers[0]: record.snapshot_id for record in records}
    last = max(going)

    def remove_the_last(layer_id: str) -> None:
        if going.get(last) is not None:
            store.delete_snapshot(going[last])
            going[last] = None  # type: ignore[assignment]
            store.collect()

    report = check(store, step=remove_the_last)
    assert report.sound
    assert (report.layers, report.gone) == (2, 1)
    assert not store.layer_path(last).exists()


def test_an_unsealed_layer_that_is_removed_meanwhile_is_no_fault(store: Store) -> None:
    record = add_snapshot(store, form="user")

    def remove(layer_id: str) -> None:
        store.delete_snapshot(record.snapshot_id)
        store.collect()

    report = check(store, step=remove)
    assert report.sound
    assert (report.layers, report.gone) == (0, 1)


def test_a_check_that_stood_still_says_nothing_of_what_it_saw(store: Store, clock: ManualClock) -> None:
    record = add_snapshot(store, form="user")
    seal(store, record.layers[0])
    times = 0

    def stand_still(name: str) -> None:
        nonlocal times
        if name == "reading:begun":
            times += 1
            clock.advance_s(10_000)
            assert len(store.sweep().holders) == 1
            if times == 1:
                (store.layer_path(record.layers[0]) / "file").unlink()
            if times == 3:
                faultpoints.install(None)

    faultpoints.install(stand_still)
    report = check(store)
    assert times == 3
    assert report.sound
    assert "was not looked at" in report.notes[0]
    assert not check(store).sound


def test_a_layer_that_is_sealed_anew_meanwhile_is_looked_at_again(
    store: Store, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer_id = add_full(store, form).layers[0]
    (store.layer_path(layer_id) / "extra").touch()
    real = layer_check.walk
    times = 0

    def seal_anew(*arguments: Any, **options: Any) -> Any:
        nonlocal times
        times += 1
        if times == 1:
            change(store, "UPDATE layers SET digest = NULL WHERE layer_id = ?", layer_id)
            seal(store, layer_id)
        return real(*arguments, **options)

    monkeypatch.setattr(layer_check, "walk", seal_anew)
    assert lines(check(store)) == []
    assert times == 2


def test_two_checks_and_a_writer_in_another_process(store: Store) -> None:
    record = add_full(store, "user")

    def look() -> None:
        other = Store.open(store.home)
        for _ in range(5):
            assert check(other, read_data=True).sound
            added = add_snapshot(other, form="user", below=record.layers)
            seal(other, added.layers[0])
            other.delete_snapshot(added.snapshot_id)
            other.collect()
        other.close()

    children = [start_child(look) for _ in range(2)]
    assert [exit_code_of(child) for child in children] == [0, 0]
    assert check(store).sound
