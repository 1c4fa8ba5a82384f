"""The verbs that look into snapshots, on a real store."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores import home_at, record_of
from tests.unit.cli.conftest import Invoke

from worldfork.core.errors import ERROR_TABLE
from worldfork.records.snapshot import SnapshotRecord
from worldfork.store.store import Store

FORM = "trusted" if os.geteuid() == 0 else "user"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("WORLDFORK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WORLDFORK_SCRATCH", str(tmp_path / "home"))
    opened = Store.open(home_at(tmp_path / "home"))
    yield opened
    opened.close()


def publish(store: Store, files: dict[str, bytes], below: tuple[str, ...] = ()) -> SnapshotRecord:
    draft = store.begin_layer(form=FORM)
    draft.path.mkdir()
    for name, content in files.items():
        (draft.path / name).parent.mkdir(exist_ok=True)
        (draft.path / name).write_bytes(content)
    record = record_of((draft.layer_id, *below), form=FORM)
    store.publish(record, [draft.layer_id])
    return record


@pytest.fixture
def pair(store: Store) -> tuple[str, str]:
    old = publish(store, {"text": b"one\ntwo\n", "data": b"\0\1", "\udcff\n": b"odd"})
    new = publish(store, {"text": b"one\n2\n", "data": b"\0\1\2", "sub/new": b"x" * 2000}, old.layers)
    store.set_name("before", old.snapshot_id)
    return old.snapshot_id, new.snapshot_id


def test_diff(pair: tuple[str, str], invoke: Invoke) -> None:
    result = invoke("diff", "before", pair[1])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "~ /data  (content, 2 B -> 3 B)",
        "+ /sub/",
        "+ /sub/new  (2.0 KiB)",
        "~ /text  (content, 8 B -> 6 B)",
    ]
    assert invoke("diff", "before", "before").stdout == ""
    assert invoke("diff", pair[0], pair[1], "/text", "sub").stdout.splitlines()[0].startswith("~ /text")


def test_diff_with_patches(pair: tuple[str, str], invoke: Invoke) -> None:
    lines = invoke("diff", "--patch", *pair).stdout.splitlines()
    assert "Binary files a/data and b/data differ" in lines
    assert lines[-2:] == ["-two", "+2"]
    found = json.loads(invoke("diff", "--patch", "--json", *pair).stdout)
    assert [change["path"] for change in found] == ["/data", "/sub", "/sub/new", "/text"]
    assert found[3] == {
        "path": "/text",
        "change": "changed",
        "what": ["content"],
        "old_kind": "f",
        "new_kind": "f",
        "old_bytes": 8,
        "new_bytes": 6,
        "patch": "--- a/text\n+++ b/text\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n",
    }
    assert "patch" not in json.loads(invoke("diff", "--json", *pair).stdout)[0]


def test_cat(pair: tuple[str, str], invoke: Invoke) -> None:
    assert invoke("cat", "before", "/data").stdout_bytes == b"\0\1"
    found = json.loads(invoke("cat", "--json", pair[1], "data").stdout)
    assert found == {"path": "data", "size_bytes": 3, "content_base64": base64.b64encode(b"\0\1\2").decode()}


def test_files(pair: tuple[str, str], invoke: Invoke) -> None:
    lines = invoke("files", pair[0]).stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["name", "data", "text", '"\\377\\n"']
    assert lines[1].startswith("-rw")
    found = json.loads(invoke("files", "--json", pair[1], "/sub").stdout)
    assert [(entry["path"], entry["kind"], entry["size_bytes"]) for entry in found] == [("/sub/new", "f", 2000)]
    names = [entry["path"] for entry in json.loads(invoke("files", "--json", "before").stdout)]
    assert names == ["/data", "/text", "/\\udcff\n"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("cat", "before", "none"), 25),
        (("cat", "before", "/"), 25),
        (("files", "before", "text/in"), 25),
        (("diff", "before", "before", "none"), 25),
        (("files", "nobody"), 13),
    ],
)
def test_what_is_not_there(pair: tuple[str, str], invoke: Invoke, arguments: tuple[str, ...], code: int) -> None:
    result = invoke(*arguments)
    assert result.exit_code == code
    assert result.stderr.startswith("worldfork: ")
    shown = invoke(*arguments, "--json")
    assert json.loads(shown.stderr)["error"]["code"] == ("path" if code == 25 else "not_found")


@pytest.mark.parametrize(
    "arguments",
    [("cat", "before", "/text"), ("diff", "before", "{new}", "--patch"), ("files", "before"), ("snapshots",)],
)
def test_an_output_that_takes_no_more_is_a_typed_error(pair: tuple[str, str], arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "worldfork.cli.main", *(text.format(new=pair[1]) for text in arguments)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("worldfork: standard output cannot be written: No space left on device.")
    assert done.returncode == ERROR_TABLE["out_of_space"][1]
