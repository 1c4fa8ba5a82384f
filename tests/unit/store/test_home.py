"""Homes: what is made, what is tried, and what is said when a place will not do."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from worldfork.core.errors import StoreError
from worldfork.core.settings import Settings
from worldfork.store import home as homes
from worldfork.store.home import open_home, why_unfit

SOURCE = str(Path(homes.__file__).parents[2])


def test_makes_all_directories_for_their_owner_alone(tmp_path: Path) -> None:
    home = open_home(Settings(home=tmp_path / "a" / "home"))
    assert home.scratch == home.root
    for directory in (home.images, home.memory, home.layers, home.run, home.trash, home.locks, home.tmp):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not [path for path in home.root.iterdir() if path.name.startswith(".")], "the probe is gone"
    assert open_home(Settings(home=tmp_path / "a" / "home")) == home


def test_below_a_directory_that_gives_its_group_on(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    if os.geteuid() == 0:
        os.chown(shared, 0, 4242)
    shared.chmod(0o2755)
    home = open_home(Settings(home=shared / "home"))
    for directory in (home.images, home.memory, home.layers, home.run, home.trash, home.locks, home.tmp):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert directory.stat().st_gid == os.getegid()


def test_paths_have_no_links_in_them(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    assert open_home(Settings(home=tmp_path / "link" / "home")).root == (tmp_path / "real" / "home").resolve()


def test_a_given_scratch_is_used(tmp_path: Path) -> None:
    home = open_home(Settings(home=tmp_path / "home", scratch=tmp_path / "scratch"))
    assert home.layers == tmp_path / "scratch" / "layers"
    assert home.database.parent == tmp_path / "scratch"
    assert home.memory == tmp_path / "home" / "memory"


def test_a_home_that_cannot_be_made_names_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError) as caught:
        open_home(Settings(home=tmp_path / "file" / "home"))
    assert "WORLDFORK_HOME" in caught.value.remedy


def refuse_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(homes.fcntl, "lockf", lockf)


def test_without_record_locks_scratch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_locks(monkeypatch)
    with pytest.raises(StoreError) as caught:
        open_home(Settings(home=tmp_path / "home", scratch=tmp_path / "scratch"))
    assert "WORLDFORK_SCRATCH" in caught.value.remedy
    assert "record locks" in caught.value.message


def test_without_a_fit_home_scratch_goes_to_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    root = tmp_path / "home"
    monkeypatch.setattr(homes, "why_unfit", lambda path: "it lies on NFS" if path == root else "")
    with pytest.warns(UserWarning, match="WORLDFORK_SCRATCH"):
        home = open_home(Settings(home=root))
    assert home.scratch.is_relative_to(tmp_path / "shm" / f"worldfork-{os.geteuid()}")
    with pytest.warns(UserWarning, match="NFS"):
        assert open_home(Settings(home=root)) == home


def test_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    refuse_locks(monkeypatch)
    with pytest.raises(StoreError) as caught:
        open_home(Settings(home=tmp_path / "home"))
    assert "WORLDFORK_SCRATCH" in caught.value.remedy


def test_a_strangers_directory_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "_SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "shm" / f"worldfork-{os.geteuid()}").symlink_to(tmp_path / "mine")
    monkeypatch.setattr(homes, "why_unfit", lambda path: "" if "shm" in str(path) else "it lies on NFS")
    with pytest.raises(StoreError) as caught:
        open_home(Settings(home=tmp_path / "home"))
    assert "WORLDFORK_SCRATCH" in caught.value.remedy
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.parametrize("magic", [0x794C7630, 0x6969, 0x65735546])
def test_known_unfit_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: int) -> None:
    monkeypatch.setattr(homes, "file_system_magic", lambda _: magic)
    assert why_unfit(tmp_path)


OVERLAY = """
import subprocess, sys
from pathlib import Path
from worldfork.store.home import why_unfit
place = Path(sys.argv[1])
for name in ("tmpfs", "lower", "merged"):
    (place / name).mkdir()
subprocess.run(["mount", "-t", "tmpfs", "none", str(place / "tmpfs")], check=True)
(place / "tmpfs" / "upper").mkdir()
(place / "tmpfs" / "work").mkdir()
options = f"lowerdir={place}/lower,upperdir={place}/tmpfs/upper,workdir={place}/tmpfs/work"
subprocess.run(["mount", "-t", "overlay", "none", "-o", options, str(place / "merged")], check=True)
assert "overlay" in why_unfit(place / "merged"), why_unfit(place / "merged")
assert why_unfit(place / "tmpfs") == "", why_unfit(place / "tmpfs")
subprocess.run(["mount", "-t", "proc", "none", str(place / "lower")], check=True)
subprocess.run(["mount", "-t", "ramfs", "none", str(place / "lower")], check=True)
assert "attributes" in why_unfit(place / "lower"), why_unfit(place / "lower")
"""


@pytest.mark.root
def test_real_mounts(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "-m", "--propagation", "private", sys.executable, "-c", OVERLAY, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_path_that_overlays_do_not_take_is_refused_at_once(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120) / ("y" * 120)
    with pytest.raises(StoreError, match="bytes") as caught:
        open_home(Settings(home=tmp_path / "home", scratch=long))
    assert "WORLDFORK_SCRATCH" in caught.value.remedy
