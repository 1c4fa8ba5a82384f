"""What leaves: the same bytes for the same snapshot, and nothing that is of this machine alone."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path

import pytest
from tests.archives import make_tree
from tests.travel import FORM, add_tree, exported, traces

from worldfork.content import blocks
from worldfork.content.archive import ArchiveReader
from worldfork.core.errors import ConfigError, Corrupt, NotFound, OutOfSpace, StoreError
from worldfork.exchange.departure import export_snapshot
from worldfork.keeping.sealing import manifest_path, seal
from worldfork.store.store import Store


def test_the_same_snapshot_has_the_same_bytes_sealed_durable_and_pushed_or_not(store: Store) -> None:
    record = add_tree(store, "one")
    first = exported(store, record.snapshot_id)
    store.make_durable(record.snapshot_id)
    store.set_exported(record.snapshot_id, "elsewhere")
    store.set_digest(record.snapshot_id, "b3:" + "0" * 64)
    assert exported(store, record.snapshot_id) == first


def test_what_is_of_this_machine_stays(store: Store) -> None:
    record = add_tree(store, "one")
    head = ArchiveReader(io.BytesIO(exported(store, record.snapshot_id))).head
    assert head["record"]["base"] == {"kind": "host", "fingerprint": "this machine"}
    assert head["record"]["layers"] == list(record.layers)
    assert head["record"]["facts"] == {"env": {"A": "b"}}
    assert head["record"]["label"] == "one"
    words = str(head)
    assert "ready" not in words
    assert str(store.home.root) not in words


def test_a_host_base_is_told_of(store: Store) -> None:
    record = add_tree(store, "one")
    assert "does not travel" in export_snapshot(store, record.snapshot_id, io.BytesIO()).notes[0]


def test_layers_come_the_lowest_first(store: Store) -> None:
    below = add_tree(store, "below")
    above = add_tree(store, "above", below=below.layers)
    head = ArchiveReader(io.BytesIO(exported(store, above.snapshot_id))).head
    assert [layer["layer_id"] for layer in head["layers"]] == [*reversed(above.layers)]


class TestBaseInADirectory:
    @pytest.fixture
    def base(self, tmp_path: Path) -> Path:
        make_tree(tmp_path / "base")
        (tmp_path / "base" / "usr").mkdir()
        return tmp_path / "base"

    def test_it_becomes_the_lowest_layer_of_an_id_by_its_content(self, store: Store, base: Path) -> None:
        facts = {"kind": "dir", "path": str(base)}
        one, two = add_tree(store, "one", base=facts), add_tree(store, "two", base=facts)
        heads = [ArchiveReader(io.BytesIO(exported(store, each.snapshot_id))).head for each in (one, two)]
        lowest = {head["record"]["layers"][-1] for head in heads}
        assert len(lowest) == 1
        assert [head["record"]["base"] for head in heads] == [{"kind": "layers"}] * 2
        assert str(base) not in str(heads)
        (base / "new").write_text("x")
        assert ArchiveReader(io.BytesIO(exported(store, one.snapshot_id))).head["record"]["layers"][-1] not in lowest

    def test_one_that_is_gone_is_a_typed_error(self, store: Store, base: Path) -> None:
        record = add_tree(store, "one", base={"kind": "dir", "path": str(base)})
        base.rename(base.with_name("away"))
        with pytest.raises(ConfigError):
            exported(store, record.snapshot_id)

    def test_one_that_changes_meanwhile_is_noticed(self, store: Store, base: Path) -> None:
        record = add_tree(store, "one", base={"kind": "dir", "path": str(base)})

        class Changing(io.BytesIO):
            def write(self, data: object, /) -> int:
                (base / "a-").write_bytes(b"sorts between A and A/")
                return super().write(data)  # type: ignore[arg-type]

        with pytest.raises(StoreError) as caught:
            export_snapshot(store, record.snapshot_id, Changing())
        assert caught.value.fields["path"] == "a-"
        assert not list(store.home.tmp.iterdir())
        assert store.holders() == []


def test_damage_names_the_layer_and_the_path(store: Store) -> None:
    record = add_tree(store, "one")
    seal(store, record.layers[0])
    path = store.layer_path(record.layers[0]) / "name"
    path.write_text("two")
    with pytest.raises(Corrupt) as caught:
        exported(store, record.snapshot_id)
    assert caught.value.fields["layer_id"] == record.layers[0]
    assert caught.value.fields["path"] == "name"
    assert store.holders() == []


def test_a_damaged_manifest(store: Store) -> None:
    record = add_tree(store, "one")
    seal(store, record.layers[0])
    path = manifest_path(store, record.layers[0])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(Corrupt) as caught:
        exported(store, record.snapshot_id)
    assert caught.value.fields["layer_id"] == record.layers[0]


def test_an_unknown_snapshot(store: Store) -> None:
    with pytest.raises(NotFound):
        exported(store, "sn-" + "a" * 16)
    assert traces(store) == []


def test_a_reader_who_goes_away_and_a_disk_that_is_full(store: Store) -> None:
    record = add_tree(store, "one", large=True)
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb", buffering=0) as out, pytest.raises(BrokenPipeError):
        export_snapshot(store, record.snapshot_id, out)
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(Exception) as caught:
        export_snapshot(store, record.snapshot_id, full)
    assert caught.value.code == "out_of_space"  # type: ignore[attr-defined]
    assert store.holders() == []


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "gone"), OSError(errno.ENOSPC, "full"), KeyError("x")])
def test_a_sink_that_fails_in_the_midst_of_a_file_is_not_taken_for_the_file(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    record = add_tree(store, "one", large=True)
    monkeypatch.setattr(blocks, "_AHEAD", 1)

    class Failing:
        written = 0

        def write(self, data: bytes | memoryview, /) -> int:
            self.written += len(data)
            if self.written > 1000:
                raise error
            return len(data)

    with pytest.raises(Exception) as caught:
        export_snapshot(store, record.snapshot_id, Failing())
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        assert isinstance(caught.value, OutOfSpace)
        assert "the archive cannot be written" in caught.value.message
        assert not {"path", "layer_id"} & caught.value.fields.keys()
    else:
        assert caught.value is error
    assert store.holders() == []


def test_it_holds_what_it_reads(store: Store) -> None:
    record = add_tree(store, "one", large=True)

    class Deleting(io.BytesIO):
        def write(self, data: object, /) -> int:
            if store.snapshots():
                store.delete_snapshot(record.snapshot_id)
            assert store.collect().layers == []
            return super().write(data)  # type: ignore[arg-type]

    export_snapshot(store, record.snapshot_id, Deleting())
    assert store.collect().layers == list(record.layers)


@pytest.mark.user
def test_what_a_sandbox_closed_to_its_user_is_read_and_stays_closed(store: Store) -> None:
    record = add_tree(store, "one")
    root = store.layer_path(record.layers[0])
    (root / "a" / "file").chmod(0)
    (root / "a" / "deep").chmod(0)
    (root / "a").chmod(0o300)
    archive = exported(store, record.snapshot_id)
    layer = next(iter(ArchiveReader(io.BytesIO(archive)).layers()))
    modes = {entry.path: entry.mode for entry, _ in layer.files()}
    assert (modes["a"], modes["a/file"], modes["a/deep"]) == (0o300, 0, 0)
    assert (root / "a").stat().st_mode & 0o777 == 0o300
    (root / "a").chmod(0o700)
    (root / "a" / "deep").chmod(0o700)


def test_forms_are_not_in_a_layer(store: Store) -> None:
    record = add_tree(store, "one")
    reader = ArchiveReader(io.BytesIO(exported(store, record.snapshot_id)))
    assert reader.head["record"]["form"] == FORM
    assert all(layer.keys() == {"layer_id", "digest", "entries", "logical_bytes"} for layer in reader.head["layers"])
