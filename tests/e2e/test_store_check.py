"""`worldfork store check`, as a shell runs it, on snapshots of real sandboxes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.full_layers import flip_a_bit, keeping_times
from tests.roots import make_small_root

# A verb takes a second or two, and much more beside other tests.
pytestmark = pytest.mark.timeout(240)

PROGRAM = str(Path(sys.executable).with_name("worldfork"))
LIMIT_S = 120


def worldfork(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == code, (done.stdout, done.stderr.decode())
    return done.stdout.decode()


def facts(*arguments: str, code: int = 0) -> Any:
    return json.loads(worldfork(*arguments, "--json", code=code))


class World:
    """A home with one snapshot of a sandbox that wrote a few files."""

    def __init__(self, home: Path, base: Path) -> None:
        sandbox = worldfork("create", "--network", "none", "--base", f"dir:{base}").strip()
        script = "echo precious > kept; mkdir dir; echo a long one > dir/long; : > \"$(printf 'odd-\\377')\""
        worldfork("exec", sandbox, "--", "sh", "-c", script)
        self.snapshot_id = worldfork("checkpoint", "--durable", sandbox).strip()
        worldfork("rm", sandbox)
        assert facts("store", "upkeep")["failures"] == []
        self.layer_id = facts("show", self.snapshot_id)["layers"][0]["layer_id"]
        self.root = home / "layers" / self.layer_id / "fs"

    def read(self) -> str:
        sandbox = worldfork("create", "--snapshot", self.snapshot_id).strip()
        try:
            return worldfork("exec", sandbox, "--", "cat", "kept")
        finally:
            worldfork("rm", sandbox)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_root(tmp_path_factory.mktemp("root") / "small")


@pytest.fixture
def world(fresh_home: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("WORLDFORK_UPKEEP", "off")
    return World(fresh_home, base)


def test_a_sound_store(world: World) -> None:
    for more in ([], ["--read-data"]):
        report = facts("store", "check", *more)
        assert (report["sound"], report["findings"], report["repair"]) == (True, [], None)
        assert report["unsealed"] == 0
        assert report["sealed"] == report["layers"] >= 1
        assert report["entries"] > 4
        assert (report["read_bytes"] > 0) == bool(more)
    text = worldfork("store", "check")
    assert text.endswith("The store is sound.\n")
    assert "not read; --read-data does" in text


@pytest.mark.parametrize("kind", ["directory", "archive"])
def test_damage_is_told_and_repaired_from_a_copy(world: World, tmp_path: Path, kind: str) -> None:
    source = str(tmp_path / "copy")
    worldfork("push" if kind == "directory" else "export", world.snapshot_id, source)
    kept = next(world.root.rglob("kept"))
    path = f"/{kept.relative_to(world.root)}"
    keeping_times(world.root, lambda _: flip_a_bit(kept))
    assert facts("store", "check")["sound"]
    report = facts("store", "check", "--read-data", code=12)
    [finding] = report["findings"]
    assert (finding["kind"], finding["layer_id"], finding["path"]) == ("layer", world.layer_id, path)
    assert finding["expected"].startswith("content ")
    text = worldfork("store", "check", "--read-data", code=12)
    assert f"layer {world.layer_id}: {path}: expected content " in text
    assert "The store is damaged: 1 finding in 1." in text
    report = facts("store", "check", "--read-data", "--repair", source)
    assert (report["sound"], report["findings"]) == (True, [])
    [repaired] = report["repair"]["repaired"]
    assert (repaired["layer_id"], repaired["how"], repaired["snapshots"]) == (world.layer_id, "replaced", 1)
    assert report["repair"]["before"]["findings"] == [finding]
    assert world.read() == "precious\n"
    assert facts("sweep")["failures"] == []
    assert facts("store", "check", "--read-data")["sound"]


def test_what_has_no_copy_stays_and_nothing_is_written(world: World, tmp_path: Path) -> None:
    worldfork("push", world.snapshot_id, str(tmp_path / "remote"))
    shutil.rmtree(tmp_path / "remote")
    (tmp_path / "remote").mkdir()
    os.truncate(next(world.root.rglob("long")), 0)
    before = sorted(os.listdir(world.root.parent.parent))
    text = worldfork("store", "check", "--repair", str(tmp_path / "remote"), code=12)
    assert f"layer {world.layer_id}: stays damaged: " in text
    assert "After the repair: The store is damaged" in text
    assert sorted(os.listdir(world.root.parent.parent)) == before


def test_a_missing_layer_is_put_in_place(world: World, tmp_path: Path) -> None:
    worldfork("push", world.snapshot_id, str(tmp_path / "remote"))
    shutil.rmtree(world.root.parent)
    text = worldfork("store", "check", code=12)
    assert f"layer {world.layer_id}: fs: expected a directory, found nothing" in text
    text = worldfork("store", "check", "--repair", str(tmp_path / "remote"))
    assert f"layer {world.layer_id}: put in place\n" in text
    assert world.read() == "precious\n"


def test_names_that_are_not_utf8(world: World) -> None:
    odd = next(path for path in world.root.rglob("odd-*"))
    os.truncate(odd, 3)
    text = worldfork("store", "check", code=12)
    assert "odd-\\udcff: expected 0 bytes" in text
    report = facts("store", "check", code=12)
    assert report["findings"][0]["path"].endswith("odd-\udcff")


def test_a_database_that_is_none(fresh_home: Path) -> None:
    worldfork("store", "check")
    (fresh_home / "db.sqlite").write_bytes(b"no database" * 1000)
    for suffix in ("-wal", "-shm"):
        (fresh_home / f"db.sqlite{suffix}").unlink(missing_ok=True)
    worldfork("store", "check", code=12)


def test_a_source_that_is_none(world: World, tmp_path: Path) -> None:
    os.truncate(next(world.root.rglob("long")), 0)
    text = worldfork("store", "check", "--repair", str(tmp_path / "nowhere"), code=12)
    assert "stays damaged" in text
    assert not (tmp_path / "nowhere").exists()
