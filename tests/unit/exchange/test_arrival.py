"""Arrivals: all of it, under its ids, or nothing at all; and a stop at any step leaves nothing wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.archives import archive_of, file, forged, make_tree, record
from tests.archives import entry as entry_record
from tests.stores import exit_code_of, home_at, in_child, start_child
from tests.travel import FORM, add_tree, digests, exported, traces

from worldfork.content.archive import ArchiveReader, LayerHead
from worldfork.core.errors import ConfigError, Corrupt, FormatUnsupported, Locked, StoreError
from worldfork.core.ids import new_id
from worldfork.exchange import arrival
from worldfork.exchange.arrival import import_snapshot
from worldfork.exchange.passage import Passage, passage_of
from worldfork.keeping.sealing import manifest_path
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store import faultpoints, home
from worldfork.store.store import Store

STOPPED = 42


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """Another machine's store."""
    opened = Store.open(home_at(tmp_path / "other"))
    yield opened
    opened.close()


def take(store: Store, archive: bytes, form: str = FORM) -> SnapshotRecord:
    return import_snapshot(store, io.BytesIO(archive), form)


class TestWhatArrives:
    def test_ids_content_and_facts_are_kept(self, store: Store, other: Store) -> None:
        below = add_tree(other, "below")
        above = add_tree(other, "above", below=below.layers)
        archive = exported(other, above.snapshot_id)
        found = take(store, archive)
        assert found.state == "durable"
        assert found.made_by == "import"
        assert (found.snapshot_id, found.layers, found.facts) == (above.snapshot_id, above.layers, above.facts)
        assert (found.created_s, found.label, found.parent_id) == (above.created_s, "above", above.parent_id)
        assert digests(store, found.layers) == digests(other, above.layers)
        for layer_id in found.layers:
            here, there = store.layer(layer_id), other.layer(layer_id)
            assert (here.digest, here.entries, here.logical_bytes) == (there.digest, there.entries, there.logical_bytes)
            assert here.state == "durable"
            assert here.stored_bytes
            assert manifest_path(store, layer_id).is_file()
        assert exported(store, found.snapshot_id) == archive

    def test_again_is_fine_and_changes_nothing(self, store: Store, other: Store) -> None:
        archive = exported(other, add_tree(other, "one").snapshot_id)
        first = take(store, archive)
        before = traces(store)
        assert take(store, archive) == first
        assert traces(store) == before
        with pytest.raises(Corrupt):  # although it is here
            take(store, archive[:-1])

    def test_into_the_store_that_it_came_from(self, store: Store, tmp_path: Path) -> None:
        make_tree(tmp_path / "base")
        record = add_tree(store, "one", base={"kind": "dir", "path": str(tmp_path / "base")})
        assert take(store, exported(store, record.snapshot_id)).base["kind"] == "dir"

    def test_layers_that_are_here_are_not_written_again(self, store: Store, other: Store) -> None:
        below = add_tree(other, "below")
        take(store, exported(other, below.snapshot_id))
        inode = store.layer_path(below.layers[0]).stat().st_ino
        above = add_tree(other, "above", below=below.layers)
        found = take(store, exported(other, above.snapshot_id))
        assert found.layers == above.layers
        assert store.layer_path(below.layers[0]).stat().st_ino == inode

    def test_a_layer_that_was_about_to_go_stays(self, store: Store, other: Store) -> None:
        below = add_tree(other, "below")
        archive = exported(other, below.snapshot_id)
        take(store, archive)
        store.delete_snapshot(below.snapshot_id)
        with store.database.write() as db:
            db.execute("UPDATE layers SET state = 'condemned'")
        take(store, archive)
        assert store.collect().layers == []
        assert store.layer(below.layers[0]).state == "durable"

    def test_a_base_arrives_as_the_lowest_layer(self, store: Store, other: Store, tmp_path: Path) -> None:
        make_tree(tmp_path / "base")
        left = add_tree(other, "one", base={"kind": "dir", "path": str(tmp_path / "base")})
        archive = exported(other, left.snapshot_id)
        found = take(store, archive)
        assert found.base == {"kind": "layers"}
        assert found.layers[:-1] == left.layers
        assert exported(store, found.snapshot_id) == archive

    @pytest.mark.root
    def test_the_other_form_as_far_as_it_can_carry_it(self, store: Store, other: Store) -> None:
        draft = other.begin_layer(form="trusted")
        make_tree(draft.path)
        os.mknod(draft.path / "gone", 0o020000, 0)
        os.setxattr(draft.path / "a", "trusted.overlay.opaque", b"y")
        left = dataclasses.replace(add_tree(other, "below"), snapshot_id=new_id("sn"), layers=(draft.layer_id,))
        other.publish(left, [draft.layer_id])
        found = take(store, exported(other, left.snapshot_id), "user")
        root = store.layer_path(draft.layer_id)
        assert found.form == store.layer(draft.layer_id).form == "user"
        assert os.getxattr(root / "a", "user.overlay.opaque") == b"y"
        assert "trusted.overlay.opaque" not in os.listxattr(root / "a")
        assert store.layer(draft.layer_id).digest == other.layer(draft.layer_id).digest

    @pytest.mark.root
    def test_what_the_form_cannot_carry_is_named(self, store: Store, other: Store) -> None:
        left = add_tree(other, "one")
        os.setxattr(other.layer_path(left.layers[0]) / "a", "trusted.overlay.redirect", b"/b")
        with pytest.raises(ConfigError) as caught:
            take(store, exported(other, left.snapshot_id), "user")
        assert caught.value.fields["path"] == "a"
        assert traces(store) == []


