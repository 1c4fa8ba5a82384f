"""The disks of a machine: what each is made of on the host.

A restored guest knows the size of its disks from before, so all disks have one and the same size for it, and what is
smaller is shown with zeros behind its end: by an empty qcow2 file on top, which lies in memory and which all share.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from worldfork.core.errors import ConfigError, DriverUnavailable, NotFound
from worldfork.core.ids import content_id
from worldfork.sandbox.driver import ShownTree, StartPlan
from worldfork.sandbox.microvm import inside, qcow2
from worldfork.sandbox.microvm.blank import DISK_BYTES as DISK_BYTES
from worldfork.sandbox.microvm.blank import scratch_image
from worldfork.sandbox.microvm.manifest import REMEDY, DiskChain, DiskFile
from worldfork.sandbox.microvm.trees import cached_image

SCRATCH_TOP: Final = "scratch.qcow2"
"""In the run directory: what the guest writes."""
TREES: Final = "trees"
POINTS_NAME: Final = "p"
FILES_NAME: Final = "h"
_COPIES: Final = "host-files"
"""In the run directory."""
_DESCRIPTORS_LIMIT: Final = 40
"""Files of all disks together: QEMU gets each as a descriptor from 20 to 63."""


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
    """Return what the disks of a machine that starts afresh stand on, made where it is not there yet. Blocking.

    Args:
        images: such as `home/images`.
        plan: with the layers.

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
        base = (DiskFile(str(cached_image(trees, {inside.BASE_NAME: (tree_mark(path), path)}))),)
    names = short_names(plan)
    layers: DiskChain = (DiskFile(str(cached_image(trees, names))),) if names else ()
    empty = DiskFile(str(scratch_image(images, plan.facts.limits.disk_mb)))
    return base, layers, (empty,)


def write_top(run: Path) -> None:
    """Make the file that takes what a guest writes to its scratch disk. It names nothing below it: QEMU gets that as
    descriptors."""
    qcow2.write_overlay(run / SCRATCH_TOP, DISK_BYTES, "")


def with_top(run: Path, below: tuple[DiskChain, ...]) -> tuple[DiskChain, ...]:
    """Return the disks of a machine that writes in this run directory, over what they stand on."""
    top = DiskFile(str(run / SCRATCH_TOP), "qcow2")
    return *below[:-1], (top, *below[-1])


def tree_mark(path: Path) -> str:
    """Return an id of a directory that anybody may change: of what its files look like. Blocking.

    Nothing but a look at each file tells of a change, so each start takes one: some 10 ms for a thousand files.

    Raises:
        NotFound: it is no directory.
        DriverUnavailable: this user cannot read all of it.
    """
    try:
        return content_id(*_looks(os.path.realpath(path)))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{path} is no directory, or changed while it was looked at", path=str(path)) from None
    except PermissionError as error:
        raise DriverUnavailable(
            f"{error.filename} of {path} cannot be read, so no machine can be given it",
            remedy="make it readable to this user, or start as its owner",
            path=str(path),
        ) from error


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
    """Yield what each directory of a tree shows of what is in it."""
    stack = [top]
    while stack:
        here = stack.pop()
        lines = [here]
        fd = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for name in sorted(os.listdir(fd)):
                info = os.lstat(name, dir_fd=fd)
                owner = f"{info.st_mode} {info.st_uid} {info.st_gid}"
                # No name holds a slash, so that no two trees look alike.
                lines.append(f"{name}/{info.st_ino} {owner} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}")
                if stat.S_ISDIR(info.st_mode):
                    stack.append(f"{here}/{name}")
        finally:
            os.close(fd)
        yield os.fsencode("\0".join(lines))


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
