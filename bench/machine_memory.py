"""What a memory snapshot takes on disk, and what each fork of it takes in memory."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

from bench.harness import Options, available_memory_bytes, must, percentile
from bench.machines import GUEST_RAM_BYTES, Machine, Row, first_result_s, frozen_guest, row_figure

COUNT = 8
BESIDE = 64
"""Forks of the namespace driver: so small that fewer would vanish in what else the host's memory does."""
BAR_STORED_MB, BAR_PRIVATE_MIB = 110.0, 2.0
_MIB = 1 << 20


def _allocated_bytes(directory: Path) -> dict[str, int]:
    """By file: what it takes on disk, whoever else has a link to it."""
    return {path.name: path.stat().st_blocks * 512 for path in sorted(directory.iterdir()) if path.is_file()}


def _available_bytes() -> int:
    gc.collect()
    readings = []
    for _ in range(5):
        readings.append(available_memory_bytes())
        time.sleep(0.2)
    return sorted(readings)[2]


def _live(options: Options, frozen: Any, column: str, count: int) -> dict[str, Any]:
    """Several forks, one after another, all alive: their memory at ready, after `true`, and what the host has less."""
    available = _available_bytes()
    seen: dict[str, list[int]] = {"private_at_ready": [], "own_at_ready": [], "private_after_true": []}
    children = []
    try:
        for _ in range(count):
            children.append(frozen.forks()[column]()[0])
            if column == "microvm":
                machine = Machine.of(options, children[-1])
                seen["private_at_ready"].append(machine.private_bytes())
                seen["own_at_ready"].append(machine.own_bytes())
        fell_at_ready = available - _available_bytes()
        for child in children:
            first_result_s(child)
            if column == "microvm":
                seen["private_after_true"].append(Machine.of(options, child).private_bytes())
        fell = available - _available_bytes()
    finally:
        for child in children:
            child.terminate()
    told = {f"{name}_mib": round(percentile(found, 0.5) / _MIB, 3) for name, found in seen.items() if found}
    return {
        **told,
        "host_memory_a_fork_at_ready_mib": round(fell_at_ready / count / _MIB, 3),
        "host_memory_a_fork_after_true_mib": round(fell / count / _MIB, 3),
        "forks_n": count,
    }


def run(options: Options) -> dict[str, Any]:
    """The snapshot of a guest at rest; then forks under either driver."""
    with frozen_guest(options) as frozen:
        files = _allocated_bytes(options.home / "home" / "memory" / frozen.memory.snapshot_id)
        for column in ("microvm", "namespace"):
            _live(options, frozen, column, 1)
        counts = {"microvm": options.samples(COUNT, 2), "namespace": options.samples(BESIDE, 8)}
        seen = {column: _live(options, frozen, column, count) for column, count in counts.items()}
        accel, ram_bytes = frozen.accel, frozen.ram_bytes
    machine, beside = seen["microvm"], seen["namespace"]
    stored_bytes = sum(size for name, size in files.items() if name == "state" or name.startswith("ram."))
    rows = [
        Row("device state + RAM of an idle 256 MiB guest, allocated", "mb", stored_bytes / 1e6, BAR_STORED_MB),
        Row("private guest RAM a fork at ready, p50", "mib", machine["private_at_ready_mib"], BAR_PRIVATE_MIB),
        Row("QEMU's own memory a fork at ready, p50", "mib", machine["own_at_ready_mib"]),
        Row("host memory a fork at ready (MemAvailable)", "mib", machine["host_memory_a_fork_at_ready_mib"], None,
            beside["host_memory_a_fork_at_ready_mib"]),
    ]  # fmt: skip
    values = {"allocated_bytes": files, "ram_bytes": ram_bytes, **seen}
    more = [must("the guest has 256 MiB", ram_bytes == GUEST_RAM_BYTES, said=f"{ram_bytes} bytes")]
    return row_figure("machine_memory", "memory snapshots and forks: what they take", accel, values, rows, more)
