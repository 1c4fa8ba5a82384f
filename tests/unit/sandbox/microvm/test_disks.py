"""What the disks of a machine are made of."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from worldfork.core.errors import ConfigError, DriverUnavailable, NotFound
from worldfork.records.sandbox import Base, Limits, SandboxFacts
from worldfork.sandbox.driver import Ground, ShownTree, StartPlan
from worldfork.sandbox.microvm import blank, disks
from worldfork.sandbox.microvm.disks import DISK_BYTES, bound_paths, fresh_disks, short_names, shown_paths, tree_mark
from worldfork.sandbox.microvm.host import plug
from worldfork.sandbox.microvm.keep import DISKS_FD
from worldfork.sandbox.microvm.manifest import DiskFile


@pytest.fixture
def plan(tmp_path: Path) -> StartPlan:
    for name in ("top", "ground", "base/bin", "run"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "name").write_text(name)
    facts = SandboxFacts(
        sandbox_id="sb-x", name="x", run=str(tmp_path / "run"), form="trusted", driver="microvm",
        base=Base(kind="dir", path=str(tmp_path / "base")), snapshot_id=None, layers=("ly-1", "ly-0"), limits=Limits(),
    )  # fmt: skip
    layers = (str(tmp_path / "top"), str(tmp_path / "ground"), str(tmp_path / "base"))
    return StartPlan(
        facts=facts, ground=Ground(layers, "u", "w"), lock="lock", hostname="h", layer_ids=("ly-1", "ly-0")
    )


def test_layers_have_short_names_and_ids_of_their_own(plan: StartPlan, tmp_path: Path) -> None:
    assert short_names(plan) == {"0": ("ly-1", tmp_path / "top"), "1": ("ly-0", tmp_path / "ground")}


def test_places_to_mount_on_are_alike_for_many_sandboxes(plan: StartPlan, tmp_path: Path) -> None:
    marks = set()
    for number in range(2):
        (tmp_path / f"points{number}" / "data").mkdir(parents=True)
        layers = (*plan.ground.layers, str(tmp_path / f"points{number}"))
        names = short_names(replace(plan, ground=replace(plan.ground, layers=layers)))
        assert names["p"][1] == tmp_path / f"points{number}"
        marks.add(names["p"][0])
    (tmp_path / "points1" / "more").touch()
    marks.add(short_names(replace(plan, ground=replace(plan.ground, layers=layers)))["p"][0])
    assert len(marks) == 2


def test_what_is_shown_and_what_comes_with_the_network(plan: StartPlan, tmp_path: Path) -> None:
    shown = (ShownTree("/data", str(tmp_path / "top")), ShownTree("/t", "/in", ("/layers/a/fs", "/layers/b/fs")))
    (tmp_path / "cert").write_text("certificate")
    binds = ((str(tmp_path / "top"), "/one"), (str(tmp_path / "cert"), "/two"))
    names = short_names(replace(plan, shown=shown, binds=binds))
    assert set(names) == {"0", "1", "m0", "m1x0", "m1x1", "h", "h0"}
    assert (names["h"][1] / "0").read_text() == "certificate"
    assert shown_paths(shown[1], 1) == ("/layers/m1x0", "/layers/m1x1")
    assert list(bound_paths(replace(plan, binds=binds))) == [("/layers/h0", "/one"), ("/layers/h/0", "/two")]


def _append(path: Path) -> None:
    with path.open("a") as file:
        file.write("!")


@pytest.mark.parametrize(
    "change",
    [
        lambda top: _append(top / "sub/file"),
        lambda top: (top / "sub/file").chmod(0o600),
        lambda top: (top / "sub/file").rename(top / "sub/other"),
        lambda top: (top / "sub/new").touch(),
        lambda top: os.utime(top / "sub/file", ns=(1, 1)),
        lambda top: (top / "sub").chmod(0o700),
    ],
)
def test_any_change_of_a_tree_changes_its_mark(tmp_path: Path, change: Callable[[Path], object]) -> None:
    (tmp_path / "top/sub").mkdir(parents=True)
    (tmp_path / "top/sub/file").write_text("x")
    before = tree_mark(tmp_path / "top")
    assert tree_mark(tmp_path / "top") == before
    change(tmp_path / "top")
    assert tree_mark(tmp_path / "top") != before


def test_a_tree_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        tree_mark(tmp_path / "gone")


@pytest.mark.parametrize("disk_mb", [0, 7, (DISK_BYTES >> 20) + 1])
def test_a_disk_of_an_impossible_size(tmp_path: Path, disk_mb: int) -> None:
    with pytest.raises(ConfigError):
        blank.scratch_image(tmp_path, disk_mb)


def test_no_program_that_makes_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(DriverUnavailable) as caught:
        blank.scratch_image(tmp_path, 16)
    assert "e2fsprogs" in caught.value.remedy
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.skipif(
    shutil.which("mke2fs", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin") is None,
    reason="no mke2fs here",
)
def test_fresh_disks_are_made_once(plan: StartPlan, tmp_path: Path) -> None:
    first = fresh_disks(tmp_path / "images", plan)
    for path in (tmp_path / "images" / disks.TREES).iterdir():
        os.utime(path, (1, 1))
    assert fresh_disks(tmp_path / "images", plan) == first
    assert all(path.stat().st_mtime > 1 for path in (tmp_path / "images" / disks.TREES).iterdir()), "asked for again"
    base, layers, (empty,) = first
    assert [Path(file.path).suffix for file in (*base, *layers, empty)] == [".erofs", ".erofs", ".ext4"]
    disks.write_top(tmp_path / "run")
    top = disks.with_top(tmp_path / "run", first)[-1][0]
    assert (top.path, top.format) == (str(tmp_path / "run" / disks.SCRATCH_TOP), "qcow2")
    assert Path(top.path).stat().st_blocks * 512 < 64 << 10
    said = subprocess.run(["file", "-b", empty.path], capture_output=True, text=True, check=False).stdout
    assert not said or "ext2" in said or "ext4" in said
    assert os.stat(empty.path).st_size == 64 << 30
    assert os.stat(empty.path).st_blocks * 512 < 4 << 20


def test_smaller_disks_are_shown_below_an_empty_one(tmp_path: Path) -> None:
    chains = ((DiskFile("/base"),), (), (DiskFile("/top", "qcow2"), DiskFile("/below")))
    found, numbers = plug(chains, {"/base": 101, "/top": 102, "/below": 103})
    base, layers, scratch = found
    assert base.backing is not None
    assert layers.backing is None
    assert scratch.backing is not None
    assert [disk.read_only for disk in (base, base.backing, layers, scratch, scratch.backing)] == [True] * 3 + [
        False,
        True,
    ]
    assert [disk.format for disk in (base, base.backing, layers, scratch)] == ["qcow2", "raw", "qcow2", "qcow2"]
    assert sorted(numbers) == list(range(DISKS_FD, DISKS_FD + 5))
    assert numbers[base.backing.fd] == 101
    assert numbers[base.fd] == numbers[layers.fd] == blank.empty_disk()
    assert (numbers[scratch.fd], numbers[scratch.backing.fd]) == (102, 103)


def test_every_file_is_opened_once_and_only_one_for_writing(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    a, b, c = (DiskFile(str(tmp_path / name)) for name in ("a", "b", "c"))
    opened = disks.open_chains(((a,), (b,), (c, b)))
    try:
        assert set(opened) == {a.path, b.path, c.path}
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(opened[b.path], b"x")
        os.write(opened[c.path], b"x")
    finally:
        for fd in opened.values():
            os.close(fd)
    (tmp_path / "b").unlink()
    with pytest.raises(NotFound) as caught:
        disks.open_chains(((a,), (b,), (c,)))
    assert caught.value.remedy
