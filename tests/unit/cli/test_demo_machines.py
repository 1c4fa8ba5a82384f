from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worldfork.cli import demo_machines
from worldfork.cli.demo_machines import PREPARE, SESSION, Kind, Session, choose_machines, kind_rows, restore
from worldfork.cli.demo_world import FIRST_CONFIG, WorldFacts
from worldfork.core.errors import ConfigError
from worldfork.lineage.snapshots import ForkResult, ForkResults, SnapshotInfo
from worldfork.records.snapshot import CheckpointType, SnapshotStatus


def snapshot(kind: str = "memory", **more: Any) -> SnapshotInfo:
    return SnapshotInfo("sn-1", "sb-1", SnapshotStatus.COMPLETED, CheckpointType(kind), 0.0, "dir:/r", None, 1, **more)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setenv("WORLDFORK_HOME", str(tmp_path))
    for name in ("WORLDFORK_DRIVER", "WORLDFORK_BASE"):
        monkeypatch.setenv(name, "")
    return monkeypatch


def test_the_base_is_the_one_that_was_named(settings: pytest.MonkeyPatch) -> None:
    settings.setenv("WORLDFORK_BASE", "dir:/set")
    assert choose_machines(None) == "dir:/set"
    assert choose_machines("dir:/named") == "dir:/named"


@pytest.mark.parametrize("base", [None, "host"])
def test_without_a_root_for_machines_the_remedy_is_named(settings: pytest.MonkeyPatch, base: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_machines(base)
    assert "image build" in caught.value.remedy


def test_the_table_has_the_article_beside_it() -> None:
    disk = Kind(snapshot("filesystem", size_bytes=3 << 20, pause_s=0.2), 0.4, [0.3, 0.1, 0.2], [])
    memory = Kind(snapshot(), 0.6, [0.05], [])
    assert kind_rows(disk, memory) == [
        ("filesystem", "400.0 ms", "200.0 ms", "3.0 MiB", "200.0 ms", "1.9 s"),
        ("memory", "600.0 ms", "-", "-", "50.0 ms", "0.9 s"),
    ]


def test_the_session_holds_its_token_and_counts(tmp_path: Path) -> None:
    (tmp_path / "embeddings.npy").write_bytes(b"held")
    program = SESSION.replace("/workspace", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], input="?\n?\n", capture_output=True, text=True, check=True)
    ready, first, second = (line.split() for line in done.stdout.splitlines())
    assert ready == ["ready"]
    assert (first[0], second[0]) == ("1", "2")
    assert first[1:] == second[1:]
    assert len(first) == 3


def test_a_root_without_python_is_told_apart(tmp_path: Path) -> None:
    done = subprocess.run(["/bin/sh", "-c", PREPARE], env={"PATH": str(tmp_path)}, capture_output=True, check=False)
    assert done.returncode == 3


class Restored:
    """A sandbox whose live process has said what `said` is."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    def run(self, *_: object, **__: object) -> None:
        pass

    def write_stdin(self, *_: object) -> None:
        pass

    def follow_stdout(self, _: int) -> Any:
        class Event:
            def __init__(self, line: str) -> None:
                self.line = line

        return iter([Event(line) for line in self.said])

    def __enter__(self) -> Restored:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("last", "same"), [("2 token digest", True), ("1 token digest", False), ("2 another digest", False)]
)
def test_a_live_process_that_is_another_is_seen(monkeypatch: pytest.MonkeyPatch, last: str, same: bool) -> None:
    sandbox: Any = Restored(["ready", "1 token digest", last])
    state = {
        "packages": {"pytest": "9"},
        "data": "aa",
        "embeddings": {"shape": [1000, 128], "digest": "bb"},
        "checkpoint": {"a": "1", "b": "2", "c": "3"},
        "config": {**FIRST_CONFIG, "learning_rate": 1},
    }
    monkeypatch.setattr(demo_machines, "read_state", lambda *_: state)
    monkeypatch.setattr(SnapshotInfo, "fork", lambda self, n: ForkResults([ForkResult(0, sandbox, None)]))
    session = Session(7, ("1", "token", "digest"))
    kind = restore(snapshot(), 0.1, WorldFacts(("pytest",), False, state), session, 3)
    assert len(kind.restores_s) == 3
    assert [(one.name, one.ok) for one in kind.survived][5:] == [("live process", same)]
    assert all(one.ok for one in kind.survived[:5])
