"""What machines run with on this host: which QEMU, which guest image, and what interprets the guest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from worldfork.core.errors import DriverUnavailable
from worldfork.sandbox.microvm import accel, guest_image
from worldfork.sandbox.microvm.accel import Decision, Qemu
from worldfork.sandbox.microvm.blank import empty_disk
from worldfork.sandbox.microvm.guest_image import GuestImage, KernelFiles
from worldfork.sandbox.microvm.keep import AGENT_FD, DISKS_FD, QMP_FD, RAM_FD
from worldfork.sandbox.microvm.machine import Boot, Disk, Machine, Network, Restore
from worldfork.sandbox.microvm.manifest import Build, DiskChain, Saved
from worldfork.sandbox.program import program_path

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Host:
    """This machine, as the driver uses it."""

    qemu: Qemu
    image: GuestImage
    decision: Decision
    cpu: str
    """`accel.cpu_mark`."""
    qemu_file: tuple[int, int]
    """`file_mark` of QEMU's program."""

    def build(self, ram_bytes: int, vcpus: int) -> Build:
        """Return what a machine that is saved here must find again."""
        return Build(self.qemu.version, self.decision.accel, self.cpu, self.image.id, ram_bytes, vcpus)

    def machine(
        self,
        build: Build,
        start: Boot | Restore,
        disks: tuple[Disk, ...],
        *,
        share_ram: bool = False,
        network: Network = "none",
    ) -> Machine:
        """Return the description of a machine whose descriptors have the numbers of `keep`."""
        return Machine(
            accel=build.accel,
            memory_mib=build.ram_bytes >> 20,
            vcpus=build.vcpus,
            ram_fd=RAM_FD,
            share_ram=share_ram,
            qmp_fd=QMP_FD,
            agent_fd=AGENT_FD,
            start=start,
            disks=disks,
            network=network,
            program=self.qemu.program,
        )

    def check(self, saved: Saved) -> None:
        """Make sure that a saved machine can go on here.

        Raises:
            DriverUnavailable: it was saved under another QEMU, or on another processor.
        """
        build = saved.build
        here = (self.qemu.version, self.decision.accel, self.cpu)
        if (build.qemu, build.accel, build.cpu) == here:
            return
        lacks = f"QEMU {build.qemu} ({build.accel}) on {build.cpu}"
        raise DriverUnavailable(
            f"this memory was saved under {lacks}, and here is QEMU {here[0]} ({here[1]}) on {here[2]}",
            remedy="restore it on a machine like the one it was saved on, or take a filesystem checkpoint there",
            lacks=lacks,
        )


def file_mark(path: str) -> tuple[int, int]:
    """Return what tells a program from one that took its place; zeros where there is none."""
    try:
        info = os.stat(path)
    except OSError:
        return 0, 0
    return info.st_ino, info.st_mtime_ns


def expect_kernel(images: Path) -> KernelFiles:
    """Return the kernel that guests start with.

    Raises:
        DriverUnavailable: there is none, with the remedy.
    """
    kernel = guest_image.find_kernel(images)
    if kernel is None:
        raise DriverUnavailable(
            "there is no kernel for guests on this machine", remedy=guest_image.REMEDY, lacks=guest_image.PACKAGE
        )
    return kernel


def find_host(images: Path, *, allow_tcg: bool) -> Host:
    """Find out what this machine can do; blocking, up to 10 s where KVM is tried for the first time.

    Raises:
        DriverUnavailable: something is missing, with the remedy.
    """
    qemu = accel.find_qemu()
    image = guest_image.build_image(images, expect_kernel(images), program_path().read_bytes())
    decision = accel.decide(images, qemu, allow_tcg=allow_tcg, attempt=lambda: accel.boot_under_kvm(qemu, image))
    cpu = accel.cpu_mark(decision.accel, _CPUINFO.read_text(encoding="utf-8"))
    return Host(qemu, image, decision, cpu, file_mark(qemu.program))


def plug(chains: Iterable[DiskChain], opened: Mapping[str, int]) -> tuple[tuple[Disk, ...], dict[int, int]]:
    """Return the disks of a machine, the last of which it writes, and the descriptors that they need.

    Args:
        chains: its disks.
        opened: path -> descriptor here.

    Returns:
        The disks, and: number in QEMU -> descriptor here.
    """
    chains = list(chains)
    numbers: dict[int, int] = {}

    def give(fd: int) -> int:
        number = DISKS_FD + len(numbers)
        numbers[number] = fd
        return number

    disks = []
    for place, chain in enumerate(chains):
        written = place == len(chains) - 1
        node: Disk | None = None
        for file in reversed(chain):
            top = written and file is chain[0]
            node = Disk(give(opened[file.path]), format=file.format, read_only=not top, backing=node)
        if node is None or not written:
            node = Disk(give(empty_disk()), format="qcow2", backing=node)
        disks.append(node)
    return tuple(disks), numbers
