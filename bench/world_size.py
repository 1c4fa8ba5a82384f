"""The same fork on a small world and on one of 5 GB in 500,000 files, with a warm and with a cold page cache."""

from __future__ import annotations

from typing import Any

from bench.harness import Options, Skip, bar, figure, interleave, ratio, repeat, say, summary_ms
from bench.worlds import drop_page_cache, fork_and_first_result_s, library, make_files

BAR_WARM = 1.1
SMALL = (5_000, 10_000)
LARGE = (500_000, 10_000)


def _world(options: Options, count: int, size_bytes: int) -> Any:
    """A world of `count` files, made once per store."""

    def build(sandbox: Any) -> None:
        say(f"  making a world of {count} files, {count * size_bytes / 1e6:.0f} MB (once)")
        make_files(sandbox, "/workspace/data", count, size_bytes, timeout_s=1800)

    return library(options).world(f"bench-size-{count}-{size_bytes}", build=build)


def run(options: Options) -> dict[str, Any]:
    """Warm samples are interleaved; before a cold one the host's caches are emptied."""
    small = _world(options, *SMALL)
    large = _world(options, *((50_000, 10_000) if options.quick else LARGE))
    both = {"small": small, "large": large}
    for snapshot in both.values():
        for _ in range(3):
            fork_and_first_result_s(snapshot)
    block = options.samples(10, 5)
    warm = interleave(
        options.samples(20, 2),
        {name: repeat(block, fork_and_first_result_s, s) for name, s in both.items()},
    )

    def cold(snapshot: Any) -> float:
        drop_page_cache()
        return fork_and_first_result_s(snapshot)

    values: dict[str, Any] = {f"warm_{name}": summary_ms(samples) for name, samples in warm.items()}
    notes = [f"small: {SMALL[0]} files of {SMALL[1]} bytes; large: {LARGE[0]} files of {LARGE[1]} bytes"]
    try:
        chilled = interleave(options.samples(5, 1), {name: repeat(1, cold, s) for name, s in both.items()})
    except Skip as reason:
        notes.append(str(reason))
    else:
        values |= {f"cold_{name}": summary_ms(samples) for name, samples in chilled.items()}
        values["cold_p50_ratio"] = round(ratio(chilled["large"], chilled["small"]), 3)
    share = ratio(warm["large"], warm["small"])
    values["warm_p50_ratio"] = round(share, 3)
    return figure(
        "world_size",
        "fork of 5 GB in 500,000 files against 50 MB",
        values,
        [bar("warm p50, large against small", share, BAR_WARM, unit="ratio")],
        *notes,
    )
