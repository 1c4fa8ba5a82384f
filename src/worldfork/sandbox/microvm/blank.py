"""Disks with nothing on them: the empty file system that a sandbox writes to, and what fills a disk up to its size."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Final

from worldfork.core.errors import ConfigError, DriverUnavailable
from worldfork.sandbox.microvm import qcow2

DISK_BYTES: Final = 1 << 40
"""Of every disk, as guests see it."""
SCRATCHES: Final = "scratch"
"""In the directory of images: empty file systems by size."""
PART: Final = ".part-"
"""How the name of a file begins that is still being made."""
_DEFAULT_SCRATCH_MIB: Final = 64 << 10
_SMALLEST_SCRATCH_MIB: Final = 8
_MKFS: Final = "mke2fs"
_MKFS_S: Final = 120.0

_empty: int | None = None
_lock = threading.Lock()


def scratch_mib(disk_mb: int | None) -> int:
    """Return the size of the file system for a disk limit."""
    return _DEFAULT_SCRATCH_MIB if disk_mb is None else disk_mb


def scratch_image(images: Path, disk_mb: int | None) -> Path:
    """Return an empty file system of the size of a disk limit, made on first use. Blocking.

    Raises:
        ConfigError: the limit is too small for a file system.
        DriverUnavailable: the program that makes one is not there, or fails.
    """
    size_mib = scratch_mib(disk_mb)
    if not _SMALLEST_SCRATCH_MIB <= size_mib <= DISK_BYTES >> 20:
        raise ConfigError(
            f"the disk of a machine cannot have {size_mib} MiB",
            remedy=f"set disk_mb to at least {_SMALLEST_SCRATCH_MIB}, and at most {DISK_BYTES >> 20}",
        )
    place = images / SCRATCHES
    target = place / f"{size_mib}.ext4"
    with contextlib.suppress(FileNotFoundError):
        os.utime(target)  # somebody asked for it: `drop_unused`
        return target
    place.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=PART, dir=place)
    try:
        try:
            os.ftruncate(handle, size_mib << 20)
            _format(part)
            os.fchmod(handle, 0o400)
        finally:
            os.close(handle)
        os.replace(part, target)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return target


def find_mkfs() -> str:
    """Return the program that makes a file system.

    Raises:
        DriverUnavailable: this machine has none, with the remedy.
    """
    # Debian has it where an ordinary user does not search.
    program = shutil.which(_MKFS) or shutil.which(_MKFS, path="/usr/sbin:/sbin")
    if program is None:
        raise DriverUnavailable(f"this machine has no {_MKFS}", remedy="sudo apt-get install e2fsprogs", lacks=_MKFS)
    return program


def _format(path: str) -> None:
    program = find_mkfs()
    # No journal: the file system is never mounted again after its machine. What is not written yet need not be.
    words = ("-q", "-F", "-t", "ext4", "-m", "0", "-b", "4096", "-O", "^has_journal,^resize_inode")
    options = "lazy_itable_init=1,nodiscard,root_owner=0:0"
    argv = [program, *words, "-E", options, path]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_MKFS_S, env={"LC_ALL": "C"})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DriverUnavailable(f"{program} failed: {error}", remedy="see whether the disk is full") from error
    if done.returncode:
        words_said = done.stderr.decode(errors="replace").strip()
        raise DriverUnavailable(f"{program} failed: {words_said}", remedy="see whether the disk is full")


def empty_disk() -> int:
    """Return a descriptor, for reading, of the empty disk that is shown on top of a smaller one; one per process."""
    global _empty
    with _lock:
        if _empty is None:
            fd = os.memfd_create("worldfork-disk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                _write_empty(fd)
                seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
                # QEMU takes only a descriptor whose mode is what it wants.
                _empty = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            finally:
                os.close(fd)
        return _empty


def new_empty_disk() -> int:
    """Return a descriptor of a new empty disk in memory, for reading and writing; for a template."""
    fd = os.memfd_create("worldfork-disk", os.MFD_CLOEXEC)
    try:
        _write_empty(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_empty(fd: int) -> None:
    for at, data in qcow2.header(DISK_BYTES, ""):
        os.pwrite(fd, data, at)
    os.ftruncate(fd, qcow2.length_bytes(DISK_BYTES))
