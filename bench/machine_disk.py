"""A filesystem checkpoint of a live sandbox in which 10 MB have changed, under either driver."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from bench.harness import Options, interleave, must, percentile, summary_ms
from bench.machines import Machine, Row, row_figure, start_guest
from bench.worlds import checked

BAR_S = 2.0
FILES = 10
_CHANGE = (
    f"rm -rf /workspace/change; mkdir -p /workspace/change; for i in $(seq {FILES}); do"
    " head -c 1000000 /dev/urandom > /workspace/change/$i; done; cat /workspace/change/* | sha256sum"
)
_READ = "cat /workspace/change/* | sha256sum"


def run(options: Options) -> dict[str, Any]:
    """Change, freeze, look at the frozen content in a fork under the other driver, and go on."""
    pauses: dict[str, list[float]] = {"microvm": [], "namespace": []}
    sizes: dict[str, list[int]] = {"microvm": [], "namespace": []}
    other = {"microvm": "namespace", "namespace": "microvm"}
    wrong: list[str] = []
    with start_guest(options) as machine, start_guest(options, "namespace") as beside:
        sources = {"microvm": machine, "namespace": beside}
        accel = Machine.of(options, machine).accel
        warm = {name: source.start_process("/usr/bin/sleep", ["100000"]) for name, source in sources.items()}

        def one(name: str, checked_by: str) -> list[float]:
            source = sources[name]
            content = checked(source.run("/bin/sh", ["-c", _CHANGE]), "the change")
            start = time.perf_counter()
            snapshot = source.checkpoint()
            took = time.perf_counter() - start
            pauses[name].append(snapshot.pause_s)
            sizes[name].append(snapshot.size_bytes or 0)
            with snapshot.fork(1, driver=checked_by).unwrap()[0] as child:
                found = checked(child.run("/bin/sh", ["-c", _READ]), "reading the change")
            if found != content:
                wrong.append(f"{name}, read under {checked_by}: {found.strip()} is not {content.strip()}")
            type(source).delete_snapshot(snapshot.snapshot_id)
            return [took]

        parts = {name: partial(one, name, other[name]) for name in sources}
        taken = interleave(options.samples(7, 1), parts)
        for name in sources:
            one(name, name)
        lost = [name for name, source in sources.items() if not source.get_process(warm[name].pid)]
    rows = [
        Row("filesystem checkpoint, 10 MB changed, p50", "s", percentile(taken["microvm"], 0.5), BAR_S,
            percentile(taken["namespace"], 0.5)),
        Row("the same: standing still, p50", "s", percentile(pauses["microvm"], 0.5), None,
            percentile(pauses["namespace"], 0.5)),
    ]  # fmt: skip
    values: dict[str, Any] = {
        name: {"total": summary_ms(taken[name]), "pause": summary_ms(pauses[name]), "stored_bytes": max(sizes[name])}
        for name in sources
    }
    more = [
        must("the content under both drivers", not wrong, said="; ".join(wrong)),
        must("what ran goes on", not lost, said=", ".join(lost)),
    ]
    return row_figure("machine_disk", "filesystem checkpoint with 10 MB changed", accel, values, rows, more)