class TestConflicts:
    def test_another_snapshot_under_the_same_id(self, store: Store, other: Store) -> None:
        left = add_tree(other, "one")
        mine = dataclasses.replace(add_tree(store, "mine"), snapshot_id=left.snapshot_id, created_s=left.created_s + 1)
        store.publish(mine, [])
        before = traces(store)
        with pytest.raises(StoreError, match="another snapshot"):
            take(store, exported(other, left.snapshot_id))
        assert traces(store) == before

    def test_the_same_snapshot_on_layers_that_were_merged_since(self, store: Store, other: Store) -> None:
        left = add_tree(other, "one")
        merged = add_tree(store, "merged")
        store.publish(dataclasses.replace(left, layers=merged.layers), [])
        before = traces(store)
        assert take(store, exported(other, left.snapshot_id)).layers == merged.layers
        assert traces(store) == before

    def test_the_same_layer_with_another_content(self, store: Store, other: Store) -> None:
        left = add_tree(other, "one")
        draft = store.begin_layer(form=FORM, layer_id=left.layers[0])
        make_tree(draft.path)
        mine = dataclasses.replace(left, snapshot_id=new_id("sn"))
        store.publish(mine, [draft.layer_id])
        with pytest.raises(StoreError) as caught:
            take(store, exported(other, left.snapshot_id))
        assert caught.value.fields["layer_id"] == draft.layer_id
        assert [record.snapshot_id for record in store.snapshots()] == [mine.snapshot_id]

    def test_somebody_is_making_one_of_its_layers(self, store: Store, other: Store) -> None:
        left = add_tree(other, "one")
        archive = exported(other, left.snapshot_id)
        second = Store.open(store.home)
        draft = second.begin_layer(form=FORM, layer_id=left.layers[0])
        with pytest.raises(Locked):
            take(store, archive)
        assert second.layer(draft.layer_id).state == "building"
        second.abandon_layer(draft.layer_id)
        second.close()
        take(store, archive)


def test_what_a_dead_import_left_is_written_anew(store: Store, other: Store) -> None:
    left = add_tree(other, "one")
    archive = exported(other, left.snapshot_id)

    def die() -> None:
        mine = Store.open(store.home)
        faultpoints.install(lambda name: os._exit(STOPPED) if name == "import:sealed" else None)
        take(mine, archive)

    assert in_child(die) == STOPPED
    staged = store.layer_path(left.layers[0])
    (staged / "name").write_text("no!")
    os.utime(staged / "name", ns=(1, 2))
    take(store, archive)
    assert (staged / "name").read_text() == "one"
    assert digests(store, left.layers) == digests(other, left.layers)


