"""What the demo does in virtual machines only: a root for them, a live process, and both kinds of snapshots."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worldfork import Sandbox, SnapshotInfo
from worldfork.cli.demo_world import Installed, Survivor, WorldFacts, install_packages, read_state, survivors
from worldfork.cli.printing import human_bytes, human_seconds, progress
from worldfork.core.errors import ConfigError, SandboxError
from worldfork.core.settings import load_settings
from worldfork.sandbox.microvm.debian import find_debian_root

ARTICLE_DISK_S = 1.9
ARTICLE_MEMORY_S = 0.9
"""How long the article's cloud took to restore either kind."""
NO_BASE_REMEDY = "`worldfork image build --driver microvm --from debian` makes one, and prints the option"

SESSION = '''
"""Runs inside the world and lives on: what it knows is in its memory alone."""
import hashlib, pathlib, secrets, sys

token, asked = secrets.token_hex(8), 0
held = bytearray(pathlib.Path("/workspace/embeddings.npy").read_bytes())
print("ready", flush=True)
for line in sys.stdin:
    asked += 1
    print(asked, token, hashlib.sha256(held).hexdigest()[:16], flush=True)
'''

PREPARE = r"""
set -e
command -v python3 > /dev/null || exit 3
bin=/usr/local/bin
mkdir -p $bin /workspace
command -v python > /dev/null || ln -s "$(command -v python3)" $bin/python
command -v pip > /dev/null || printf '#!/bin/sh\nexec python3 -m pip "$@"\n' > $bin/pip
[ ! -e $bin/pip ] || chmod 755 $bin/pip
[ -e /etc/pip.conf ] || printf '[global]\nbreak-system-packages = true\nroot-user-action = ignore\n' > /etc/pip.conf
"""
"""A distribution's root has its Python under another name, and guards it against pip; this world is ours to change."""


@dataclass(frozen=True)
class Session:
    """The live process of the world."""

    pid: int
    first: tuple[str, ...]
    """What it said when it was asked first: how often it was asked, its token, the digest of what it holds."""


@dataclass(frozen=True)
class Kind:
    """One kind of snapshot of the same world, and what it cost."""

    snapshot: SnapshotInfo
    checkpoint_s: float
    restores_s: list[float]
    """To the first answer of a new machine, each."""
    survived: list[Survivor]

    @property
    def restore_s(self) -> float:
        """The median."""
        return statistics.median(self.restores_s)

    def to_json(self) -> dict[str, Any]:
        """Return the figures for `--json`."""
        return {
            "checkpoint_s": self.checkpoint_s,
            "pause_s": self.snapshot.pause_s,
            "size_bytes": self.snapshot.size_bytes,
            "restore_s": self.restore_s,
            "survived": [{"name": one.name, "ok": one.ok, "detail": one.detail} for one in self.survived],
        }


def choose_machines(base: str | None) -> str:
    """Make machines what every sandbox of this process is, rollouts included; returns the base that they stand on.

    Raises:
        ConfigError: no base is named, and none was built.
    """
    settings = load_settings()
    found = base or (settings.base if settings.base != "host" else None) or _built_root(settings.home)
    if found is None or found == "host":
        raise ConfigError("a machine starts from a root file system of its own", remedy=NO_BASE_REMEDY)
    os.environ["WORLDFORK_DRIVER"] = "microvm"
    os.environ["WORLDFORK_BASE"] = found
    return found


def _built_root(home: Path) -> str | None:
    found = find_debian_root(home / "images")
    return None if found is None else f"dir:{found}"


@dataclass
class Opened:
    """A machine in which the world is to be built."""

    sandbox: Sandbox
    isolation: str
    """In the driver's words, such as `kvm` or `none (tcg)`."""
    installed: Installed | None = None
    """What it has already of the world's packages."""
    notes: list[str] = field(default_factory=list)


@contextmanager
def open_world(base: str, memory_mb: int, *, quiet: bool) -> Iterator[Opened]:
    """Start the machine of the world.

    Where QEMU interprets machines, pip would take many minutes in one. There the packages are installed in a sandbox of
    the other driver on the same root, and the machine is a restore of its snapshot.

    Raises:
        DriverUnavailable: machines cannot be started here, with the remedy.
        ConfigError: the base is none for this.
    """
    with progress("starting a virtual machine; the first boots, all others are restored from it", quiet=quiet):
        # With a network it would take along what the host's pip is set to read, which an interpreted one needs not.
        with Sandbox.create(base=base, memory_mb=memory_mb, network="none") as first:
            isolation = first.info().isolation
    if "tcg" not in isolation:
        with Sandbox.create(base=base, memory_mb=memory_mb, network="host") as world:
            prepare_root(world)
            yield Opened(world, isolation)
        return
    notes = ["QEMU interprets machines here: the packages were installed by the driver namespace on the same root,"]
    notes.append("and its snapshot was restored in a machine, in which all else happens.")
    with progress("installing packages", quiet=quiet):
        with Sandbox.create(base=base, driver="namespace", network="host") as outside:
            prepare_root(outside)
            installed = install_packages(outside, notes.append)
            snapshot = outside.checkpoint(stop=True)
    try:
        with Sandbox.create(snapshot_id=snapshot.snapshot_id, memory_mb=memory_mb) as world:
            yield Opened(world, isolation, installed, notes)
    finally:
        Sandbox.delete_snapshot(snapshot.snapshot_id)


