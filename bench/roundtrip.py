"""A command round trip in a live sandbox against a plain vfork, exec and wait."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.bare import Bare
from bench.harness import Options, bar, figure, interleave, percentile, repeat, summary_ms
from bench.worlds import TRUE, library, one_fork, plain_world

BAR_ADDED_MS = 1.0


async def _async_trips(door: Any, snapshot_id: str, count: int) -> list[float]:
    sandbox = await door.create(snapshot_id=snapshot_id)
    taken = []
    try:
        await sandbox.run(TRUE)
        for _ in range(count):
            start = time.perf_counter()
            await sandbox.run(TRUE)
            taken.append(time.perf_counter() - start)
    finally:
        await sandbox.terminate()
    return taken


def run(options: Options) -> dict[str, Any]:
    """Both doors, each in blocks between blocks of the plain program."""
    snapshot = plain_world(options)
    door = library(options).AsyncSandbox
    block = options.samples(100, 20)
    with Bare(options) as bare, one_fork(snapshot) as sandbox:

        def trip() -> float:
            start = time.perf_counter()
            result = sandbox.run(TRUE)
            taken = time.perf_counter() - start
            if result.exit_code:
                raise RuntimeError(f"true gave {result.exit_code}: {result.stderr}")
            return taken

        for _ in range(10):
            trip()
        parts = {
            "plain": lambda: bare.plain_s(block),
            "sandbox": repeat(block, trip),
            "async_sandbox": lambda: asyncio.run(_async_trips(door, snapshot.snapshot_id, block)),
        }
        taken = interleave(options.samples(10, 2), parts)
    added_ms = {
        k: (percentile(taken[k], 0.5) - percentile(taken["plain"], 0.5)) * 1e3 for k in ("sandbox", "async_sandbox")
    }
    values: dict[str, Any] = {name: summary_ms(samples) for name, samples in taken.items()}
    values |= {f"{name}_added_p50_ms": round(value, 3) for name, value in added_ms.items()}
    bars = [bar("p50 over plain vfork, exec, wait", added_ms["sandbox"], BAR_ADDED_MS, unit="ms", strict=False)]
    return figure("roundtrip", "command round trip (true) in a live sandbox", values, bars)
