"""What the machine of a sandbox must be, by the sandbox's limits and network."""

from __future__ import annotations

import math
import os
from typing import Final

from worldfork.core.errors import ConfigError, OutOfSpace
from worldfork.records.sandbox import Limits, SandboxFacts
from worldfork.sandbox.cgroups import CgroupLayout
from worldfork.sandbox.driver import StartPlan
from worldfork.sandbox.microvm.blank import scratch_mib
from worldfork.sandbox.microvm.machine import Network
from worldfork.sandbox.microvm.manifest import Build, Saved
from worldfork.sandbox.microvm.ram import available_bytes

OVERHEAD_MIB: Final = 64
"""What a guest's kernel and its init take, besides the memory that a sandbox may use."""
QEMU_MIB: Final = 128
"""What QEMU takes, besides its guest's memory."""
START_BYTES: Final = 64 << 20
"""Of the host's memory that must be free for a start: QEMU's own, and what a guest touches at once."""
_UNLIMITED_MIB: Final = 4096
"""For a sandbox without a memory limit: a machine has some size."""
_STEP_MIB: Final = 64
_QEMU_THREADS: Final = 128
_MIB: Final = 1 << 20
_FILE_BEYOND_BYTES: Final = 64 << 20
"""What tells a disk's file what lies where in it, and the state of devices beside a memory, take less."""


def machine_size(limits: Limits) -> tuple[int, int]:
    """Return the bytes of memory and the number of processors of the machine for a sandbox with such limits."""
    wanted = limits.memory_mb if limits.memory_mb is not None else _UNLIMITED_MIB
    # Few sizes: each has a template of its own.
    memory_mib = -(-(wanted + OVERHEAD_MIB) // _STEP_MIB) * _STEP_MIB
    cpus = limits.cpus if limits.cpus is not None else float(os.cpu_count() or 1)
    return memory_mib * _MIB, max(1, math.ceil(cpus))


def group_items(layout: CgroupLayout, facts: SandboxFacts, build: Build) -> list[tuple[str, str]]:
    """Return the items of a keep's plan for the groups of its QEMU."""
    if not layout.limited:
        return []
    # A page that nobody used before is granted twice: in the memory that all forks share, and, once it is written, for
    # this one alone. The kernel counts both to who comes first.
    memory_mib = 2 * build.ram_bytes // _MIB + QEMU_MIB
    return layout.items(facts.sandbox_id, Limits(facts.limits.cpus, memory_mib, None, _QEMU_THREADS + build.vcpus))


def file_bytes(limits: Limits, build: Build) -> int:
    """Return how large a file can get that QEMU writes, at most.

    Its disks look larger than they may get, and a guest that was broken into could fill them.
    """
    largest = max(scratch_mib(limits.disk_mb) * _MIB, build.ram_bytes)
    return largest + largest // 64 + _FILE_BEYOND_BYTES


def behind_card(saved: Saved, plan: StartPlan) -> Network:
    """Return what to put behind the card of a machine that goes on from a saved memory.

    Raises:
        ConfigError: it is to have a network, and was saved without one.
    """
    wanted, had = plan.facts.network == "host", saved.facts.get("network", "none") == "host"
    if wanted and not had:
        raise ConfigError(
            "what was saved without a network cannot be given one",
            remedy="fork it without a network, or start from a filesystem snapshot",
            field="network",
        )
    return "host" if wanted else "cut" if had else "none"


def check_memory() -> None:
    """Make sure that one more machine can start.

    Raises:
        OutOfSpace: the host has too little memory left.
    """
    free = available_bytes()
    if free is not None and free < START_BYTES:
        raise OutOfSpace(
            f"a machine needs {START_BYTES >> 20} MiB of memory to start, and the host has {free >> 20} MiB left",
            remedy="end other sandboxes first",
            scope="host",
        )
