"""Bursts of forks from one snapshot: when does each child's first result arrive?"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.bare import Bare, Shape, shape_of
from bench.harness import Options, bar, figure, interleave, percentile, summary_ms
from bench.worlds import TRUE, library, one_fork, plain_world

SIZES = (8, 64, 256)
BARRED, BAR_P99 = 64, 3.0


async def _end(sandboxes: list[Any]) -> None:
    await asyncio.gather(*(sandbox.terminate() for sandbox in sandboxes))


async def _by_fork(snapshot: Any, size: int) -> list[float]:
    """One caller: fork(size), then `true` in every child; seconds since the call, one a child."""
    start = time.perf_counter()
    children = (await snapshot.fork_async(size)).unwrap()

    async def first(child: Any) -> float:
        result = await child.run(TRUE)
        if result.exit_code:
            raise RuntimeError(f"true gave {result.exit_code}: {result.stderr}")
        return time.perf_counter() - start

    try:
        return list(await asyncio.gather(*(first(child) for child in children)))
    finally:
        await _end(children)


async def _by_callers(door: Any, snapshot_id: str, size: int) -> list[float]:
    """`size` callers at once: each makes one sandbox of the snapshot and runs `true` in it."""
    start = time.perf_counter()
    children: list[Any] = []

    async def one() -> float:
        child = await door.create(snapshot_id=snapshot_id)
        children.append(child)
        result = await child.run(TRUE)
        if result.exit_code:
            raise RuntimeError(f"true gave {result.exit_code}: {result.stderr}")
        return time.perf_counter() - start

    try:
        return list(await asyncio.gather(*(one() for _ in range(size))))
    finally:
        await _end(children)


def _burst(bare: Bare, door: Any, snapshot_id: str, shape: Shape, size: int, rounds: int) -> dict[str, Any]:
    last: dict[str, list[float]] = {"fork_n": [], "callers": [], "bare": []}

    def noted(name: str, samples: list[float]) -> list[float]:
        last[name].append(max(samples))
        return samples

    async def fork_n() -> list[float]:
        return await _by_fork(await door.get_snapshot(snapshot_id), size)

    parts = {
        "bare": lambda: noted("bare", bare.latencies_s(shape, size, concurrency=size, burst=True)),
        "fork_n": lambda: noted("fork_n", asyncio.run(fork_n())),
        "callers": lambda: noted("callers", asyncio.run(_by_callers(door, snapshot_id, size))),
    }
    taken = interleave(rounds, parts)
    row: dict[str, Any] = {name: summary_ms(samples) for name, samples in taken.items()}
    for name in ("fork_n", "callers"):
        row[f"{name}_p99_ratio"] = round(percentile(taken[name], 0.99) / percentile(taken["bare"], 0.99), 3)
        row[f"{name}_p50_ratio"] = round(percentile(taken[name], 0.5) / percentile(taken["bare"], 0.5), 3)
    row["time_to_last_first_result"] = {name: summary_ms(samples) for name, samples in last.items()}
    return row


def run(options: Options) -> dict[str, Any]:
    """Both ways of asking for a burst against bare at the same concurrency; latencies count from the burst's start."""
    door = library(options).AsyncSandbox
    snapshot = plain_world(options)
    sizes = (8,) if options.quick else SIZES
    values: dict[str, Any] = {}
    with Bare(options) as bare:
        with one_fork(snapshot) as sandbox:
            shape = shape_of(sandbox)
        for size in sizes:
            rounds = options.samples({8: 20, 64: 6, 256: 3}[size], 2)
            values[f"burst_{size}"] = _burst(bare, door, snapshot.snapshot_id, shape, size, rounds)
    size = BARRED if BARRED in sizes else sizes[-1]
    judged = values[f"burst_{size}"]
    bars = [
        bar(f"fork({size}): p99 against bare at {size}", judged["fork_n_p99_ratio"], BAR_P99, unit="ratio"),
        bar(f"{size} callers: p99 against bare at {size}", judged["callers_p99_ratio"], BAR_P99, unit="ratio"),
    ]
    return figure("bursts", "bursts of forks from one snapshot", values, bars)
