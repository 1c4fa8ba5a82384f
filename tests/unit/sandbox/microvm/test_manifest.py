"""What is written of saved and running machines, and what is refused of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import Corrupt, FormatUnsupported, NotFound, SandboxDied
from worldfork.sandbox.microvm.manifest import (
    MANIFEST,
    STATE,
    Build,
    DiskFile,
    Running,
    Saved,
    digest_state,
    open_state,
    read_running,
    read_saved,
    write_running,
    write_saved,
)

BUILD = Build("7.2.22", "tcg", "qemu max", "ab" * 32, 256 << 20, 1)
DISKS = ((DiskFile("base.img"),), (), (DiskFile("scratch.1.qcow2", "qcow2"), DiskFile("scratch.img")))
SAVED = Saved(BUILD, "devices", ("ram.0", "ram.1"), DISKS, digest_state(b"state"), {"network": "none"})


def test_a_saved_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_saved(tmp_path, SAVED)
    assert read_saved(tmp_path) == SAVED
    assert (tmp_path / MANIFEST).stat().st_mode & 0o777 == 0o400


def test_a_running_machine_is_read_as_it_was_written(tmp_path: Path) -> None:
    disks = tuple(tuple(DiskFile(f"/there/{file.path}", file.format) for file in chain) for chain in DISKS)
    running = Running(77, 18, "/home/memory/x", 5, "kvm", BUILD, disks, "host", "/layers/top")
    write_running(tmp_path, running)
    assert read_running(tmp_path) == running


def test_no_machine_and_no_memory(tmp_path: Path) -> None:
    with pytest.raises(SandboxDied):
        read_running(tmp_path)
    for place in (tmp_path, tmp_path / "gone"):
        with pytest.raises(NotFound) as caught:
            read_saved(place)
        assert caught.value.remedy


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("build"),
        lambda data: data.pop("state_digest"),
        lambda data: data.update(ram=[]),
        lambda data: data.update(disks=[]),
        lambda data: data.update(ram=["../ram.0"]),
        lambda data: data.update(ram=["/etc/shadow"]),
        lambda data: data.update(ram=[7]),
        lambda data: data["disks"][0][0].update(path="a/b"),
        lambda data: data["disks"][0][0].update(unknown=1),
        lambda data: data["build"].pop("cpu"),
    ],
)
def test_a_manifest_that_is_not_whole_is_damaged(tmp_path: Path, change: Change) -> None:
    write_saved(tmp_path, SAVED)
    data = json.loads((tmp_path / MANIFEST).read_text())
    change(data)
    (tmp_path / MANIFEST).chmod(0o600)
    (tmp_path / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(Corrupt) as caught:
        read_saved(tmp_path)
    assert caught.value.remedy


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7"])
def test_what_is_no_manifest_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(Corrupt):
        read_saved(tmp_path)
    (tmp_path / "machine.json").write_text(text)
    with pytest.raises(Corrupt):
        read_running(tmp_path)


def test_another_version_is_told(tmp_path: Path) -> None:
    write_saved(tmp_path, SAVED)
    data = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).chmod(0o600)
    (tmp_path / MANIFEST).write_text(json.dumps({**data, "format": 2}))
    with pytest.raises(FormatUnsupported):
        read_saved(tmp_path)


def test_a_state_is_checked_whole(tmp_path: Path) -> None:
    content = os.urandom((1 << 20) + 5)
    (tmp_path / STATE).write_bytes(content)
    saved = replace(SAVED, state_digest=digest_state(content))
    fd = open_state(tmp_path, saved)
    with os.fdopen(fd, "rb") as file:
        assert file.read() == content, "from its beginning"
    (tmp_path / STATE).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(Corrupt):
        open_state(tmp_path, saved)
    (tmp_path / STATE).unlink()
    with pytest.raises(NotFound):
        open_state(tmp_path, saved)
