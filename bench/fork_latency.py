"""Fork plus first command result, one at a time, against the bare program."""

from __future__ import annotations

import time
from typing import Any

from bench.bare import Bare, shape_of
from bench.harness import Options, bar, figure, interleave, ratio, repeat, summary_ms
from bench.worlds import TRUE, fork_and_first_result_s, one_fork, plain_world

BAR_P50, BAR_P99 = 2.0, 3.0


def run(options: Options) -> dict[str, Any]:
    """Interleave blocks of bare, of forks through the synchronous door, and of their parts."""
    snapshot = plain_world(options)
    steps: dict[str, list[float]] = {"fork": [], "command": [], "terminate": []}

    def fork_only() -> float:
        start = time.perf_counter()
        child = snapshot.fork(1).unwrap()[0]
        forked = time.perf_counter()
        child.run(TRUE)
        answered = time.perf_counter()
        child.terminate()
        steps["fork"].append(forked - start)
        steps["command"].append(answered - forked)
        steps["terminate"].append(time.perf_counter() - answered)
        return answered - start

    with Bare(options) as bare:
        with one_fork(snapshot) as sandbox:
            shape = shape_of(sandbox)
        block = options.samples(50, 10)
        for _ in range(5):
            fork_and_first_result_s(snapshot)
        bare.latencies_s(shape, 10)
        parts = {"bare": lambda: bare.latencies_s(shape, block), "fork_and_first_result": repeat(block, fork_only)}
        taken = interleave(options.samples(12, 2), parts)
        profile = bare.steps_us(shape, options.samples(200, 20))
    p50 = ratio(taken["fork_and_first_result"], taken["bare"])
    p99 = ratio(taken["fork_and_first_result"], taken["bare"], 0.99)
    values: dict[str, Any] = {name: summary_ms(samples) for name, samples in taken.items()}
    values["parts"] = {name: summary_ms(samples) for name, samples in steps.items()}
    values |= {"p50_ratio": round(p50, 3), "p99_ratio": round(p99, 3), "bare_steps": profile}
    values["shape"] = {"lowers_n": len(shape.lowers), "binds": list(shape.binds)}
    bars = [
        bar("p50 against bare", p50, BAR_P50, unit="ratio", strict=False),
        bar("p99 against bare", p99, BAR_P99, unit="ratio", strict=False),
    ]
    return figure("fork_latency", "fork + first command result, one at a time", values, bars)
