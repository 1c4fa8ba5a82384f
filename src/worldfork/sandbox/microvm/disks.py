"""The disks of a machine: what each is made of on the host.

A restored guest knows the size of its disks from before, so all disks have one and the same size for it, and what is
smaller is shown with zeros behind its end: by an empty qcow2 file on top, which lies in memory and which all share.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from worldfork.core.errors import ConfigError, DriverUnavailable, NotFound
from worldfork.core.ids import content_id
from worldfork.sandbox.driver import ShownTree, StartPlan
from worldfork.sandbox.microvm import inside, qcow2
from worldfork.sandbox.microvm.manifest import REMEDY, DiskChain, DiskFile
from worldfork.sandbox.microvm.trees import cached_image

DISK_BYTES: Final = 1 << 40
"""Of every disk, as guests see it."""
SCRATCH_TOP: Final = "scratch.qcow2"
"""In the run directory: what the guest writes."""
TREES: Final = "trees"
POINTS_NAME: Final = "p"
FILES_NAME: Final = "h"
_COPIES: Final = "host-files"
"""In the run directory."""
_SCRATCHES: Final = "scratch"
_DEFAULT_SCRATCH_MIB: Final = 64 << 10
_SMALLEST_SCRATCH_MIB: Final = 8
_MKFS: Final = "mke2fs"
_MKFS_S: Final = 120.0
_DESCRIPTORS_LIMIT: Final = 40
"""Files of all disks together: QEMU gets each as a descriptor from 20 to 63."""

_empty: int | None = None
_lock = threading.Lock()


def short_names(plan: StartPlan) -> dict[str, tuple[str, Path]]:
    """Return the trees of the second disk: short name -> (id, directory). Blocking.

    The layers are "0", "1", ..., the topmost first; the places to mount on "p"; shown trees "m0", "m1x0", "m1x1", ...;
    directories of the host that come with its network "h0", "h1", ..., and files of that kind together "h".
    """
    names = {
        str(number): (layer, Path(path))
        for number, (layer, path) in enumerate(zip(plan.layer_ids, plan.ground.layers, strict=False))
    }
    if points := points_of(plan):
        names[POINTS_NAME] = (_points_mark(points), Path(points))
    for number, tree in enumerate(plan.shown):
        if not tree.layers:
            names[f"m{number}"] = (tree_mark(Path(tree.path)), Path(tree.path))
        for place, layer in enumerate(tree.layers):
            # A layer's path has its id, and what lies there never changes.
            names[f"m{number}x{place}"] = (layer, Path(layer))
    files = [source for source, _ in plan.binds if not os.path.isdir(source)]
    if files:
        copies = _copies(Path(plan.facts.run) / _COPIES, files)
        names[FILES_NAME] = (content_id(*(path.read_bytes() for path in sorted(copies.iterdir()))), copies)
    for number, (source, _) in enumerate(plan.binds):
        if source not in files:
            names[f"h{number}"] = (tree_mark(Path(source)), Path(source))
    return names


def has_trees(plan: StartPlan) -> bool:
    """Whether there is anything on the second disk."""
    return bool(plan.layer_ids or plan.shown or plan.binds or points_of(plan))


def points_of(plan: StartPlan) -> str:
    """Return the directory of the places to mount on, below all layers; empty if there is none."""
    rest = plan.ground.layers[len(plan.layer_ids) :]
    return next((path for path in rest if path != plan.facts.base.path), "")


def shown_paths(tree: ShownTree, number: int) -> tuple[str, ...]:
    """Return where a guest finds the directories of a shown tree."""
    if not tree.layers:
        return (f"{inside.LAYERS}/m{number}",)
    return tuple(f"{inside.LAYERS}/m{number}x{place}" for place in range(len(tree.layers)))


def bound_paths(plan: StartPlan) -> Iterator[tuple[str, str]]:
    """Yield where a guest finds what comes with the host's network, and where its sandbox wants it."""
    files = 0
    for number, (source, target) in enumerate(plan.binds):
        if os.path.isdir(source):
            yield f"{inside.LAYERS}/h{number}", target
        else:
            yield f"{inside.LAYERS}/{FILES_NAME}/{files}", target
            files += 1


def _copies(place: Path, files: list[str]) -> Path:
    place.mkdir(mode=0o755, exist_ok=True)
    for number, source in enumerate(files):
        shutil.copyfile(source, place / str(number))
        (place / str(number)).chmod(0o644)
    return place


def fresh_disks(images: Path, plan: StartPlan) -> tuple[DiskChain, ...]:
    """Return the disks of a machine that starts afresh, made where they are not there yet. Blocking.

    Args:
        images: such as `home/images`.
        plan: with the layers; the scratch disk is made in its run directory.

    Raises:
        NotFound: a layer or the base is gone.
        NotCapturable: something in a tree cannot be in an image.
        DriverUnavailable: there is no program that makes a file system.
        OutOfSpace: the disk is full.
        ConfigError: the disk limit is too small for a file system.
    """
    trees = images / TREES
    base: DiskChain = ()
    if plan.facts.base.path:
        path = Path(plan.facts.base.path)
        base = (_image(trees, {inside.BASE_NAME: (tree_mark(path), path)}),)
    names = short_names(plan)
    layers: DiskChain = (_image(trees, names),) if names else ()
    empty = DiskFile(str(scratch_image(images, plan.facts.limits.disk_mb)))
    return base, layers, (write_top(Path(plan.facts.run)), empty)


