"""Fork of a snapshot at the end of a chain of checkpoints against one at its start."""

from __future__ import annotations

from typing import Any

from bench.harness import Options, bar, figure, interleave, ratio, repeat, summary_ms
from bench.worlds import fork_and_first_result_s, library, one_fork, plain_world

BARS = {50: 2.0, 100: 2.5}


def run(options: Options) -> dict[str, Any]:
    """Grow one chain by a small file a checkpoint; then fork at three depths in turn."""
    door = library(options).Sandbox
    deepest = 10 if options.quick else max(BARS)
    marks = (1, 5, 10) if options.quick else (1, 50, 100)
    chain: list[Any] = []
    with one_fork(plain_world(options)) as sandbox:
        for level in range(1, deepest + 1):
            sandbox.write_file(f"/workspace/level/{level:03d}", f"{level}\n".encode())
            chain.append(sandbox.checkpoint())
    kept = {depth: chain[depth - 1] for depth in marks}
    for snapshot in kept.values():
        fork_and_first_result_s(snapshot)
    block = options.samples(10, 5)
    taken = interleave(
        options.samples(15, 2),
        {f"depth_{depth}": repeat(block, fork_and_first_result_s, s) for depth, s in kept.items()},
    )
    with one_fork(chain[-1]) as last:
        levels = len(last.list_directory("/workspace/level").entries)
    for snapshot in reversed(chain):
        door.delete_snapshot(snapshot.snapshot_id)
    if levels != deepest:
        raise RuntimeError(f"the last of {deepest} checkpoints shows {levels} files")
    first = taken[f"depth_{marks[0]}"]
    shares = {depth: ratio(taken[f"depth_{depth}"], first) for depth in marks[1:]}
    values: dict[str, Any] = {name: summary_ms(samples) for name, samples in taken.items()}
    values |= {f"depth_{depth}_p50_ratio": round(share, 3) for depth, share in shares.items()}
    limits = dict(zip(marks[1:], BARS.values(), strict=True))
    bars = [bar(f"depth {d} against depth 1, p50", shares[d], limits[d], unit="ratio") for d in marks[1:]]
    return figure("depth", "fork by depth of the chain", values, bars)
