"""The disk that a guest writes: QEMU writes one file, and another one after each checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from worldfork.core.errors import SandboxError
from worldfork.sandbox.microvm import qcow2
from worldfork.sandbox.microvm.disks import DISK_BYTES, SCRATCH_TOP
from worldfork.sandbox.microvm.manifest import DiskChain, DiskFile, Running
from worldfork.sandbox.microvm.qmp import Qmp

_SETTLED: Final = "settled"


@dataclass(frozen=True)
class Scratch:
    """The disk that a guest writes, as QEMU has it: a file on top that takes what is written."""

    run: Path
    running: Running
    number: int
    """Of checkpoints since the machine was restored."""
    chains: tuple[DiskChain, ...]
    """What QEMU has below what it will write next."""

    @classmethod
    async def find(cls, run: Path, running: Running, monitor: Qmp) -> Scratch:
        """Ask QEMU which file it writes: whoever saved before may have died after it had written down another.

        Raises:
            SandboxDied, SandboxError: it does not say.
        """
        first = f"d{len(running.disks) - 1}"
        named = re.compile(rf"{first}(?:n(\d+))?")
        for row in await monitor.rows("query-block"):
            inserted = row.get("inserted")
            found = named.fullmatch(str(inserted.get("node-name")) if isinstance(inserted, dict) else "")
            if found is None:
                continue
            number = int(found.group(1) or 0)
            names = [Path(file.path).name for file in running.disks[-1]]
            if _file_name(number) not in names:
                break
            chain = running.disks[-1][names.index(_file_name(number)) :]
            return cls(run, running, number, (*running.disks[:-1], chain))
        raise SandboxError("the machine does not write the disk that is known of it", step="disk")

    @property
    def node(self) -> str:
        """QEMU's name of what it writes."""
        return self._node(self.number)

    @property
    def next_node(self) -> str:
        """Its name of what it writes after the checkpoint."""
        return self._node(self.number + 1)

    def _node(self, number: int) -> str:
        return f"d{len(self.running.disks) - 1}" + (f"n{number}" if number else "")

    @property
    def next(self) -> Path:
        """The file of that."""
        return self.run / _file_name(self.number + 1)

    @property
    def settled(self) -> Path:
        """Where what QEMU has written so far is kept, in a file that it has no part in."""
        return self.run / f"{_SETTLED}.{self.number}.qcow2"

    @property
    def written(self) -> list[Path]:
        """Files that QEMU has written and left, the last one first: more than one only after a failed checkpoint."""
        paths = [Path(file.path) for file in self.chains[-1]]
        return [path for path in paths if path.parent == self.run and not path.name.startswith(_SETTLED)]

    def make_next(self) -> Path:
        """Make the file that will be written after the checkpoint; one that is there was never used.

        Raises:
            OSError: it cannot be made.
        """
        self.next.unlink(missing_ok=True)
        qcow2.write_overlay(self.next, DISK_BYTES, "")
        return self.next

    def continued(self) -> Running:
        """Return what is to be known of the machine after the checkpoint."""
        chain = (DiskFile(str(self.next), "qcow2"), *self.chains[-1])
        return replace(self.running, disks=(*self.chains[:-1], chain))


def _file_name(number: int) -> str:
    return SCRATCH_TOP if number == 0 else f"{Path(SCRATCH_TOP).stem}.{number}.qcow2"
