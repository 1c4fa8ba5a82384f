"""How long a checkpoint of an idle sandbox takes until it is ready, by the size of the change."""

from __future__ import annotations

import time
from typing import Any

from bench.harness import Options, bar, figure, interleave, ratio, repeat, summary_ms
from bench.worlds import TRUE, checked, library, make_files, one_fork, plain_world

BAR_MS, BAR_RATIO = 10.0, 2.0
SMALL = (34, 30_000)
LARGE = (10_000, 30_000)


def run(options: Options) -> dict[str, Any]:
    """Each sample: a fresh fork, the change, the checkpoint, and `true` in the sandbox that goes on."""
    door = library(options).Sandbox
    snapshot = plain_world(options)
    answers: list[float] = []

    def one(count: int, size_bytes: int) -> float:
        with one_fork(snapshot) as sandbox:
            make_files(sandbox, "/workspace/change", count, size_bytes)
            start = time.perf_counter()
            made = sandbox.checkpoint()
            taken = time.perf_counter() - start
            checked(sandbox.run(TRUE), "true after a checkpoint")
            answers.append(time.perf_counter() - start - taken)
            last = f"/workspace/change/{(count - 1) // 1000:04d}/{count - 1:07d}.bin"
            with one_fork(made) as child:
                checked(child.run("/usr/bin/test", ["-s", last]), "the last file in a fork of the checkpoint")
        door.delete_snapshot(made.snapshot_id)
        return taken

    one(*SMALL)
    taken = interleave(
        options.samples(15, 2),
        {"changed_1_mb": repeat(1, lambda: one(*SMALL)), "changed_300_mb": repeat(1, lambda: one(*LARGE))},
    )
    values: dict[str, Any] = {name: summary_ms(samples) for name, samples in taken.items()}
    share = ratio(taken["changed_300_mb"], taken["changed_1_mb"])
    values |= {"p50_ratio": round(share, 3), "first_command_after": summary_ms(answers)}
    bars = [
        bar("1 MB: p50", values["changed_1_mb"]["p50_ms"], BAR_MS, unit="ms"),
        bar("300 MB in 10,000 files: p50", values["changed_300_mb"]["p50_ms"], BAR_MS, unit="ms"),
        bar("300 MB against 1 MB, p50", share, BAR_RATIO, unit="ratio"),
    ]
    return figure("checkpoint_idle", "checkpoint (ready) of an idle sandbox that goes on running", values, bars)
