"""Disks and guests that nobody uses go; what a running machine was made of stays."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.unit.sandbox.microvm.test_initrd import module

from worldfork.core.clock import ManualClock
from worldfork.sandbox.microvm import blank, guest_image, initrd, unused
from worldfork.sandbox.microvm.guest_image import GuestImage, KernelFiles
from worldfork.sandbox.microvm.manifest import MACHINE, Build, DiskFile, Running
from worldfork.sandbox.microvm.unused import Dropped, drop_unused, used_by_machines

NOW_S = 1_000_000.0
INIT = b"\x7fELF init"


class Home:
    """Images of which all are 100 seconds old."""

    def __init__(self, top: Path) -> None:
        self.images, self.runs = top / "images", top / "run"
        (self.images / "trees").mkdir(parents=True)
        (top / "modules").mkdir()
        (top / "vmlinuz").write_bytes(b"\x7fELF kernel")
        for name in initrd.WANTED:
            (top / "modules" / f"{name}.ko").write_bytes(module())
        self.kernel = guest_image.choose_kernel(self.images, KernelFiles("6.1.0", top / "vmlinuz", top / "modules"))

    def disk(self, name: str) -> Path:
        path = self.images / "trees" / name
        path.write_bytes(b"x" * 8192)
        return path

    def guest(self, init: bytes) -> GuestImage:
        return guest_image.build_image(self.images, self.kernel, init)

    def machine(self, name: str, memory: Path, *disks: Path) -> None:
        (self.runs / name).mkdir(parents=True)
        chains = tuple((DiskFile(str(path)),) for path in disks)
        build = Build("7.2.22", "tcg", "qemu max", "0", 1, 1)
        running = Running(1, 18, str(memory), 1, "none (tcg)", build, chains)
        (self.runs / name / MACHINE).write_text(json.dumps(asdict(running)))

    def drop(self, unused_s: float = 50.0, age_s: float = 100.0) -> Dropped:
        for top in (self.images / "trees", self.images / "scratch", self.images):
            for path in top.glob("*"):
                os.utime(path, (NOW_S - age_s, NOW_S - age_s))
        return drop_unused(self.images, self.runs, unused_s, ManualClock(NOW_S))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    (tmp_path / "init").write_bytes(INIT)
    monkeypatch.setattr(unused, "program_path", lambda: tmp_path / "init")
    return Home(tmp_path)


def test_disks_go_once_they_are_old(home: Home) -> None:
    disks = [home.disk("one.erofs"), home.disk("two.erofs")]
    assert home.drop(unused_s=101.0) == Dropped(0, 0, 0)
    assert home.drop() == Dropped(2, 0, 16384)
    assert not any(path.exists() for path in disks)


def test_empty_file_systems_go_too_and_their_sizes_in_use_stay(home: Home) -> None:
    used, other = (blank.scratch_image(home.images, size_mb) for size_mb in (8, 9))
    home.machine("sb-a", home.images / "none", used)
    assert home.drop().disks == 1
    assert (used.exists(), other.exists()) == (True, False)


def test_an_empty_file_system_that_is_asked_for_again_is_not_old(home: Home) -> None:
    path = blank.scratch_image(home.images, 8)
    os.utime(path, (0, 0))
    assert blank.scratch_image(home.images, 8) == path
    assert drop_unused(home.images, home.runs, 50.0) == Dropped(0, 0, 0)


def test_what_a_killed_maker_left_goes_and_what_is_being_made_stays(home: Home) -> None:
    (home.images / "scratch").mkdir()
    parts = [home.disk(".part-of-one"), home.images / "scratch" / ".part-of-another"]
    parts[1].touch()
    assert home.drop(unused_s=0.0) == Dropped(0, 0, 0)
    assert home.drop(unused_s=0.0, age_s=7200.0).disks == 2
    assert not any(path.exists() for path in parts)


def test_a_disk_that_a_snapshot_has_too_frees_nothing(home: Home, tmp_path: Path) -> None:
    os.link(home.disk("one.erofs"), tmp_path / "base.img")
    assert home.drop() == Dropped(1, 0, 0)
    assert (tmp_path / "base.img").stat().st_size == 8192


def test_what_a_machine_was_made_of_stays(home: Home) -> None:
    base, layers, other = (home.disk(name) for name in ("base.erofs", "layers.erofs", "other.erofs"))
    old = home.guest(b"\x7fELF old")
    template = old.kernel.parent / "templates/1"
    home.machine("sb-a", template, base, layers)
    (home.runs / "sb-ends").mkdir()
    assert used_by_machines(home.runs) == {template: "sb-a", base: "sb-a", layers: "sb-a"}
    assert home.drop() == Dropped(1, 0, 8192)
    assert (base.exists(), layers.exists(), other.exists()) == (True, True, False)
    (home.runs / "sb-a" / MACHINE).unlink()
    dropped = home.drop()
    assert (dropped.disks, dropped.guests) == (2, 1)


def test_the_guest_that_machines_start_with_stays(home: Home) -> None:
    current, old = home.guest(INIT), home.guest(b"\x7fELF of another version")
    assert guest_image.image_name(home.kernel, INIT) == current.id
    assert home.drop().guests == 1
    assert guest_image.list_images(home.images) == [current]
    assert not old.kernel.exists()


def test_without_a_kernel_no_guest_is_the_current_one(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_image, "_installed", lambda root: iter(()))
    home.guest(INIT)
    guest_image.remove_image(home.images, home.kernel.release)
    assert home.drop().guests == 1


def test_no_images_are_no_trouble(tmp_path: Path) -> None:
    assert drop_unused(tmp_path / "images", tmp_path / "run", 0.0) == Dropped(0, 0, 0)
