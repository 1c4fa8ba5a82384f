"""Push and pull: layers first, only what the other side lacks, and single layers for whoever mends."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.buckets import BUCKET, s3_server
from tests.stores import add_memory, home_at, in_child
from tests.travel import FORM, add_tree, digests, exported, traces

from worldfork.core.errors import ConfigError, Corrupt, NotFound, StoreError
from worldfork.core.ids import new_id
from worldfork.exchange.exchange import fetch_layer, pull, push
from worldfork.keeping.sealing import seal
from worldfork.store import faultpoints, home
from worldfork.store.store import Store

STOPPED = 42


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, s3_server(patch) as address:
        yield address


@pytest.fixture(params=["directory", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "remote")
    request.getfixturevalue("s3")
    return f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(home_at(tmp_path / "other"))
    yield opened
    opened.close()


def test_a_remote_that_takes_no_more_is_told_as_the_remote(store: Store, tmp_path: Path) -> None:
    draft = store.begin_layer(form=FORM)
    draft.path.mkdir()
    (draft.path / "file").write_bytes(os.urandom(20 << 20))
    record = dataclasses.replace(add_tree(store, "one"), snapshot_id=new_id("sn"), layers=(draft.layer_id,))
    store.publish(record, [draft.layer_id])
    seal(store, draft.layer_id)

    def send() -> None:
        mine = Store.open(store.home)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 20, 6 << 20))
        with pytest.raises(StoreError, match="cannot be written to") as caught:
            push(mine, [record.snapshot_id], str(tmp_path / "remote"))
        assert "path" not in caught.value.fields

    assert in_child(send) == 0
    assert list((tmp_path / "remote").rglob("*.wfa")) == []


def test_what_cannot_be_pushed_makes_no_remote(store: Store, tmp_path: Path) -> None:
    first = add_tree(store, "files")
    memory = add_memory(store, below=first.layers, form=FORM)
    for refused, unfit in ((ConfigError, memory.snapshot_id), (NotFound, new_id("sn"))):
        with pytest.raises(refused):
            push(store, [first.snapshot_id, unfit], str(tmp_path / "remote"))
        assert not (tmp_path / "remote").exists()


def test_a_snapshot_comes_back(store: Store, other: Store, remote: str) -> None:
    below = add_tree(store, "below", large=True)
    above = add_tree(store, "above", below=below.layers)
    report = push(store, [above.snapshot_id], remote)
    assert report.snapshots == [above.snapshot_id]
    assert len(report.sent) == 2
    assert store.snapshot(above.snapshot_id).exported == remote
    (found,) = pull(other, [above.snapshot_id], remote, FORM)
    assert found.state == "durable"
    assert digests(other, found.layers) == digests(store, above.layers)
    assert exported(other, above.snapshot_id) == exported(store, above.snapshot_id)
    assert pull(other, [above.snapshot_id], remote, FORM) == [found]


def test_what_is_there_already_is_told(store: Store, remote: str) -> None:
    below = add_tree(store, "below")
    above = add_tree(store, "above", below=below.layers)
    sent = push(store, [above.snapshot_id], remote).sent
    again = push(store, [above.snapshot_id, above.snapshot_id], remote)
    assert (again.sent, again.there) == ([], sent)


def test_only_what_is_missing_is_sent(store: Store, other: Store, remote: str) -> None:
    below = add_tree(store, "below")
    push(store, [below.snapshot_id], remote)
    above = add_tree(store, "above", below=below.layers)
    again = push(store, [above.snapshot_id, below.snapshot_id], remote)
    assert (len(again.sent), len(again.there)) == (1, 1)
    pull(other, [below.snapshot_id], remote, FORM)
    inode = other.layer_path(below.layers[0]).stat().st_ino
    pull(other, [above.snapshot_id], remote, FORM)
    assert other.layer_path(below.layers[0]).stat().st_ino == inode


def test_equal_layers_of_other_ids_are_one_there(store: Store, other: Store, remote: str) -> None:
    first = add_tree(store, "same")
    (draft, second) = store.begin_layer(form=FORM), dataclasses.replace(first, snapshot_id=new_id("sn"))
    fetched = store.home.tmp / "archive"
    fetched.write_bytes(exported(store, first.snapshot_id))
    fetch_layer(str(fetched), seal(store, first.layers[0]).digest, draft.path, FORM)
    second = dataclasses.replace(second, layers=(draft.layer_id,))
    store.publish(second, [draft.layer_id])
    report = push(store, [first.snapshot_id, second.snapshot_id], remote)
    assert (len(report.sent), len(report.snapshots)) == (1, 2)
    assert len(pull(other, report.snapshots, remote, FORM)) == 2
    assert {layer.layer_id for layer in other.layers_known()} == {first.layers[0], draft.layer_id}


def test_pushed_again_after_its_layers_were_merged(store: Store, remote: str) -> None:
    below = add_tree(store, "below")
    above = add_tree(store, "above", below=below.layers)
    sent = push(store, [above.snapshot_id], remote).sent
    merged = add_tree(store, "merged")
    for snapshot_id in (above.snapshot_id, merged.snapshot_id):
        store.make_durable(snapshot_id)
    assert store.rewrite(above.layers, merged.layers) == 1
    report = push(store, [above.snapshot_id], remote)
    assert (report.snapshots, report.sent, report.there) == ([above.snapshot_id], [], sent)


@pytest.mark.root
def test_pushed_again_by_a_user_whose_layers_have_the_other_form(store: Store, other: Store, remote: str) -> None:
    left = add_tree(store, "one")
    push(store, [left.snapshot_id], remote)
    (pulled,) = pull(other, [left.snapshot_id], remote, "user")
    assert (left.form, pulled.form) == ("trusted", "user")
    report = push(other, [left.snapshot_id], remote)
    assert (report.snapshots, report.sent) == ([left.snapshot_id], [])


def test_what_others_named_reaches_the_disk_too(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever pushed it may have been stopped between giving the name and bringing that to disk."""
    record = add_tree(store, "one")
    place = tmp_path / "remote"
    push(store, [record.snapshot_id], str(place))
    synced: set[str] = set()
    real = os.fsync

    def sync(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    before: list[set[str]] = []
    monkeypatch.setattr(store, "set_exported", lambda *_: before.append({*synced}))
    push(store, [record.snapshot_id], str(place))
    assert before[0] >= {str(place), str(place / "layers"), str(place / "snapshots")}


def test_another_snapshot_of_the_same_id(store: Store, other: Store, remote: str) -> None:
    left = add_tree(store, "one")
    push(store, [left.snapshot_id], remote)
    mine = dataclasses.replace(add_tree(other, "two"), snapshot_id=left.snapshot_id)
    other.publish(mine, [])
    with pytest.raises(StoreError):
        push(other, [left.snapshot_id], remote)
    assert other.snapshot(left.snapshot_id).exported is None


def test_a_stop_at_any_step_of_a_push(store: Store, other: Store, tmp_path: Path) -> None:
    below = add_tree(store, "below")
    above = add_tree(store, "above", below=below.layers)
    for layer_id in above.layers:
        seal(store, layer_id)
    step = 0
    while True:
        step += 1
        place = str(tmp_path / f"remote-{step}")

        def live(step: int = step, place: str = place) -> None:
            mine = Store.open(store.home)
            passed: list[str] = []

            def hook(name: str) -> None:
                passed.append(name)
                if len(passed) == step:
                    os._exit(STOPPED)

            faultpoints.install(hook)
            push(mine, [above.snapshot_id], place)

        code = in_child(live)
        assert code in (0, STOPPED)
        records = list(Path(place).glob("snapshots/*"))
        if records:  # the record is last: with it all is there
            assert len(list(Path(place).glob("layers/*"))) == 2
        if store.snapshot(above.snapshot_id).exported == place:
            assert records
        push(store, [above.snapshot_id], place)
        assert [path.name for path in Path(place).glob("drafts/*")] == []
        if code == 0:
            break
    assert step > 10
    store.sweep()
    pull(other, [above.snapshot_id], place, FORM)
    assert digests(other, above.layers) == digests(store, above.layers)


PROGRAM = """
import sys
from pathlib import Path
from tests.stores import home_at
from tests.travel import FORM
from worldfork.exchange.exchange import pull, push
from worldfork.store.store import Store
verb, place, snapshot_id, remote = sys.argv[1:]
store = Store.open(home_at(Path(place)))
if verb == "push":
    push(store, [snapshot_id], remote)
else:
    pull(store, [snapshot_id], remote, FORM)
store.close()
"""


def start(*arguments: str) -> subprocess.Popen[bytes]:
    # Started anew and not forked: a child has none of the threads by which its parent used S3.
    path = os.pathsep.join([str(Path(home.__file__).parents[2]), os.getcwd()])
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], env={**os.environ, "PYTHONPATH": path})