class TestDamage:
    def test_cut_off_or_changed_anywhere_leaves_nothing(self, store: Store, other: Store) -> None:
        archive = exported(other, add_tree(other, "one").snapshot_id)
        random.seed(3)
        for _ in range(25):
            with pytest.raises(Corrupt):
                take(store, archive[: random.randrange(len(archive))])
            changed = bytearray(archive)
            changed[random.randrange(len(archive))] ^= 1 << random.randrange(8)
            with pytest.raises(Corrupt):
                take(store, bytes(changed))
            assert traces(store) == []

    def test_no_snapshot_in_it(self, store: Store, tmp_path: Path) -> None:
        make_tree(tmp_path / "tree")
        with pytest.raises(Corrupt):
            take(store, archive_of(tmp_path / "tree"))

    @pytest.mark.parametrize(
        ("where", "value"),
        [
            ("snapshot_id", "../../x"),
            ("snapshot_id", None),
            ("parent_id", "sb-" + "a" * 16),
            ("created_s", "now"),
            ("created_s", True),
            ("kind", "memory"),
            ("form", "other"),
            ("base", {"kind": "dir", "path": "/etc"}),
            ("base", {"kind": "host", "fingerprint": "x", "binds": [["/root", "/usr"]]}),
            ("base", {"kind": "layers", "path": "/etc"}),
            ("base", {"kind": "host"}),
            ("base", []),
            ("layers", []),
            ("layers", ["ly-" + "b" * 16]),
            ("layers", ["../../../etc"]),
            ("facts", {"env": {"A": 1}}),
            ("facts", {"env": ["A"]}),
            ("facts", {"user": 0}),
            ("facts", {"limits": {"cpus": "many"}}),
            ("facts", {"limits": {"gpus": 1}}),
            ("facts", {"limits": {"pids": -1}}),
            ("facts", {"limits": {"cpus": float("inf")}}),
            ("facts", {"limits": {"cpus": 1e999}}),
            ("facts", {"limits": {"memory_mb": 10**400}}),
            ("facts", {"env": {"A=B": "x"}}),
            ("facts", {"env": {"A": "\0"}}),
            ("facts", {"env": {"A": "\ud800"}}),
            ("facts", {"env": {"A": "x" * (3 << 20)}}),
            ("facts", {"working_dir": "\ud800"}),
            ("facts", None),
            ("label", 7),
            ("label", "\ud800"),
            ("label", "x" * (1 << 20)),
            ("base", {"kind": "host", "fingerprint": "\ud800"}),
            ("base", {"kind": "host", "fingerprint": "x" * (1 << 20)}),
            ("created_s", 1e300),
            ("created_s", -1e12),
            ("created_s", float("inf")),
        ],
    )
    def test_no_word_of_the_record_is_believed(self, store: Store, other: Store, where: str, value: Any) -> None:
        left = add_tree(other, "one")
        head = ArchiveReader(io.BytesIO(exported(other, left.snapshot_id))).head
        head["record"][where] = value
        with pytest.raises(Corrupt):
            take(store, forged(record("H", json.dumps(head).encode()), record("Z")))
        assert traces(store) == []

    def test_facts_that_nobody_knows_stay_away(self, store: Store, other: Store) -> None:
        left = add_tree(other, "one")
        head = ArchiveReader(io.BytesIO(exported(other, left.snapshot_id))).head
        head["record"]["facts"] |= {"deep": [[[["x"]]]], "big": float("inf"), "ids": "0 0 1"}
        assert passage_of(head).record.facts == left.facts

    def test_a_newer_format(self, store: Store, other: Store) -> None:
        head = ArchiveReader(io.BytesIO(exported(other, add_tree(other, "one").snapshot_id))).head
        with pytest.raises(FormatUnsupported):
            take(store, forged(record("H", json.dumps({**head, "format": 2}).encode()), record("Z")))

    def test_layers_that_are_not_those_of_the_head(self, store: Store, other: Store) -> None:
        one, two = (exported(other, add_tree(other, name).snapshot_id) for name in ("one", "two"))
        head = ArchiveReader(io.BytesIO(one)).head
        lines = [entry_record("", "d"), *file("a", b"x")]
        for layers in (
            [],
            [record("L", json.dumps(ArchiveReader(io.BytesIO(two)).head["layers"][0]).encode()), *lines],
        ):
            with pytest.raises(Corrupt):
                take(store, forged(record("H", json.dumps(head).encode()), *layers, record("Z")))
            assert traces(store) == []

    def test_what_is_on_disk_is_looked_at_again(
        self, store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        archive = exported(other, add_tree(other, "one").snapshot_id)
        from worldfork.content import writing

        real = writing.Writer.add

        def careless(self: Any, entry: Any, content: Any = None) -> None:
            real(self, entry._replace(mode=0o600) if entry.path == "a-" else entry, content)

        monkeypatch.setattr(writing.Writer, "add", careless)
        with pytest.raises(Corrupt) as caught:
            take(store, archive)
        assert caught.value.fields["path"] == "a-"
        assert traces(store) == []


def test_a_stop_at_any_step(tmp_path: Path, other: Store) -> None:
    below = add_tree(other, "below")
    above = add_tree(other, "above", below=below.layers)
    archive = exported(other, above.snapshot_id)
    steps: list[str] = []
    step = 0
    while True:
        step += 1
        place = tmp_path / f"home-{step}"

        def live(step: int = step, place: Path = place) -> None:
            store = Store.open(home_at(place))
            passed: list[str] = []

            def hook(name: str) -> None:
                if name == "import:path" and name in passed:
                    return  # one of them stands for all
                passed.append(name)
                if len(passed) == step:
                    os._exit(STOPPED)

            faultpoints.install(hook)
            take(store, archive)
            (tmp_path / "steps").write_text("\n".join(passed))

        code = in_child(live)
        assert code in (0, STOPPED)
        store = Store.open(home_at(place))
        assert store.sweep().failures == []
        assert store.collect().failures == []
        ids = [record.snapshot_id for record in store.snapshots()]
        assert ids in ([], [above.snapshot_id]), step
        if not ids:
            assert traces(store) == [], step
        else:
            assert digests(store, above.layers) == digests(other, above.layers)
        found = take(store, archive)
        assert found.state == "durable"
        assert exported(store, found.snapshot_id) == archive
        store.close()
        if code == 0:
            steps = (tmp_path / "steps").read_text().split("\n")
            break
    for name in ("begun", "path", "written", "sealed", "read", "published", "durable"):
        assert f"import:{name}" in steps


def test_many_at_once(tmp_path: Path, other: Store) -> None:
    below = add_tree(other, "below", large=True)
    many = [add_tree(other, f"above {number}", below=below.layers) for number in range(2)]
    archives = [exported(other, record.snapshot_id) for record in many]
    place = home_at(tmp_path / "home")
    Store.open(place).close()

    def live(archive: bytes) -> None:
        mine = Store.open(place)
        take(mine, archive)
        mine.close()

    children = [start_child(lambda archive=archive: live(archive)) for archive in [*archives, *archives]]
    assert [exit_code_of(child) for child in children] == [0] * 4
    store = Store.open(place)
    assert {record.snapshot_id for record in store.snapshots()} == {record.snapshot_id for record in many}
    assert {layer.layer_id for layer in store.layers_known()} == {layer for record in many for layer in record.layers}
    assert [exported(store, record.snapshot_id) for record in many] == archives
    assert not list(store.home.trash.iterdir())
    store.close()


def test_whoever_comes_second_takes_what_the_first_one_brought(store: Store, other: Store) -> None:
    """Two snapshots on one layer: the second import has looked before the first one was there."""
    below = add_tree(other, "below")
    one = add_tree(other, "one", below=below.layers)
    two = add_tree(other, "two", below=below.layers)
    archives = [exported(other, record.snapshot_id) for record in (one, two)]
    real = arrival.Arrival.look
    looked: list[int] = []

    def look(self: arrival.Arrival) -> None:
        real(self)
        looked.append(len(self.missing))
        if len(looked) == 1:
            second = Store.open(store.home)
            assert take(second, archives[1]).snapshot_id == two.snapshot_id
            second.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrival.Arrival, "look", look)
        take(store, archives[0])
    assert looked[0] == 2
    assert digests(store, one.layers) == digests(other, one.layers)


