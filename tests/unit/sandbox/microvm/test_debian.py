"""A Debian root is made once for the packages that there are, whole or not at all. Apt and the packages are played."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.unit.sandbox.microvm.apts import OFFERED, PlayedApt

from worldfork.core.clock import ManualClock
from worldfork.core.errors import ConfigError, Corrupt, DriverUnavailable, NotFound, OutOfSpace
from worldfork.sandbox.microvm import debian, packages
from worldfork.sandbox.microvm.debian import (
    debian_root,
    find_debian_root,
    list_roots,
    plan_debian,
    read_root,
    remove_root,
)

BUILD = """
set -eu
mkdir -p "$1/etc/apt" "$1/usr/bin"
ls "$2" | grep deb$ >"$1/files"
cp "$3" "$1/first"
readlink /proc/self/ns/net >"$1/net"
mount -t tmpfs tmpfs "$1/usr"
touch "$1/usr/hidden"
"""

pytestmark = pytest.mark.root


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return tmp_path / "images"


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedApt:
    monkeypatch.setattr(debian, "BUILD", BUILD)
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "a_Packages").touch()
    with_apt = packages.with_apt
    monkeypatch.setattr(debian, "with_apt", lambda place, action: with_apt(place, action, lists))
    played = PlayedApt(tmp_path, monkeypatch)
    played.program("dpkg-deb", "")
    return played


def parts(images: Path) -> list[str]:
    return [path.name for path in (images / "roots").iterdir() if path.name.startswith(".part-")]


def test_a_root_is_made_once(apt: PlayedApt, images: Path) -> None:
    clock = ManualClock(5.0)
    root = debian_root(images, clock=clock)
    assert root.path == images / "roots" / root.id / "fs"
    assert (root.packages, root.wanted, root.made_s) == (2, (), 5.0)
    assert (root.path / "files").read_text() == "apt_2.6_amd64.deb\nbase_1%3a2.0_all.deb\n"
    assert len((root.path / "first").read_text().splitlines()) == 2
    assert (root.path / "etc/apt/sources.list").read_text() == "deb http://a.example/debian/ stable main\n"
    assert root.path.stat().st_mode & 0o777 == 0o755
    made = root.path.stat().st_ino
    assert debian_root(images, clock=clock) == root == read_root(images, root.id)
    assert (root.path.stat().st_ino, parts(images)) == (made, [])
    assert len([order for order in apt.orders() if "--download-only" in order]) == 1


def test_packages_are_configured_away_from_the_machine(apt: PlayedApt, images: Path) -> None:
    root = debian_root(images)
    assert (root.path / "net").read_text().strip() != os.readlink("/proc/self/ns/net")
    # What the build mounted was seen by it alone.
    assert list((root.path / "usr").iterdir()) == [root.path / "usr/bin"]


def test_new_packages_are_another_root(apt: PlayedApt, images: Path) -> None:
    old = debian_root(images, clock=ManualClock(1.0))
    newer = OFFERED[1].replace("2.6", "2.7")
    apt.answers(offer=f'echo "{newer}"', fetch="cd ${APT_CONFIG%/*}/cache/archives && touch apt_2.7_amd64.deb")
    new = debian_root(images, ["gcc", "g++"], clock=ManualClock(2.0))
    assert new.id != old.id
    assert list_roots(images) == [old, new]
    assert new.wanted == ("g++", "gcc")
    assert find_debian_root(images) == old.path  # it has what everybody expects of it
    remove_root(images, old.id)
    assert (find_debian_root(images), list_roots(images)) == (new.path, [new])
    assert find_debian_root(images / "none") is None


def test_several_at_once_make_one(apt: PlayedApt, images: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: debian_root(images), range(3)))
    assert len({root.id for root in made}) == 1
    assert [root.id for root in list_roots(images)] == [made[0].id]
    assert parts(images) == []


def test_a_build_that_fails_leaves_nothing(apt: PlayedApt, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "BUILD", BUILD + "echo 'dpkg: a script of x failed' >&2; exit 1")
    with pytest.raises(DriverUnavailable, match="a script of x failed"):
        debian_root(images)
    assert (list_roots(images), parts(images)) == ([], [])


def test_what_a_killed_build_left_goes_and_what_still_works_stays(apt: PlayedApt, images: Path) -> None:
    for name in (".part-dead", ".part-alive"):
        (images / "roots" / name).mkdir(parents=True)
        (images / "roots" / name / "file").touch()
    lock = os.open(images / "roots/.part-alive/lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        debian_root(images)
        assert parts(images) == [".part-alive"]
    finally:
        os.close(lock)
    debian_root(images)
    assert parts(images) == []


def test_a_build_ends_with_its_owner_killed_or_not(
    apt: PlayedApt, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = f"exec 7>{pipe}; echo begun >&7; sleep 1000 & wait"
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(debian, "BUILD", script)
        try:
            debian_root(images)
        finally:
            os._exit(1)
    with open(pipe) as reading:
        assert reading.readline() == "begun\n"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert reading.read() == ""  # the end, once nobody inside has the other end
    assert len(parts(images)) == 1
    debian_root(images)
    assert parts(images) == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"packages": "x", "wanted": [], "made_s": 0}'])
def test_a_damaged_root_is_told_and_can_be_removed(apt: PlayedApt, images: Path, text: str) -> None:
    root = debian_root(images)
    (root.path.parent / "manifest.json").write_text(text)
    with pytest.raises(Corrupt) as caught:
        debian_root(images)
    assert f"image remove {root.id}" in caught.value.remedy
    assert list_roots(images) == []
    remove_root(images, root.id)
    assert debian_root(images).id == root.id


@pytest.mark.parametrize("name", ["..", "", "0" * 16, "0123456789abcdeg"])
def test_a_root_that_is_not_there_is_told(images: Path, name: str) -> None:
    (images / "roots").mkdir(parents=True)
    for look in (read_root, remove_root):
        with pytest.raises(NotFound):
            look(images, name)


def test_a_name_that_is_none_is_told_before_anything_starts(apt: PlayedApt, images: Path) -> None:
    with pytest.raises(ConfigError):
        debian_root(images, ["--allow-unauthenticated"])
    assert not images.exists()


def test_a_plan_does_nothing_and_tells_what_is_missing(
    apt: PlayedApt, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "apt-get" in plan_debian(images)[0]
    assert (images.exists(), apt.orders()) == (False, [])
    monkeypatch.setattr(debian, "_which", lambda name: None if name == "unshare" else name)
    with pytest.raises(DriverUnavailable) as caught:
        plan_debian(images)
    assert caught.value.fields["lacks"] == "unshare"


def test_too_little_disk_is_told_beforehand(apt: PlayedApt, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, debian.DISK_BYTES - 1))
    with pytest.raises(OutOfSpace) as caught:
        plan_debian(images)
    assert caught.value.scope == "host"
