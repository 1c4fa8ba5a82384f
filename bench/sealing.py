"""Sealing a layer like a site-packages tree against `cp -a` of it, in processor time; and forks while it is sealed."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import Options, bar, figure, interleave, must, repeat, say, summary_ms
from bench.worlds import fork_and_first_result_s, inside, library

FILES, BYTES = 11_000, 520_000_000
BAR = 2.0

MAKE_WORLD = """
import os, random, sys
count, total = int(sys.argv[1]), int(sys.argv[2])
chance = random.Random(11)
sizes = [int(chance.lognormvariate(8.7, 1.4)) for _ in range(count)]
large = max(1, count // 120)
left = total - sum(sizes)
sizes += [left // large + (number % 7 - 3) * (left // large // 5) for number in range(large)]
block = random.Random(12).randbytes(1 << 24)
for number, size_bytes in enumerate(sizes):
    place = f"/workspace/lib/package{number // 60:03d}" + "/sub" * (number % 3)
    os.makedirs(place, exist_ok=True)
    with open(f"{place}/module_{number:05d}.py", "wb") as out:
        out.write(number.to_bytes(8, "little"))
        for start in range(0, size_bytes - 8, len(block)):
            begin = number * 997 % 65536
            out.write(block[begin : begin + min(len(block), size_bytes - 8 - start)])
"""
SEAL_FOR_EVER = """
import os, sys
from worldfork.core.settings import load_settings
from worldfork.store import faultpoints
from worldfork.store.home import open_home
from worldfork.keeping.sealing import manifest_path, seal
from worldfork.store.store import Store
store = Store.open(open_home(load_settings()))
layer_id, stands_still = sys.argv[1], sys.argv[2] == "still"
def wait(step):
    if step == "seal:synced":
        print(step, flush=True)
        if stands_still:
            sys.stdin.read()
faultpoints.install(wait)
while True:
    manifest_path(store, layer_id).unlink(missing_ok=True)
    seal(store, layer_id)
"""


def run(options: Options) -> dict[str, Any]:
    """Copy and seal in turn; then fork beside a process that seals all the time, and beside one that stopped in it."""
    count = options.samples(FILES, 1500)
    total = options.samples(BYTES, 70_000_000)
    own = Options(quick=options.quick, home=options.home / "sealing", data=options.data)
    os.environ["WORLDFORK_UPKEEP"] = "off"

    def build(sandbox: Any) -> None:
        say(f"  making a world of {count} files, {total / 1e6:.0f} MB (once)")
        inside(sandbox, MAKE_WORLD, str(count), str(total), timeout_s=1800)

    world = library(own).world(f"bench-sealing-{count}-{total}", build=build)
    from worldfork.keeping.sealing import seal
    from worldfork.lineage.place import place

    store = place().store
    layer_id = store.snapshot(world.snapshot_id).layers[0]
    sealed = seal(store, layer_id)
    source, target = store.layer_path(layer_id), own.home / "copy"
    taken = interleave(
        options.samples(7, 2),
        {
            "copy": lambda: [_copy_s(source, target)],
            "seal": lambda: [_seal_s(layer_id)],
        },
    )
    beside, alone_s, still = _forks(options, world, layer_id)
    values = {
        "files": sealed.entries,
        "logical_bytes": sealed.logical_bytes,
        "copy_cpu_s": [round(each, 3) for each in taken["copy"]],
        "seal_cpu_s": [round(each, 3) for each in taken["seal"]],
        "fork_alone": summary_ms(beside["alone"]),
        "fork_beside_a_seal": summary_ms(beside["sealing"]),
        "fork_beside_a_stopped_seal_ms": [round(each * 1e3, 3) for each in still],
        "one_seal_wall_s": round(alone_s, 3),
    }
    bars = [
        bar(
            "seal against cp -a, processor time, best of each",
            min(taken["seal"]) / min(taken["copy"]),
            BAR,
            unit="ratio",
        ),
        must("forks while the process that seals their layer stands still in it", len(still) == 3),
        must("the slowest fork beside a seal is faster than a seal", max(beside["sealing"]) < alone_s),
    ]
    title = f"sealing a layer of {count} files, {total / 1e6:.0f} MB"
    return figure(
        "sealing", title, values, bars, "the best of each, since a busy machine makes cp look worse than it is"
    )


def _seal_s(layer_id: str) -> float:
    """Processor seconds of a seal."""
    from worldfork.keeping.sealing import manifest_path, seal
    from worldfork.lineage.place import place

    manifest_path(place().store, layer_id).unlink()
    before = resource.getrusage(resource.RUSAGE_SELF)
    seal(place().store, layer_id)
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _copy_s(source: Path, target: Path) -> float:
    """Processor seconds of a copy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    shutil.rmtree(target)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _forks(options: Options, world: Any, layer_id: str) -> tuple[dict[str, list[float]], float, list[float]]:
    """Fork alone, beside a process that seals again and again, and beside one that stands still in the middle of it."""
    fork_and_first_result_s(world)
    block = options.samples(10, 5)

    def beside() -> list[float]:
        with _sealing(layer_id, "on"):
            return repeat(block, fork_and_first_result_s, world)()

    taken = interleave(
        options.samples(5, 2), {"alone": repeat(block, fork_and_first_result_s, world), "sealing": beside}
    )
    with _sealing(layer_id, "still"):
        still = repeat(3, fork_and_first_result_s, world)()
    start = time.perf_counter()
    _seal_again(layer_id)
    return taken, time.perf_counter() - start, still


def _seal_again(layer_id: str) -> None:
    from worldfork.keeping.sealing import manifest_path, seal
    from worldfork.lineage.place import place

    manifest_path(place().store, layer_id).unlink(missing_ok=True)
    seal(place().store, layer_id)


@contextmanager
def _sealing(layer_id: str, how: str) -> Iterator[None]:
    """A process that is sealing a layer during the block."""
    with subprocess.Popen(
        ["nice", sys.executable, "-c", SEAL_FOR_EVER, layer_id, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as sealer:
        assert sealer.stdout is not None
        try:
            if not sealer.stdout.readline():
                raise RuntimeError("the process that seals ended")
            yield
            if sealer.poll() is not None:
                raise RuntimeError("the process that seals ended")
        finally:
            sealer.kill()