FULL = """
import io, subprocess, sys
from pathlib import Path
from tests.stores import home_at
from tests.travel import FORM, exported, traces
from worldfork.core.errors import OutOfSpace
from worldfork.exchange.arrival import import_snapshot
from worldfork.store.store import Store
place, archive = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(place)], check=True)
store = Store.open(home_at(place / "home"))
for _ in range(3):
    try:
        import_snapshot(store, io.BytesIO(archive), FORM)
    except OutOfSpace as error:
        assert error.scope == "host" and error.remedy, error
    else:
        raise AssertionError("it fitted")
    assert traces(store) == [], traces(store)
subprocess.run(["mount", "-o", "remount,size=60m", str(place)], check=True)
record = import_snapshot(store, io.BytesIO(archive), FORM)
assert exported(store, record.snapshot_id) == archive
store.close()
"""


@pytest.mark.root
def test_a_full_disk_leaves_the_store_clean(tmp_path: Path, other: Store) -> None:
    archive = exported(other, add_tree(other, "one", large=True).snapshot_id)
    (tmp_path / "archive").write_bytes(archive)
    (tmp_path / "place").mkdir()
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", FULL, "place", "archive"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(home.__file__).parents[2]), os.getcwd()])},
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr


def test_a_passage_needs_a_layer() -> None:
    head = LayerHead("b3:" + "0" * 64, 1, 0)
    record = SnapshotRecord("sn-" + "a" * 16, None, None, 0.0, "filesystem", "ready", FORM, {"kind": "layers"}, ())
    assert Passage(record, {"ly-" + "a" * 16: head}).to_json()["layers"][0]["digest"] == head.digest