def test_many_pushers_and_pullers(store: Store, remote: str, tmp_path: Path) -> None:
    below = add_tree(store, "below", large=True)
    many = [add_tree(store, f"above {number}", below=below.layers) for number in range(2)]
    from_here = str(store.home.root)
    pushers = [start("push", from_here, one.snapshot_id, remote) for one in [*many, *many]]
    assert [each.wait(50) for each in pushers] == [0] * 4
    pullers = [start("pull", str(tmp_path / "home-2"), one.snapshot_id, remote) for one in many]
    assert [each.wait(50) for each in pullers] == [0] * 2
    there = Store.open(home_at(tmp_path / "home-2"))
    assert len(there.snapshots()) == 2
    assert len(there.layers_known()) == 3
    there.close()


class TestDamage:
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path / "remote"

    def test_a_damaged_layer(self, store: Store, other: Store, place: Path) -> None:
        left = add_tree(store, "one")
        push(store, [left.snapshot_id], str(place))
        (path,) = place.glob("layers/*")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(Corrupt):
            pull(other, [left.snapshot_id], str(place), FORM)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(Corrupt):
            pull(other, [left.snapshot_id], str(place), FORM)
        path.unlink()
        with pytest.raises(NotFound):
            pull(other, [left.snapshot_id], str(place), FORM)
        assert traces(other) == []

    def test_another_layer_under_this_digest(self, store: Store, other: Store, place: Path) -> None:
        one, two = add_tree(store, "one"), add_tree(store, "two")
        push(store, [one.snapshot_id, two.snapshot_id], str(place))
        first, second = sorted(place.glob("layers/*"))
        first.write_bytes(second.read_bytes())
        codes = []
        for record in (one, two):
            try:
                pull(other, [record.snapshot_id], str(place), FORM)
            except Corrupt:
                codes.append(record.snapshot_id)
        assert len(codes) == 1

    def test_a_damaged_record(self, store: Store, other: Store, place: Path) -> None:
        left = add_tree(store, "one")
        push(store, [left.snapshot_id], str(place))
        (path,) = place.glob("snapshots/*")
        whole = path.read_bytes()
        record = json.loads(whole)
        record["head"]["record"]["label"] = "another"
        other_id = path.with_name("sn-" + "a" * 16 + ".json")
        other_id.write_bytes(whole)
        for content in (whole[:-3], whole.replace(b"b3:", b"b4:"), json.dumps(record).encode(), b"[]", b""):
            path.write_bytes(content)
            with pytest.raises(Corrupt):
                pull(other, [left.snapshot_id], str(place), FORM)
        with pytest.raises(Corrupt):
            pull(other, [other_id.stem], str(place), FORM)
        assert traces(other) == []

    def test_nothing_there(self, store: Store, place: Path) -> None:
        with pytest.raises(ConfigError):
            pull(store, ["sn-" + "a" * 16], str(place), FORM)
        place.mkdir()
        with pytest.raises(NotFound):
            pull(store, ["sn-" + "a" * 16], str(place), FORM)
        with pytest.raises(ConfigError):
            pull(store, ["../../x"], str(place), FORM)


