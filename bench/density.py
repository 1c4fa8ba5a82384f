"""500 live forks at once: memory a fork, every one answers, nothing stays."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

from bench.harness import Options, available_memory_bytes, bar, figure, must, own_memory_bytes, summary_ms
from bench.leaks import footprint, kernel_group_counts, leak_check, network_namespace_count
from bench.worlds import TRUE, library, plain_world

COUNT = 500
BAR_MIB = 1.5
_MIB = 1 << 20


async def _settled_available_bytes() -> int:
    readings = []
    for _ in range(5):
        readings.append(available_memory_bytes())
        await asyncio.sleep(0.2)
    return sorted(readings)[2]


async def _live(door: Any, snapshot_id: str, count: int) -> dict[str, Any]:
    snapshot = await door.get_snapshot(snapshot_id)
    warm = (await snapshot.fork_async(4)).unwrap()
    await asyncio.gather(*(child.run(TRUE) for child in warm))
    await asyncio.gather(*(child.terminate() for child in warm))
    gc.collect()
    available, owner = await _settled_available_bytes(), own_memory_bytes()
    start = time.perf_counter()
    children = (await snapshot.fork_async(count)).unwrap()
    forked_s = time.perf_counter() - start
    try:
        answers: list[float] = []
        for child in children:
            asked = time.perf_counter()
            result = await child.run(TRUE)
            answers.append(time.perf_counter() - asked)
            if result.exit_code:
                raise RuntimeError(f"a fork answered {result.exit_code}: {result.stderr}")
        gc.collect()
        fell = available - await _settled_available_bytes()
        grew = own_memory_bytes() - owner
    finally:
        start = time.perf_counter()
        await asyncio.gather(*(child.terminate() for child in children))
        ended_s = time.perf_counter() - start
    return {"answers": answers, "fell": fell, "grew": grew, "forked_s": forked_s, "ended_s": ended_s}


def run(options: Options) -> dict[str, Any]:
    """One process owns all of them; each runs a command before memory is read."""
    count = COUNT if not options.quick else 50
    door = library(options).AsyncSandbox
    snapshot = plain_world(options)
    asyncio.run(_live(door, snapshot.snapshot_id, 4))
    before = footprint(options.home / "home")
    kernel = kernel_group_counts()
    namespaces = network_namespace_count()
    seen = asyncio.run(_live(door, snapshot.snapshot_id, count))
    left = leak_check(options.home / "home", before)
    per_fork = (seen["fell"] + seen["grew"]) / count / _MIB
    values = {
        "forks_n": count,
        "all_forked_after_s": round(seen["forked_s"], 3),
        "all_ended_after_s": round(seen["ended_s"], 3),
        "answer": summary_ms(seen["answers"]),
        "mem_available_fall_bytes": seen["fell"],
        "owner_growth_bytes": seen["grew"],
        "per_fork_mib": round(per_fork, 3),
        "kernel_group_count_growth_n": {k: v - kernel[k] for k, v in kernel_group_counts().items() if v != kernel[k]},
        "network_namespace_growth_n": network_namespace_count() - namespaces,
    }
    bars = [
        must("all answer", len(seen["answers"]) == count),
        bar("memory a fork", per_fork, BAR_MIB, unit="mib"),
        left,
    ]
    return figure("density", f"{count} live forks at once", values, bars)
