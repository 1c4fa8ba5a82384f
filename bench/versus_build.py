"""Fork plus first result against building the demo's world again, uncached."""

from __future__ import annotations

import time
from typing import Any

from bench.harness import Options, Skip, bar, figure, ratio, summary_ms
from bench.worlds import fork_and_first_result_s, library

BAR = 1 / 500


def run(options: Options) -> dict[str, Any]:
    """Build, checkpoint and fork that very world; a build counts from the first command to the checkpoint's return."""
    worldfork = library(options)
    from worldfork.cli.demo_world import build_world

    builds: list[float] = []
    forks: list[float] = []
    said: list[str] = []
    for _ in range(options.samples(3, 1)):
        with worldfork.Sandbox.create() as sandbox:
            start = time.perf_counter()
            facts = build_world(sandbox, said.append)
            snapshot = sandbox.checkpoint()
            builds.append(time.perf_counter() - start)
        if not facts.from_registry:
            raise Skip("the package registry is out of reach, so the demo's world cannot be built in full")
        fork_and_first_result_s(snapshot)
        forks.extend(fork_and_first_result_s(snapshot) for _ in range(options.samples(50, 10)))
        worldfork.Sandbox.delete_snapshot(snapshot.snapshot_id)
    share = ratio(forks, builds)
    values = {
        "build": summary_ms(builds),
        "fork_and_first_result": summary_ms(forks),
        "p50_ratio": round(share, 6),
        "builds_per_fork": round(1 / share, 1),
    }
    return figure(
        "versus_build",
        "fork + first result against an uncached build of the demo world",
        values,
        [bar("p50 against the build", share, BAR, unit="ratio")],
    )