class TestFetchLayer:
    def test_from_a_remote(self, store: Store, remote: str, tmp_path: Path) -> None:
        left = add_tree(store, "one")
        push(store, [left.snapshot_id], remote)
        digest = store.layer(left.layers[0]).digest
        assert digest is not None
        fetch_layer(remote, digest, tmp_path / "fetched", FORM)
        from worldfork.content.layer import walk
        from worldfork.content.manifest import digest_of

        assert digest_of(walk(tmp_path / "fetched", FORM)).digest == digest
        with pytest.raises(NotFound):
            fetch_layer(remote, "b3:" + "0" * 64, tmp_path / "none", FORM)
        assert not (tmp_path / "none").exists()

    def test_from_an_export(self, store: Store, tmp_path: Path) -> None:
        below = add_tree(store, "below")
        above = add_tree(store, "above", below=below.layers)
        archive = exported(store, above.snapshot_id)
        path = tmp_path / "archive"
        path.write_bytes(archive)
        for layer_id in above.layers:
            digest = seal(store, layer_id).digest
            fetch_layer(str(path), digest, tmp_path / layer_id, FORM)
            assert (tmp_path / layer_id / "name").read_bytes() == (store.layer_path(layer_id) / "name").read_bytes()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["archive", "home", *above.layers])
        with pytest.raises(NotFound):
            fetch_layer(str(path), "b3:" + "0" * 64, tmp_path / "none", FORM)

    def test_a_failure_leaves_nothing(self, store: Store, tmp_path: Path) -> None:
        left = add_tree(store, "one")
        archive = bytearray(exported(store, left.snapshot_id))
        digest = seal(store, left.layers[0]).digest
        path = tmp_path / "archive"
        path.write_bytes(archive[:-50])
        with pytest.raises(Corrupt):
            fetch_layer(str(path), digest, tmp_path / "fetched", FORM)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "home"]
        path.write_bytes(b"no archive")
        for source in (str(path), str(tmp_path / "none"), "s4://x"):
            with pytest.raises(ConfigError):
                fetch_layer(source, digest, tmp_path / "fetched", FORM)
        with pytest.raises(ConfigError):
            fetch_layer(str(path), "../x", tmp_path / "fetched", FORM)
