"""Who took the CPU: what is seen of a sandbox while something in it runs."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.unit.reward.played import PlayedSandbox

from worldfork.core.errors import SandboxDied
from worldfork.reward.blame import Looks, is_busy

TICKS = os.sysconf("SC_CLK_TCK")


def process(state: str, used_s: float) -> bytes:
    return f"9 (odd ) name) {state} 1 9 9 0 -1 0 0 0 0 0 {int(used_s * TICKS)} 0 0 0 20 0".encode()


def seen(*looks: dict[int, bytes]) -> Looks:
    found = Looks()

    async def run() -> None:
        for processes in looks:
            await found.look(PlayedSandbox(files={f"/proc/{pid}/stat": text for pid, text in processes.items()}))  # type: ignore[arg-type]

    asyncio.run(run())
    return found


def test_what_is_gone_at_the_end_still_used_what_it_was_seen_to_use() -> None:
    children = {20 + each: process("S", 2.0) for each in range(3)}
    assert seen({7: process("S", 0.1), **children}, {7: process("S", 0.2)}).busy(wall_s=10.0)
    assert not seen({7: process("S", 0.1)}, {7: process("S", 0.2)}).busy(wall_s=10.0)


def test_a_process_counts_once_however_often_it_is_seen() -> None:
    assert not seen(*[{7: process("S", 2.0)}] * 5).busy(wall_s=10.0)


def test_a_sandbox_whose_processes_often_want_more_than_one_cpu_waits_for_itself() -> None:
    alone, crowd = {7: process("R", 0.0)}, {7: process("R", 0.0), 8: process("R", 0.0)}
    assert seen(alone, alone, crowd).busy(wall_s=10.0)
    assert not seen(alone, alone, alone, crowd).busy(wall_s=10.0)


def test_pid_1_is_ours() -> None:
    assert not seen({1: process("R", 0.0), 7: process("R", 0.0)}).busy(wall_s=10.0)


def test_the_longest_wait_is_kept() -> None:
    found = Looks()
    files = {"/proc/7/stat": process("R", 0.0), "/proc/7/schedstat": b"1 9000000000 2\n"}
    asyncio.run(found.look(PlayedSandbox(files=files)))  # type: ignore[arg-type]
    asyncio.run(found.look(PlayedSandbox(files={**files, "/proc/7/schedstat": b"odd"})))  # type: ignore[arg-type]
    assert found.waited_s == pytest.approx(9.0)


def test_a_sandbox_that_cannot_be_asked_is_busy() -> None:
    class Dead(PlayedSandbox):
        async def list_directory(self, path: str) -> object:  # type: ignore[override]
            raise SandboxDied("gone")

    assert asyncio.run(is_busy(Dead(), 10.0))  # type: ignore[arg-type]
