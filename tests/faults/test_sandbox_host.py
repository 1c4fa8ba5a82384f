"""Hosts that lack something: each gives a typed error that names the remedy, and leaves nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.victims import left_in, wait_clean

import worldfork
from worldfork import Sandbox
from worldfork.core.errors import ConfigError
from worldfork.lineage import place as places

TOP = Path(__file__).parents[2]
IN_USER_NAMESPACE = ("unshare", "--user", "--map-root-user")
PRIVATE = ("unshare", "-m", "--propagation", "private")


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    places.close_places()


def tell(*command: object, **settings: str) -> str:
    """Run a program of tests/stories in a process of its own; return what it printed."""
    words = [str(word) for word in command]
    environment = {**os.environ, **settings}
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=TOP, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def story(name: str, *arguments: object) -> tuple[object, ...]:
    return (sys.executable, "-m", f"tests.stories.{name}", *arguments)


def test_user_namespaces_are_forbidden(own_home: Path, base: str) -> None:
    """As Ubuntu's AppArmor and hardened kernels do it: EPERM."""
    printed = tell(*story("refused", base, "userns", "DriverUnavailable"), WORLDFORK_FORM="user")
    message, remedy = printed.splitlines()
    assert "user namespaces" in message
    assert remedy
    assert left_in(own_home) == []


def test_user_namespaces_are_used_up(own_home: Path, base: str) -> None:
    """With a limit of 0, which is a user namespace's own and touches nobody outside of it."""
    line = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
    before = Path("/proc/sys/user/max_user_namespaces").read_text()
    command = (*IN_USER_NAMESPACE, "sh", "-c", line, *story("refused", base, "none", "DriverUnavailable"))
    message, remedy = tell(*command, WORLDFORK_FORM="user", WORLDFORK_CGROUPS="off").splitlines()
    assert Path("/proc/sys/user/max_user_namespaces").read_text() == before
    assert "user namespaces" in message
    assert "max_user_namespaces" in remedy
    assert left_in(own_home) == []


@pytest.mark.parametrize("refused", ["namespaces", "mounts"])
def test_a_container_without_the_right_to_isolate(own_home: Path, base: str, refused: str) -> None:
    """As Docker's default filter does it."""
    message, remedy = tell(*story("refused", base, refused, "DriverUnavailable")).splitlines()
    assert message
    assert remedy
    assert left_in(own_home) == []


def test_storage_without_record_locks(own_home: Path, base: str) -> None:
    """As some network file systems are: nowhere to keep locks is an error that says what to set."""
    message, remedy = tell(*story("refused", base, "locks", "StoreError")).splitlines()
    assert "record locks" in message
    assert "WORLDFORK_SCRATCH" in remedy


@pytest.mark.root
def test_a_home_on_overlayfs(tmp_path: Path, base: str) -> None:
    """As a container's own root is: memory instead, with a warning, or what WORLDFORK_SCRATCH says."""
    assert "WORLDFORK_SCRATCH" in tell(*PRIVATE, *story("home_on_overlay", tmp_path, base))


def test_an_installation_without_its_c_part(own_home: Path, tmp_path: Path, base: str) -> None:
    _install_without(tmp_path, None)
    told = tell(*story("refused", base, "none", "DriverUnavailable"), PYTHONPATH=f"{tmp_path}:{TOP}")
    message, remedy = told.splitlines()
    assert "wf-init" in message
    assert "native/build.py" in remedy
    assert left_in(own_home) == []


def test_an_installation_whose_c_part_is_damaged(own_home: Path, tmp_path: Path, base: str) -> None:
    _install_without(tmp_path, b"\x7fELF, but no more of it")
    told = tell(*story("refused", base, "none", "LaunchFailed"), PYTHONPATH=f"{tmp_path}:{TOP}")
    assert "wf-init" in told
    assert left_in(own_home) == []


def _install_without(place: Path, content: bytes | None) -> None:
    shutil.copytree(Path(worldfork.__file__).parent, place / "worldfork", ignore=shutil.ignore_patterns("wf-init"))
    if content is not None:
        (place / "worldfork" / "sandbox" / "wf-init").write_bytes(content)


def test_few_descriptors(own_home: Path, base: str) -> None:
    """EMFILE at any point of a create or a checkpoint: the error names the limit, and nothing is left."""
    tell(*story("few_descriptors", base))
    assert left_in(own_home) == []


@pytest.mark.parametrize("bad", ["missing", "file", "top", "relative", "empty", "fifo", "image"])
def test_bases_that_are_none(own_home: Path, tmp_path: Path, bad: str) -> None:
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo")
    text = {"top": "dir:/", "relative": "dir:some/where", "image": "debian:12"}.get(bad, f"dir:{tmp_path}/{bad}")
    with pytest.raises(ConfigError) as caught:
        Sandbox.create(base=text)
    assert caught.value.remedy
    assert wait_clean(own_home) == []


def test_a_base_that_vanished(own_home: Path, tmp_path: Path, base: str) -> None:
    """A restore says so; put back, it works again; the snapshot is not lost."""
    here, there = tmp_path / "root", tmp_path / "elsewhere"
    shutil.copytree(base.removeprefix("dir:"), here)
    with Sandbox.create(base=f"dir:{here}", network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        snapshot = sandbox.checkpoint()
    here.rename(there)
    with pytest.raises(ConfigError, match="gone"):
        Sandbox.create(snapshot_id=snapshot.snapshot_id)
    with pytest.raises(ConfigError, match="gone"):
        snapshot.fork(2)
    assert wait_clean(own_home) == []
    there.rename(here)
    with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
        assert restored.read_file("/f") == b"first"
