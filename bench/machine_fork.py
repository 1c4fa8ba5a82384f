"""One memory fork at a time: until it is handed out, and until its first command has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.harness import Options, interleave, percentile, repeat, summary_ms
from bench.machines import Row, first_result_s, frozen_guest, row_figure

BAR_READY_MS, BAR_FIRST_MS = 75.0, 180.0
COLUMNS = {"microvm": "memory fork", "microvm_disk": "restore of the disk in a machine", "namespace": "fork"}


def run(options: Options) -> dict[str, Any]:
    """Take all columns in turns; the first fork of each, which fetches what the others find there, is told apart."""
    ready: dict[str, list[float]] = {name: [] for name in COLUMNS}

    def one(name: str, fork: Callable[[], list[Any]]) -> float:
        start = time.perf_counter()
        child = fork()[0]
        forked = time.perf_counter()
        try:
            first_result_s(child)
            answered = time.perf_counter()
        finally:
            child.terminate()
        ready[name].append(forked - start)
        return answered - start

    with frozen_guest(options) as frozen:
        forks = frozen.forks()
        first = {name: {"first_result_ms": one(name, fork) * 1e3, "ready_ms": ready[name].pop() * 1e3}
                 for name, fork in forks.items()}  # fmt: skip
        parts = {name: repeat(options.samples(10, 2), one, name, fork) for name, fork in forks.items()}
        taken = interleave(options.samples(5, 1), parts)
        accel = frozen.accel

    def p50_ms(samples: dict[str, list[float]], name: str) -> float:
        return percentile(samples[name], 0.5) * 1e3

    rows = [
        Row("memory fork: ready, p50", "ms", p50_ms(ready, "microvm"), BAR_READY_MS, p50_ms(ready, "namespace")),
        Row("memory fork: first result of true, p50", "ms", p50_ms(taken, "microvm"), BAR_FIRST_MS,
            p50_ms(taken, "namespace")),
        Row("filesystem restore: ready, p50", "ms", p50_ms(ready, "microvm_disk"), None, p50_ms(ready, "namespace")),
        Row("filesystem restore: first result of true, p50", "ms", p50_ms(taken, "microvm_disk"), None,
            p50_ms(taken, "namespace")),
    ]  # fmt: skip
    values: dict[str, Any] = {
        name: {"what": what, "ready": summary_ms(ready[name]), "first_result": summary_ms(taken[name])}
        for name, what in COLUMNS.items()
    }
    values["first_of_all"] = first
    return row_figure("machine_fork", "memory fork, one at a time", accel, values, rows)
