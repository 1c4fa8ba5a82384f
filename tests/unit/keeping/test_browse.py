"""Looking into snapshots where they lie."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.stores import record_of

from worldfork.content.merged import state_digest
from worldfork.core.errors import ConfigError, NotFound, PathError
from worldfork.keeping.browse import browsing, compared, comparing, read_file
from worldfork.keeping.sealing import manifest_path, seal
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store.store import Store

FORM = "trusted" if os.geteuid() == 0 else "user"
HOST = {"kind": "host", "binds": [["/usr", "/usr"], ["/opt/python", "/opt/python"]], "fingerprint": "x"}


def publish(
    store: Store, files: dict[str, str], below: tuple[str, ...] = (), base: dict[str, Any] | None = None
) -> SnapshotRecord:
    draft = store.begin_layer(form=FORM)
    draft.path.mkdir()
    for name, content in files.items():
        path = draft.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content.startswith("->"):
            path.symlink_to(content[2:])
        elif content == "deleted":
            os.mknod(path, 0o020000, 0)
        else:
            path.write_text(content)
    record = replace(record_of((draft.layer_id, *below), form=FORM), base=base or HOST)
    store.publish(record, [draft.layer_id])
    return record


def test_a_file_is_read_where_it_lies(store: Store) -> None:
    lower = publish(store, {"etc/conf": "old", "root/file": "1"})
    upper = publish(store, {"etc/conf": "new", "link": "->/etc/conf", "root/file": "deleted"}, lower.layers)
    assert read_file(store, upper.snapshot_id, "/etc/conf") == b"new"
    assert read_file(store, upper.snapshot_id, "link") == b"new"
    assert read_file(store, lower.snapshot_id, "etc/conf") == b"old"
    with pytest.raises(PathError) as caught:
        read_file(store, upper.snapshot_id, "root/file")
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, "root/file")
    with browsing(store, upper.snapshot_id) as snapshot:
        assert [entry.path for entry in snapshot.list()] == ["etc", "link", "root"]
        assert [entry.path for entry in snapshot.list("link")] == ["etc/conf"]


def test_links_stay_inside(store: Store, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the machine")
    record = publish(store, {"out": f"->{secret}", "up": "->../../../../../../etc/hostname", "loop": "->loop"})
    for path, number in (
        ("out", errno.ENOENT),
        ("up", errno.ENOENT),
        ("loop", errno.ELOOP),
        (str(secret), errno.ENOENT),
    ):
        with pytest.raises(PathError) as caught:
            read_file(store, record.snapshot_id, path)
        assert caught.value.errno == number


@pytest.mark.parametrize("path", ["/usr", "usr/bin/env", "bin/env", "/opt/python/lib", "x/../usr/bin"])
def test_what_the_base_shows_of_the_machine_is_refused(store: Store, path: str) -> None:
    files = {"usr/keep": "", "bin": "->usr/bin", "x/y": "1", "opt/python/keep": "", "opt/own": "1"}
    record = publish(store, files)
    with browsing(store, record.snapshot_id) as snapshot, pytest.raises(PathError) as caught:
        snapshot.list(path)
    assert caught.value.errno == errno.EXDEV
    assert "machine" in str(caught.value)
    assert read_file(store, record.snapshot_id, "opt/own") == b"1"


def test_a_directory_base_is_part_of_what_is_seen(store: Store, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "of-base").write_text("b")
    record = publish(store, {"own": "1"}, base={"kind": "dir", "path": str(base)})
    assert read_file(store, record.snapshot_id, "of-base") == b"b"
    base.rename(tmp_path / "gone")
    with pytest.raises(ConfigError):
        read_file(store, record.snapshot_id, "own")


def test_its_layers_are_kept_meanwhile(store: Store) -> None:
    record = publish(store, {"file": "content"})
    with browsing(store, record.snapshot_id) as snapshot:
        store.delete_snapshot(record.snapshot_id)
        assert store.collect().layers == []
        assert b"".join(snapshot.chunks("file")) == b"content"
    assert store.collect().layers == list(record.layers)
    assert store.holders() == []
    with pytest.raises(NotFound):
        read_file(store, record.snapshot_id, "file")


def test_two_snapshots_compared(store: Store) -> None:
    old = publish(store, {"a": "1", "b": "1", "usr/keep": ""})
    new = publish(store, {"a": "2", "c": "3", "b": "deleted"}, old.layers)
    with comparing(store, old.snapshot_id, new.snapshot_id) as (before, after):
        assert [(change.how, change.path) for change in compared(before, after)] == [
            ("changed", "a"), ("removed", "b"), ("added", "c"),
        ]  # fmt: skip
        assert [change.path for change in compared(before, after, "//a/")] == ["a"]
        for path, number in (("none", errno.ENOENT), ("/usr/bin", errno.EXDEV)):
            with pytest.raises(PathError) as caught:
                list(compared(before, after, path))
            assert caught.value.errno == number


def test_what_was_sealed_is_not_read_again(store: Store) -> None:
    record = publish(store, {"a": "1", "sub/b": "2"})
    seal(store, record.layers[0])
    digests = []
    path = store.layer_path(record.layers[0]) / "sub" / "b"
    info = path.stat()
    manifest = manifest_path(store, record.layers[0])
    for step in ("as it was", "changed behind its back", "manifest damaged", "no manifest"):
        if step == "changed behind its back":
            path.write_text("3")
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
        elif step == "manifest damaged":
            manifest.write_bytes(manifest.read_bytes()[:-4])
        elif step == "no manifest":
            manifest.unlink()
        with browsing(store, record.snapshot_id) as snapshot:
            digests.append(state_digest(snapshot.view))
    assert digests[0] == digests[1] != digests[2] == digests[3]


@pytest.mark.root
def test_forms_are_not_compared(store: Store) -> None:
    one = publish(store, {"a": "1"})
    draft = store.begin_layer(form="user")
    draft.path.mkdir()
    other = record_of((draft.layer_id,), form="user")
    store.publish(other, [draft.layer_id])
    with pytest.raises(ConfigError), comparing(store, one.snapshot_id, other.snapshot_id):
        pass
