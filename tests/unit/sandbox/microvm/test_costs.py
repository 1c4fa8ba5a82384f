"""What a checkpoint would take, told before it is taken."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.unit.sandbox.microvm import stand_ins

from worldfork.core.errors import SandboxDied
from worldfork.sandbox.microvm.costs import costs
from worldfork.sandbox.microvm.pages import PAGE_BYTES, allocated_bytes


def test_what_changed_is_told_apart_from_what_is_shared(tmp_path: Path) -> None:
    with stand_ins.running(tmp_path) as machine:
        before = asyncio.run(costs(machine.run))
        assert machine.asked[0] == "SYNC"
        written = allocated_bytes(machine.run / "scratch.qcow2")
        assert before.filesystem_bytes == written
        assert before.shared_bytes == allocated_bytes(machine.memory / "ram.0")
        for page in range(10, 30):
            machine.write(page, 1)
        with open(machine.run / "scratch.qcow2", "r+b") as disk:
            disk.seek(0, os.SEEK_END)
            disk.write(b"x" * (1 << 20))
        after = asyncio.run(costs(machine.run))
    assert after.memory_bytes - before.memory_bytes == 20 * PAGE_BYTES + (1 << 20)
    assert after.filesystem_bytes - before.filesystem_bytes == 1 << 20
    assert after.pause_s > before.pause_s > 0
    assert after.filesystem_s > before.filesystem_s > 0


def test_a_memory_that_was_removed_shares_nothing(tmp_path: Path) -> None:
    with stand_ins.running(tmp_path) as machine:
        os.unlink(machine.memory / "manifest.json")
        assert asyncio.run(costs(machine.run)).shared_bytes == 0


def test_a_machine_that_has_ended_costs_nothing_any_more(tmp_path: Path) -> None:
    with stand_ins.running(tmp_path) as machine:
        machine.process.kill()
        machine.process.wait()
        with pytest.raises(SandboxDied):
            asyncio.run(costs(machine.run))
