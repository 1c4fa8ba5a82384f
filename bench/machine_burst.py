"""Sixteen forks at once: until all are handed out, and until all have ended their first command."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from bench.harness import Options, interleave, percentile, summary_ms
from bench.machines import Row, frozen_guest, row_figure
from bench.worlds import TRUE

COUNT = 16
BAR_READY_S, BAR_RESULTS_S = 0.9, 2.2


async def _burst(snapshot: Any, count: int, **options: Any) -> tuple[float, float]:
    """Fork, then `true` in every child at once: seconds until all are there, and until all have answered."""
    start = time.perf_counter()
    children = (await snapshot.fork_async(count, **options)).unwrap()
    ready_s = time.perf_counter() - start
    try:
        results = await asyncio.gather(*(child.run(TRUE) for child in children))
        answered_s = time.perf_counter() - start
    finally:
        await asyncio.gather(*(child.terminate() for child in children))
    wrong = [result for result in results if result.exit_code]
    if wrong:
        raise RuntimeError(f"true gave {wrong[0].exit_code} in {len(wrong)} of {count}: {wrong[0].stderr}")
    return ready_s, answered_s


def run(options: Options) -> dict[str, Any]:
    """Both columns in turns, after a small burst that fetches what all need."""
    ready: dict[str, list[float]] = {"microvm": [], "namespace": []}
    with frozen_guest(options) as frozen:
        sides: dict[str, tuple[Any, dict[str, str]]] = {
            "microvm": (frozen.memory, {}),
            "namespace": (frozen.disk, {"driver": "namespace"}),
        }

        def one(name: str) -> list[float]:
            snapshot, more = sides[name]
            ready_s, answered_s = asyncio.run(_burst(snapshot, COUNT, **more))
            ready[name].append(ready_s)
            return [answered_s]

        for snapshot, more in sides.values():
            asyncio.run(_burst(snapshot, 2, **more))
        taken = interleave(options.samples(9, 2), {name: partial(one, name) for name in sides})
        accel = frozen.accel
    rows = [
        Row(f"{COUNT} at once: all ready, p50", "s", percentile(ready["microvm"], 0.5), BAR_READY_S,
            percentile(ready["namespace"], 0.5)),
        Row(f"{COUNT} at once: all first results, p50", "s", percentile(taken["microvm"], 0.5), BAR_RESULTS_S,
            percentile(taken["namespace"], 0.5)),
    ]  # fmt: skip
    values = {
        name: {"all_ready": summary_ms(ready[name]), "all_first_results": summary_ms(taken[name])} for name in sides
    }
    return row_figure("machine_burst", f"{COUNT} memory forks at once", accel, values, rows)
