"""What every test gets: a home of its own, and a look for what it left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests import leaks

from worldfork.lineage import place

TESTS = Path(__file__).resolve().parent
SANDBOX_ROOMS = ("conformance", "faults", "e2e", "property", "redteam")
"""Tests that start sandboxes: each ends with a leak check."""
LONG_ROOMS = ("faults", "e2e", "property", "redteam")
"""Tests of the second stage of scripts/test."""
# How long an example takes is the machine's doing.
settings.register_profile("worldfork", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("worldfork")
UNFIT = ("tmpfs", "ramfs", "overlay", "nfs", "nfs4", "fuse")
"""File systems that cannot carry what a home carries, or are not a disk."""


def _room(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests into stages, and skip those that need another user."""
    is_root = os.geteuid() == 0
    for item in items:
        if _room(item.path) in LONG_ROOMS:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("root") and not is_root:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        if item.get_closest_marker("user") and is_root:
            item.add_marker(pytest.mark.skip(reason="needs an ordinary user"))


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        if left.split(" ")[2] == wanted:
            return right.split(" ", 1)[0]
    return "unknown"


def _disk_directory() -> Path:
    """Return a directory on a disk to make homes in; the first candidate if the machine has none."""
    candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), TESTS.parent]
    usable = [path for path in candidates if os.access(path, os.W_OK)] or candidates[:1]
    return next((path for path in usable if _file_system(path) not in UNFIT), usable[0])


def _remove(directory: Path) -> None:
    # Never across a mount: a leak must not turn into the removal of what was mounted.
    device = directory.stat().st_dev
    for parent, names, _ in os.walk(directory):
        for name in list(names):
            below = Path(parent, name)
            if below.is_symlink():
                continue
            if below.stat().st_dev != device:
                raise AssertionError(f"something is still mounted at {below}")
            # overlayfs leaves work directories of mode 000.
            below.chmod(0o700)
    shutil.rmtree(directory)


@pytest.fixture(scope="session", autouse=True)
def home() -> Iterator[Path]:
    """A WORLDFORK_HOME on a disk for the whole run, so that what is made once per home is made once."""
    directory = Path(tempfile.mkdtemp(prefix="worldfork-home-", dir=_disk_directory()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLDFORK_HOME", str(directory))
        patch.delenv("WORLDFORK_SCRATCH", raising=False)
        # A process that begins by itself after a while is not what a test of something else should meet.
        patch.setenv("WORLDFORK_UPKEEP", "off")
        yield directory
    # What still clears up in threads of its own would meet the removal half-way, and make anew what is gone.
    place.close_places()
    _remove(directory)


@pytest.fixture
def fresh_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty WORLDFORK_HOME for this test alone; nothing may be left in its run and trash."""
    directory = Path(tempfile.mkdtemp(prefix="worldfork-home-", dir=_disk_directory()))
    monkeypatch.setenv("WORLDFORK_HOME", str(directory))
    before = leaks.look(directory)
    yield directory
    _fail_on(leaks.wait_until_clean(before, directory))
    for one in list(place._places.values()):
        if one.home.root == directory.resolve():
            place.close_place(one)
    _remove(directory)


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest, home: Path) -> Iterator[None]:
    """Fail a sandbox test that leaves anything: in the rooms of `SANDBOX_ROOMS`, or marked `sandbox`."""
    marked = request.node.get_closest_marker("sandbox") is not None
    if not marked and _room(request.path) not in SANDBOX_ROOMS:
        yield
        return
    before = leaks.look(home)
    yield
    _fail_on(leaks.wait_until_clean(before, home))


def _fail_on(left: list[str]) -> None:
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)
