"""Restore from the end of a chain of 400 checkpoints against one of 4, once upkeep has squashed the long one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from bench.harness import Options, bar, figure, interleave, must, ratio, repeat, say, summary_ms
from bench.worlds import fork_and_first_result_s, inside, library, one_fork, plain_world

SHORT, LONG = 4, 400
BAR = 1.5
STEP = """
import os, sys
number = int(sys.argv[1])
os.makedirs("/workspace/steps", exist_ok=True)
with open(f"/workspace/steps/{number:04d}", "w") as out:
    out.write(f"{number}")
with open("/workspace/latest", "w") as out:
    out.write(f"{number}")
if number % 10 == 0:
    os.remove(f"/workspace/steps/{number - 5:04d}")
"""
LOOK = """
import os
print(open("/workspace/latest").read(), *sorted(os.listdir("/workspace/steps")))
"""


def run(options: Options) -> dict[str, Any]:
    """Grow a chain; restore from both of its ends in turn, before and after the squash."""
    os.environ["WORLDFORK_UPKEEP"] = "off"  # so that it happens when it is meant to
    door = library(options).Sandbox
    long = 100 if options.quick else LONG
    chain: list[Any] = []
    with one_fork(plain_world(options)) as sandbox:
        for number in range(1, long + 1):
            inside(sandbox, STEP, str(number))
            chain.append(sandbox.checkpoint())
    short, deep = chain[SHORT - 1], chain[-1]
    before = _in_turn(options, short, deep)
    squash_s, said = _squash(chain)
    say(f"squashed in {squash_s:.1f} s")
    after = _in_turn(options, short, deep)
    layers = {name: _depth(snapshot) for name, snapshot in (("short", short), ("deep", deep))}
    with one_fork(deep) as last:
        seen = inside(last, LOOK).split()
    expected = [f"{number:04d}" for number in range(1, long + 1) if number % 10 != 5 or number + 5 > long]
    for snapshot in reversed(chain):
        door.delete_snapshot(snapshot.snapshot_id)
    share = ratio(after["deep"], after["short"])
    values = {f"{name}_before": summary_ms(samples) for name, samples in before.items()}
    values |= {f"{name}_after": summary_ms(samples) for name, samples in after.items()}
    return figure(
        "deep_chain",
        f"restore from a chain of {long} checkpoints",
        {
            **values,
            "before_p50_ratio": round(ratio(before["deep"], before["short"]), 3),
            "layers_before": long + layers["short"] - SHORT,
            "layers_after": layers["deep"],
            "squash_s": round(squash_s, 2),
        },
        [
            bar(f"chain of {long} against one of {SHORT}, p50", share, BAR, unit="ratio"),
            must("the last snapshot shows what its checkpoint saw", seen == [str(long), *expected]),
            must("upkeep had no failure", not said, said=said),
        ],
    )


def _in_turn(options: Options, short: Any, deep: Any) -> dict[str, list[float]]:
    for snapshot in (short, deep):
        fork_and_first_result_s(snapshot)
    block = options.samples(10, 5)
    parts = {name: repeat(block, fork_and_first_result_s, s) for name, s in (("short", short), ("deep", deep))}
    return interleave(options.samples(15, 2), parts)


def _store() -> Any:
    from worldfork.lineage.place import place

    return place().store


def _squash(chain: list[Any]) -> tuple[float, str]:
    """Have upkeep do its work, as it would by itself; return how long that took, and what it complained of."""
    errors = _store().make_all_durable([snapshot.snapshot_id for snapshot in chain])
    if errors:
        raise RuntimeError(f"not durable: {errors}")
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "worldfork.keeping.upkeep"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as upkeep:
        assert upkeep.stderr is not None
        said = upkeep.stderr.read()
        upkeep.wait()
    return time.perf_counter() - begin, said.strip()


def _depth(snapshot: Any) -> int:
    return len(_store().snapshot(snapshot.snapshot_id).layers)