def prepare_root(world: Sandbox) -> None:
    """Give a distribution's root the names that the world's programs are called by.

    Raises:
        ConfigError: it has no Python at all.
    """
    result = world.run("/bin/sh", ["-c", PREPARE])
    if result.exit_code == 3:
        raise ConfigError("the demo's world needs Python, and this base has no python3", remedy=NO_BASE_REMEDY)
    if result.exit_code:
        raise SandboxError(f"the root could not be prepared: {result.stderr.strip() or result.stdout.strip()}")


def start_session(world: Sandbox) -> Session:
    """Start the live process, and ask it once."""
    pid = world.start_process("python", ["-u", "-c", SESSION], stdin_mode="pipe").pid
    return Session(pid, ask_session(world, pid, lines=2))


def ask_session(sandbox: Sandbox, pid: int, *, lines: int) -> tuple[str, ...]:
    """Ask a sandbox's live process; its answer is line `lines` of all that it ever printed."""
    sandbox.write_stdin(pid, b"?\n")
    for number, event in enumerate(sandbox.follow_stdout(pid), start=1):
        if number == lines:
            return tuple(event.line.split())
    raise SandboxError("the live process of the world ended")


def freeze(world: Sandbox, kind: str, label: str) -> tuple[SnapshotInfo, float]:
    """Take a snapshot of a kind; returns it with the seconds until it could be forked."""
    began_s = time.perf_counter()
    snapshot = world.checkpoint(checkpoint_type=kind, label=label)
    return snapshot, time.perf_counter() - began_s


def restore(
    snapshot: SnapshotInfo, checkpoint_s: float, facts: WorldFacts, session: Session | None, times: int
) -> Kind:
    """Restore a snapshot so many times; in the first new machine everything is compared with the world as it was.

    Args:
        session: the live process, where this kind of snapshot has it.
    """
    restores_s: list[float] = []
    found: list[Survivor] = []
    for number in range(times):
        began_s = time.perf_counter()
        with snapshot.fork(1).unwrap()[0] as restored:
            restored.run("true", check=True)
            restores_s.append(time.perf_counter() - began_s)
            if number == 0:
                found = survivors(facts, read_state(restored, facts.packages))
                found += [_session_survivor(restored, session)] if session is not None else []
    return Kind(snapshot, checkpoint_s, restores_s, found)


def _session_survivor(restored: Sandbox, session: Session) -> Survivor:
    answer = ask_session(restored, session.pid, lines=3)
    same = answer[1:] == session.first[1:] and answer[:1] == ("2",)
    detail = f"the same token, asked {answer[0]} times" if same else f"it said {' '.join(answer)!r}"
    return Survivor("live process", same, detail)


def kind_rows(disk: Kind, memory: Kind) -> list[tuple[str, ...]]:
    """Return the rows of the table of both kinds: what, forkable after, stood still, adds, restore here, there."""
    rows: list[tuple[str, ...]] = []
    for name, kind, article_s in (("filesystem", disk, ARTICLE_DISK_S), ("memory", memory, ARTICLE_MEMORY_S)):
        pause_s = kind.snapshot.pause_s
        rows.append((
            name,
            human_seconds(kind.checkpoint_s),
            "-" if pause_s is None else human_seconds(pause_s),
            human_bytes(kind.snapshot.size_bytes),
            human_seconds(kind.restore_s),
            f"{article_s} s",
        ))  # fmt: skip
    return rows


def say_kinds(disk: Kind, memory: Kind, say: Callable[[str], None]) -> None:
    """Say what came back of either kind."""
    for name, kind in (("filesystem", disk), ("memory", memory)):
        for thing in kind.survived:
            say(f"             {name:<10} {'came back' if thing.ok else 'NOT THE SAME'}  {thing.name}: {thing.detail}")


def to_json(disk: Kind, memory: Kind, isolation: str) -> dict[str, Any]:
    """Return what `--json` has of the machines."""
    return {
        "isolation": isolation,
        "filesystem": disk.to_json(),
        "memory": memory.to_json(),
        "article": {"filesystem_restore_s": ARTICLE_DISK_S, "memory_restore_s": ARTICLE_MEMORY_S},
    }
