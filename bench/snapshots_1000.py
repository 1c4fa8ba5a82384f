"""A thousand snapshots of one world, each a megabyte different: what they take, and whether the last is slower."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from bench.harness import Options, bar, figure, percentile, ratio, say, summary_ms
from bench.worlds import inside, library, one_fork

SNAPSHOTS = 1000
WORLD_FILES, WORLD_FILE_BYTES = 11_000, 47_300
CHANGED_FILES, CHANGED_FILE_BYTES = 4, 256 << 10
NEIGHBOURS = 20
BAR_STORED, BAR_TIME = 1.1, 1.3

MAKE_WORLD = """
import os, random, sys
count, size_bytes = int(sys.argv[1]), int(sys.argv[2])
for number in range(count):
    place = f"/workspace/data/{number // 100:03d}"
    os.makedirs(place, exist_ok=True)
    with open(f"{place}/{number:06d}.bin", "wb") as out:
        out.write(random.Random(number).randbytes(size_bytes))
"""
CHANGE = """
import os, random, sys
number, count, size_bytes = (int(word) for word in sys.argv[1:4])
os.makedirs("/workspace/change", exist_ok=True)
chance = random.Random(f"change {number}")
for file in range(count):
    with open(f"/workspace/change/{file}.bin", "wb") as out:
        out.write(chance.randbytes(size_bytes))
"""


def run(options: Options) -> dict[str, Any]:
    """Each snapshot: a fork of the world, a megabyte written in it, a checkpoint, and the end of the sandbox."""
    count = options.samples(SNAPSHOTS, 200)
    files = options.samples(WORLD_FILES, 1000)
    own = Options(quick=options.quick, home=options.home / "snapshots-1000", data=options.data)
    door = library(own).Sandbox

    def build(sandbox: Any) -> None:
        say(f"  making a world of {files} files, {files * WORLD_FILE_BYTES / 1e6:.0f} MB (once)")
        inside(sandbox, MAKE_WORLD, str(files), str(WORLD_FILE_BYTES), timeout_s=1800)

    world = library(own).world(f"bench-thousand-{files}-{WORLD_FILE_BYTES}", build=build)
    _tidy()
    for number in range(3):
        door.delete_snapshot(_one(world, -number)[0])
    _tidy()
    before_bytes = _disk_bytes(own.home / "home")
    ids, taken = [], []
    for number in range(count):
        snapshot_id, checkpoint_s = _one(world, number)
        ids.append(snapshot_id)
        taken.append(checkpoint_s)
    _wait_durable(ids)
    after_bytes = _disk_bytes(own.home / "home")
    for number in (0, count // 2, count - 1):
        _check(door, ids[number], number)
    _tidy()
    differences = count * CHANGED_FILES * CHANGED_FILE_BYTES
    first, last = taken[:NEIGHBOURS], taken[-NEIGHBOURS:]
    values = {
        "world_and_base_bytes": before_bytes,
        "stored_bytes": after_bytes,
        "differences_bytes": differences,
        "left_after_prune_bytes": _disk_bytes(own.home / "home"),
        f"checkpoints_1_to_{NEIGHBOURS}": summary_ms(first),
        f"checkpoints_{count - NEIGHBOURS + 1}_to_{count}": summary_ms(last),
        "all": summary_ms(taken),
        "p90_of_all_ms": round(percentile(taken, 0.9) * 1e3, 3),
    }
    bars = [
        bar(
            "stored beyond the world, by differences", (after_bytes - before_bytes) / differences, BAR_STORED, unit="x"
        ),
        bar("last checkpoints against first, p50", ratio(last, first), BAR_TIME, unit="ratio"),
    ]
    title = f"{count} snapshots of a world of {files * WORLD_FILE_BYTES / 1e6:.0f} MB, each 1 MiB different"
    return figure("snapshots_1000", title, values, bars)


def _one(world: Any, number: int) -> tuple[str, float]:
    """Make one snapshot; return its id and how many seconds its checkpoint took."""
    with one_fork(world) as sandbox:
        inside(sandbox, CHANGE, str(number), str(CHANGED_FILES), str(CHANGED_FILE_BYTES))
        start = time.perf_counter()
        made = sandbox.checkpoint()
        taken = time.perf_counter() - start
    return made.snapshot_id, taken


def _check(door: Any, snapshot_id: str, number: int) -> None:
    """Compare what a fork of a snapshot holds with what was written."""
    compare = f"""
import random
chance = random.Random("change {number}")
for file in range({CHANGED_FILES}):
    with open(f"/workspace/change/{{file}}.bin", "rb") as found:
        assert found.read() == chance.randbytes({CHANGED_FILE_BYTES})
with open("/workspace/data/001/000123.bin", "rb") as found:
    assert found.read() == random.Random(123).randbytes({WORLD_FILE_BYTES})
"""
    for sandbox in door.fork_snapshot(snapshot_id, 1).unwrap():
        inside(sandbox, compare)
        sandbox.terminate()


def _wait_durable(ids: list[str]) -> None:
    from worldfork.lineage.place import place

    failed = place().store.make_all_durable(ids)
    if failed:
        raise RuntimeError(f"not durable: {failed}")


def _tidy() -> None:
    """Remove the snapshots of an earlier run and what they leave."""
    from worldfork.keeping.keep_rules import KeepRules
    from worldfork.keeping.prune import prune
    from worldfork.lineage.place import place

    report = prune(place().store, KeepRules(last=0))
    if report.failures:
        raise RuntimeError(f"a prune failed: {report.failures[:3]}")


def _disk_bytes(home: Path) -> int:
    """Return what a directory takes on disk, as du says."""
    done = subprocess.run(["du", "-sx", "--block-size=1", str(home)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])
