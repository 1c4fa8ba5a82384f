"""What is written about machines: of a saved one in its memory directory, of a running one in its run directory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import blake3

from worldfork.core.errors import Corrupt, FormatUnsupported, NotFound, SandboxDied
from worldfork.core.whole_file import whole_file
from worldfork.sandbox.microvm.machine import Accel, SavedBy

MANIFEST = "manifest.json"
STATE = "state"
"""In a memory directory: what the machine's devices held."""
MACHINE = "machine.json"
"""In the run directory of a sandbox."""
FORMAT = 1
REMEDY = "remove this snapshot; it cannot be restored"

_BLOCK_BYTES = 1 << 20
_RAM_BYTES_MAX = 1 << 46
_VCPUS_MAX = 4096
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,60}", re.ASCII)
DiskFormat = Literal["raw", "qcow2"]


@dataclass(frozen=True)
class DiskFile:
    """One file of a disk."""

    path: str
    """In a memory directory a plain name; of a running machine an absolute path."""
    format: DiskFormat = "raw"


DiskChain = tuple[DiskFile, ...]
"""What a guest sees as one disk: its topmost file first, what lies below it after."""


@dataclass(frozen=True)
class Build:
    """What a saved machine must find again to go on."""

    qemu: str
    """Version, as `7.2.22`."""
    accel: Accel
    cpu: str
    """`accel.cpu_mark`."""
    image: str
    """Id of the kernel and the initrd that it booted from."""
    ram_bytes: int
    vcpus: int


@dataclass(frozen=True)
class Saved:
    """A memory directory: `state`, page files, disks, and this as `manifest.json`. It needs nothing from elsewhere."""

    build: Build
    saved_by: SavedBy
    ram: tuple[str, ...]
    """Names of its page files, the oldest first."""
    disks: tuple[DiskChain, ...]
    """The guest's disks in their order. None of these files is written any more."""
    state_digest: str = ""
    """BLAKE3 of `state`, as hex digits."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What whoever saved it wants to find again; nothing of it decides how it starts."""


@dataclass(frozen=True)
class Running:
    """A machine that runs, for whoever has its run directory."""

    qemu_pid: int
    ram_fd: int
    """The number of the descriptor by which QEMU has its sealed memory: `/proc/<qemu_pid>/fd/<ram_fd>`."""
    memory: str
    """The memory directory that it was restored from; a template's where it started afresh."""
    generation: int
    """Of its wire; every restore has another."""
    isolation: str
    build: Build
    disks: tuple[DiskChain, ...]
    """Absolute paths. The topmost file of the last disk is the one that it writes; all others never change."""
    network: Literal["none", "host"] = "none"
    """Whether its card has a back end, so that a state that is saved of it holds one too."""
    below: str = ""
    """On the host: the directory that the root of what the guest writes looked like before it wrote anything."""


def write_saved(directory: Path, saved: Saved) -> None:
    """Write the manifest of a memory directory, last of all: what has one is complete.

    Raises:
        OSError: it cannot be written.
    """
    _write(directory / MANIFEST, {"format": FORMAT, **asdict(saved)})
    (directory / MANIFEST).chmod(0o400)


def read_saved(directory: Path) -> Saved:
    """Read the manifest of a memory directory.

    Raises:
        NotFound: there is no such directory, or it is not complete.
        Corrupt: it is damaged.
        FormatUnsupported: it was written by another version.
    """
    try:
        data = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"the saved memory {directory} is gone", remedy=REMEDY, path=str(directory)) from None
    except ValueError:
        raise _damaged(directory, "its manifest is no JSON") from None
    try:
        if data["format"] != FORMAT:
            raise FormatUnsupported(
                f"{directory} has format {data['format']}", remedy="use the version of Worldfork that wrote it"
            )
        saved = Saved(
            build=_build(data["build"]),
            saved_by=_one_of(data["saved_by"], get_args(SavedBy)),
            ram=tuple(data["ram"]),
            disks=_chains(data["disks"]),
            facts=dict(data["facts"]),
            state_digest=data["state_digest"],
        )
        names = [*saved.ram, *(file.path for chain in saved.disks for file in chain)]
        own = bool(saved.ram and saved.disks) and all(_NAME.fullmatch(name) for name in names)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise _damaged(directory, "its manifest lacks a part") from None
    if not own:
        raise _damaged(directory, "its manifest names files that cannot be its own")
    return saved


def digest_state(content: bytes) -> str:
    """Return what `Saved.state_digest` is of a saved state."""
    return blake3.blake3(content).hexdigest()


def open_state(directory: Path, saved: Saved) -> int:
    """Return a descriptor of a saved state, checked; the caller closes it.

    Raises:
        NotFound: it is gone.
        Corrupt: it is damaged.
    """
    try:
        fd = os.open(directory / STATE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(f"the saved memory {directory} has lost its state", remedy=REMEDY, path=str(directory)) from None
    try:
        hasher = blake3.blake3()
        # One saved by migration holds what the guest changed of its memory too.
        while block := os.read(fd, _BLOCK_BYTES):
            hasher.update(block)
        actual = hasher.hexdigest()
        os.lseek(fd, 0, os.SEEK_SET)
        if actual != saved.state_digest:
            raise Corrupt(
                f"the saved memory {directory} is damaged: its state",
                remedy=REMEDY,
                expected=saved.state_digest,
                actual=actual,
                path=str(directory),
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_running(run: Path, running: Running) -> None:
    """Write what is known of a machine that runs; whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    _write(run / MACHINE, asdict(running))


def read_running(run: Path) -> Running:
    """Read what is known of a machine that runs.

    Raises:
        SandboxDied: there is none.
        Corrupt: what is written is damaged.
    """
    try:
        data = json.loads((run / MACHINE).read_text(encoding="utf-8"))
        return Running(
            qemu_pid=data["qemu_pid"],
            ram_fd=data["ram_fd"],
            memory=data["memory"],
            generation=data["generation"],
            isolation=data["isolation"],
            build=_build(data["build"]),
            disks=_chains(data["disks"]),
            network=data["network"],
            below=data["below"],
        )
    except (FileNotFoundError, NotADirectoryError):
        raise SandboxDied(f"no machine runs in {run}", step="machine") from None
    except (ValueError, KeyError, TypeError):
        raise _damaged(run, f"its {MACHINE}") from None


def _write(path: Path, data: dict[str, Any]) -> None:
    with whole_file(path) as part:
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _build(data: dict[str, Any]) -> Build:
    build = Build(**data)
    words, numbers = (build.qemu, build.cpu, build.image), (build.ram_bytes, build.vcpus)
    if not all(type(word) is str for word in words) or not all(type(number) is int for number in numbers):
        raise TypeError
    _one_of(build.accel, get_args(Accel))
    if not 0 < build.ram_bytes <= _RAM_BYTES_MAX or not 0 < build.vcpus <= _VCPUS_MAX:
        raise ValueError
    return build


def _chains(data: list[list[dict[str, Any]]]) -> tuple[DiskChain, ...]:
    chains = tuple(tuple(DiskFile(**file) for file in chain) for chain in data)
    for file in (file for chain in chains for file in chain):
        _one_of(file.format, get_args(DiskFormat))
    return chains


def _one_of(word: Any, words: tuple[Any, ...]) -> Any:
    if word not in words:
        raise ValueError
    return word


def _damaged(directory: Path, what: str) -> Corrupt:
    return Corrupt(
        f"the saved memory {directory} is damaged: {what}",
        remedy=REMEDY,
        expected="a complete manifest",
        actual=what,
        path=str(directory),
    )