def _image(trees: Path, names: Mapping[str, tuple[str, Path]]) -> DiskFile:
    path = cached_image(trees, names)
    # When it was last used, for `forget_images`.
    os.utime(path)
    return DiskFile(str(path))


def forget_images(images: Path, unused_s: float) -> tuple[int, int]:
    """Remove images of trees that no machine was started with of late; return how many, and their bytes. Blocking.

    Each is made again when it is needed. A machine that runs on one goes on.
    """
    removed = removed_bytes = 0
    oldest_s = time.time() - unused_s
    for path in (images / TREES).glob("*.erofs"):
        with contextlib.suppress(FileNotFoundError):
            info = path.stat()
            if info.st_mtime <= oldest_s:
                path.unlink()
                removed += 1
                removed_bytes += info.st_blocks * 512
    return removed, removed_bytes


def write_top(run: Path) -> DiskFile:
    """Make the file that takes what a guest writes to its scratch disk."""
    path = run / SCRATCH_TOP
    # It names nothing below it: QEMU gets that as descriptors.
    qcow2.write_overlay(path, DISK_BYTES, "")
    return DiskFile(str(path), "qcow2")


def tree_mark(path: Path) -> str:
    """Return an id of a directory that anybody may change: of what its files look like. Blocking.

    Nothing but a look at each file tells of a change, so each start takes one: some 5 ms for a thousand files.

    Raises:
        NotFound: it is no directory.
    """
    try:
        return content_id(*_looks(str(path)))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{error.filename} is no directory", path=str(path)) from None


def _points_mark(top: str) -> str:
    """Return an id of a tree of empty directories and files, made for one sandbox and alike for many."""
    names = sorted(
        (os.path.relpath(os.path.join(here, name), top), kind)
        for here, directories, files in os.walk(top)
        for kind, found in (("d", directories), ("f", files))
        for name in found
    )
    return content_id(b"points", *(os.fsencode(word) for pair in names for word in pair))


def _looks(top: str) -> Iterator[bytes]:
    yield os.fsencode(top)
    stack = [top]
    while stack:
        here = stack.pop()
        with os.scandir(here) as entries:
            found = sorted((entry for entry in entries), key=lambda entry: entry.name)
        for entry in found:
            info = entry.stat(follow_symlinks=False)
            words = (
                info.st_ino,
                info.st_mode,
                info.st_uid,
                info.st_gid,
                info.st_size,
                info.st_mtime_ns,
                info.st_ctime_ns,
            )
            yield b"%b %d %d %d %d %d %d %d" % (os.fsencode(entry.name), *words)
            if entry.is_dir(follow_symlinks=False):
                stack.append(entry.path)
        yield os.fsencode(here)


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
    place = images / _SCRATCHES
    target = place / f"{size_mib}.ext4"
    if target.exists():
        return target
    place.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=".part-", dir=place)
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


def _format(path: str) -> None:
    # Debian has it where an ordinary user does not search.
    program = shutil.which(_MKFS) or shutil.which(_MKFS, path="/usr/sbin:/sbin")
    if program is None:
        raise DriverUnavailable(f"this machine has no {_MKFS}", remedy="sudo apt-get install e2fsprogs", lacks=_MKFS)
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


def chains_in(directory: Path, chains: tuple[DiskChain, ...]) -> tuple[DiskChain, ...]:
    """Return the disks of a memory directory with absolute paths."""
    return tuple(tuple(DiskFile(str(directory / file.path), file.format) for file in chain) for chain in chains)


def open_chains(chains: tuple[DiskChain, ...]) -> Mapping[str, int]:
    """Open every file of a machine's disks: path -> descriptor. The topmost of the last disk is opened for writing.

    Raises:
        NotFound: one is gone.
        ConfigError: there are too many.
    """
    opened: dict[str, int] = {}
    written = chains[-1][0].path if chains and chains[-1] else ""
    try:
        for file in (file for chain in chains for file in chain):
            if file.path in opened:
                continue
            if len(opened) == _DESCRIPTORS_LIMIT:
                raise ConfigError(f"the disks of a machine have more than {_DESCRIPTORS_LIMIT} files")
            flags = os.O_RDWR if file.path == written else os.O_RDONLY
            opened[file.path] = os.open(file.path, flags | os.O_CLOEXEC)
    except BaseException as error:
        for fd in opened.values():
            os.close(fd)
        if isinstance(error, FileNotFoundError):
            raise NotFound(f"the disk {error.filename} is gone", remedy=REMEDY, path=str(error.filename)) from None
        raise
    return opened
