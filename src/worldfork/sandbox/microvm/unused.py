"""What was made for virtual machines and nobody uses: disks, and guests of other kernels and inits.

All of it is made again where it is wanted. What a running machine was made of stays: a checkpoint of it takes links to
that. Memory snapshots have links of their own.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import WorldforkError
from worldfork.sandbox.microvm import guest_image
from worldfork.sandbox.microvm.blank import PART, SCRATCHES
from worldfork.sandbox.microvm.disks import TREES
from worldfork.sandbox.microvm.manifest import read_running
from worldfork.sandbox.program import program_path

_MAKING_S = 3600.0
"""A file that is being made is written to more often than that."""


@dataclass(frozen=True)
class Dropped:
    """What went."""

    disks: int
    guests: int
    freed_bytes: int


def used_by_machines(runs: Path) -> dict[Path, str]:
    """Return the files and memory directories that running machines were made of: path -> the run directory's name.

    Args:
        runs: such as `home/run`.
    """
    found: dict[Path, str] = {}
    for run in runs.glob("*"):
        try:
            machine = read_running(run)
        except WorldforkError:
            continue  # no machine, or one that is ending
        paths = [machine.memory, *(file.path for chain in machine.disks for file in chain)]
        found.update((Path(path), run.name) for path in paths)
    return found


def drop_unused(images: Path, runs: Path, unused_s: float, clock: Clock | None = None) -> Dropped:
    """Remove disks and guest images that nobody has asked for of late. Blocking.

    Args:
        images: such as `home/images`.
        runs: such as `home/run`.
        unused_s: how long nobody asked for them, at the least.
        clock: for the time.
    """
    now_s = (clock or SystemClock()).now_s()
    before_s = now_s - unused_s
    used = used_by_machines(runs)
    freed_bytes = disks = guests = 0
    for path in [*(images / TREES).glob("*"), *(images / SCRATCHES).glob("*")]:
        info = _regular(path)
        oldest_s = min(before_s, now_s - _MAKING_S) if path.name.startswith(PART) else before_s
        if info is not None and info.st_mtime < oldest_s and path not in used:
            freed_bytes += info.st_blocks * 512 if info.st_nlink == 1 else 0
            path.unlink(missing_ok=True)
            disks += 1
    current = _current(images)
    for guest in guest_image.list_images(images):
        top = guest.kernel.parent
        if guest.id != current and top.stat().st_mtime < before_s and not any(top in path.parents for path in used):
            freed_bytes += allocated_bytes(top)
            guest_image.remove_image(images, guest.id)
            guests += 1
    return Dropped(disks, guests, freed_bytes)


def _current(images: Path) -> str:
    """Return the id of the guest image that machines start with; empty where there is no kernel for one."""
    try:
        kernel = guest_image.find_kernel(images)
        return "" if kernel is None else guest_image.image_name(kernel, program_path().read_bytes())
    except WorldforkError:
        return ""


def _regular(path: Path) -> os.stat_result | None:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return None
    return info if stat.S_ISREG(info.st_mode) else None


def allocated_bytes(top: Path) -> int:
    """Return what the files of a tree take on disk; those in directories that are closed to this user do not count."""
    total = 0
    for here, _, files in os.walk(top):
        for name in files:
            try:
                total += os.lstat(os.path.join(here, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
