"""A disk that fills up under sandboxes, snapshots and forks.

Items 38, 40, 41 and 42 of the list of what users of such systems hit (`docs/peers-items.md`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.stores import exit_code_of, start_child
from tests.victims import wait_clean

from worldfork import Sandbox
from worldfork.core.errors import OutOfSpace
from worldfork.lineage import place as places

PRIVATE = ("unshare", "-m", "--propagation", "private")


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    places.close_places()


def tell(story: str, *arguments: object) -> None:
    """Run a program of tests/stories in a mount namespace of its own; it must come through."""
    command = [*PRIVATE, sys.executable, "-m", f"tests.stories.{story}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_item_41_every_call_on_a_full_disk(tmp_path: Path, base: str, kind: str) -> None:
    """Items 38 and 41: a typed error, nothing half there, others live, deletion works and gives room back."""
    disk = tmp_path / "disk"
    disk.mkdir()
    tell("full_disk", disk, base, kind)


@pytest.mark.root
def test_item_40_clearing_up_stops_at_a_mount(tmp_path: Path, base: str) -> None:
    """Item 40: what is mounted below a sandbox's directory, or linked from it, is not removed with it."""
    tell("mounted_over", tmp_path, base)


def test_item_38_the_disk_is_as_before_after_many_sandboxes(own_home: Path, base: str) -> None:
    """Item 38: a hundred sandboxes that wrote a MiB each, and their snapshots, leave nothing."""
    with Sandbox.create(base=base, network="none") as source:
        snapshot = source.checkpoint()
    before = _bytes_below(own_home)
    for _ in range(4):
        for child in snapshot.fork(25).unwrap():
            child.write_file("/file", os.urandom(1 << 20))
            taken = child.checkpoint()
            child.terminate()
            Sandbox.delete_snapshot(taken.snapshot_id)
    assert wait_clean(own_home) == []
    assert _bytes_below(own_home) < before + (1 << 20)


def _bytes_below(home: Path) -> int:
    total = 0
    for parent, _, names in os.walk(home):
        for name in names:
            # The log of the metadata grows to a fixed length before it is used again.
            if not name.startswith("db.sqlite"):
                with contextlib.suppress(FileNotFoundError):  # on its way out
                    total += os.lstat(Path(parent, name)).st_blocks * 512
    return total


def test_item_38_the_disk_limit_holds_after_a_checkpoint_of_another_process(own_home: Path, base: str) -> None:
    """Item 38, quota: the owner measures what the sandbox writes to now, whoever gave it a new upper."""
    with Sandbox.create(base=base, network="none", disk_mb=16) as sandbox:
        sandbox.write_file("/f", b"first")

        def checkpoint() -> None:
            Sandbox.connect(sandbox.sandbox_id).checkpoint()
            places.close_places()

        assert exit_code_of(start_child(checkpoint)) == 0
        with pytest.raises(OutOfSpace) as full:
            sandbox.sh("for i in $(seq 40); do dd if=/dev/zero of=/f$i bs=1M count=1 2>/dev/null; done; sleep 60")
        assert full.value.scope == "sandbox"


def test_item_42_twenty_snapshots_at_once(own_home: Path, base: str) -> None:
    """Item 42: twenty sandboxes of 4 MiB each are frozen at the same time; all snapshots are whole, all go on."""
    sandboxes = [Sandbox.create(base=base, network="none", memory_mb=64) for _ in range(20)]
    with ThreadPoolExecutor(20) as pool:
        for number, sandbox in enumerate(sandboxes):
            sandbox.write_file("/file", bytes([number]) * (4 << 20))
            if number % 2:
                sandbox.start_process("sleep", ["1000"])
        taken = list(pool.map(lambda sandbox: sandbox.checkpoint(wait_until="completed"), sandboxes))
        assert all(result.ok for result in pool.map(lambda sandbox: sandbox.run("true"), sandboxes))
        list(pool.map(lambda sandbox: sandbox.terminate(), sandboxes))
    for number, snapshot in enumerate(taken):
        with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
            assert restored.read_file("/file") == bytes([number]) * (4 << 20)
