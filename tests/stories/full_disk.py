"""Every call on a full disk. Mounts over its home, so it runs in a mount namespace of its own.

Arguments: a directory to mount on, a base, and the kind of file system (`tmpfs`, `ext4`).
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from tests.victims import start_afresh, wait_clean

from worldfork import CommandExitReason, Sandbox, world
from worldfork.core.errors import OutOfSpace, PathError, WorldforkError
from worldfork.lineage import place as places

SIZE_MIB = 64


def mount(place: Path, kind: str) -> Path:
    """Mount a small disk and return a home on it."""
    if kind == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "none", place], check=True)
    else:
        image = place.with_suffix(".img")
        with open(image, "wb") as file:
            file.truncate(SIZE_MIB << 20)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, place], check=True)
    home = place / "home"
    os.environ.update(WORLDFORK_HOME=str(home), WORLDFORK_RESERVE_BYTES="0")
    return home


def fill(place: Path) -> None:
    """Take every byte that is free, in a file outside of the home."""
    with open(place / "filler", "ab", buffering=0) as filler:
        for size in (1 << 20, 4096, 1):
            with pytest.raises(OSError, match="No space left"):
                _write_for_ever(filler, b"x" * size)


def _write_for_ever(file: BinaryIO, data: bytes) -> None:
    while True:
        file.write(data)


def try_to(call: Callable[[], object]) -> Exception | None:
    """Call; return the error, which must be one of a full disk. A little may still fit into what is there already."""
    try:
        call()
    except (OutOfSpace, PathError) as error:
        return error
    return None


def expect_out_of_space(error: Exception | None) -> None:
    if isinstance(error, PathError):
        assert error.errno == errno.ENOSPC, error
    else:
        assert isinstance(error, OutOfSpace), error
        assert error.remedy, error
        assert error.scope == "host", error


def expect_clean(home: Path, living: list[str] | None = None) -> None:
    left = wait_clean(home, living=living or [])
    assert left == [], left


def commands_and_files(place: Path, sandbox: Sandbox) -> None:
    """A full disk inside is the command's own failure, or a file's; the sandbox answers."""
    result = sandbox.run("dd", ["if=/dev/zero", "of=/big", "bs=1M"])
    assert result.reason is CommandExitReason.EXITED, result
    assert result.exit_code != 0, result
    assert "No space left" in result.stderr, result
    fill(place)
    error = try_to(lambda: sandbox.write_file("/more", b"x" * (1 << 20)))
    assert isinstance(error, PathError), error
    expect_out_of_space(error)
    assert sandbox.run("true").ok
    assert sandbox.read_file("/f") == b"first"


def checkpoints(home: Path, idle: Sandbox, busy: Sandbox) -> None:
    """A snapshot is there and whole, or there is none; either way the sandbox is as before."""
    for sandbox in (idle, busy):
        before = {one.snapshot_id for one in Sandbox.list_all_snapshots()}
        error = try_to(sandbox.checkpoint)
        if error is not None:
            expect_out_of_space(error)
        after = {one.snapshot_id for one in Sandbox.list_all_snapshots()}
        assert len(after - before) == (error is None)
        assert sandbox.run("true").ok
        assert sandbox.read_file("/f") == b"first"
    expect_out_of_space(try_to(busy.checkpoint))
    assert busy.list_processes()[0].status == "running"
    expect_clean(home, [idle.sandbox_id, busy.sandbox_id])


def starts(home: Path, base: str, keep: str, living: list[str]) -> None:
    """Nothing is left of a sandbox that could not be started; a fork's children have an error each."""

    def create() -> None:
        with Sandbox.create(base=base, network="none") as sandbox:
            sandbox.write_file("/f", b"x" * 4096)

    def fork() -> None:
        results = Sandbox.fork_snapshot(keep, 4)
        for sandbox in results.sandboxes:
            assert sandbox.read_file("/f") == b"first"
            sandbox.terminate()
        for error in results.errors:
            raise error

    for _ in range(3):
        for call in (create, fork, lambda: world("key", lambda sandbox: None, base=base, network="none")):
            error = try_to(call)
            if error is not None:
                expect_out_of_space(error)
            expect_clean(home, living)


def main() -> None:
    place, base, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    home = mount(place, kind)
    idle = Sandbox.create(base=base, network="none")
    idle.write_file("/f", b"first")
    keep = idle.checkpoint(wait_until="completed").snapshot_id
    idle.write_file("/g", b"second")
    busy = Sandbox.create(snapshot_id=keep)
    busy.write_file("/eight", b"x" * (8 << 20))
    busy.checkpoint()
    busy.write_file("/eight", b"y" * (8 << 20))
    busy.start_process("sleep", ["1000"])
    living = [idle.sandbox_id, busy.sandbox_id]
    victim = Sandbox.create(snapshot_id=keep)
    commands_and_files(place, victim)
    victim.terminate()
    fill(place)
    checkpoints(home, idle, busy)
    fill(place)
    starts(home, base, keep, living)
    fill(place)
    start_afresh()
    fill(place)
    for sandbox in (idle, busy):
        assert sandbox.read_file("/f") == b"first"
        sandbox.terminate()
        fill(place)
    expect_clean(home)
    # Deletion works on a full disk, and gives its room back.
    fill(place)
    for snapshot in Sandbox.list_all_snapshots():
        if snapshot.snapshot_id != keep and snapshot.sandbox_id is not None:
            Sandbox.delete_snapshot(snapshot.snapshot_id)
    places.place().sweep()
    expect_clean(home)
    # Less what the store puts by for the next time.
    status = os.statvfs(place)
    assert status.f_bavail * status.f_frsize > 4 << 20, status
    with Sandbox.create(snapshot_id=keep) as sandbox:
        assert sandbox.read_file("/f") == b"first"
    os.unlink(place / "filler")
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"again")
        assert sandbox.checkpoint().snapshot_id
    places.close_places()
    expect_clean(home)


if __name__ == "__main__":
    try:
        main()
    except WorldforkError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
