"""Pruning ten thousand snapshots down to a hundred while forks go on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from bench.harness import Options, bar, figure, must, ratio, say, summary_ms
from bench.worlds import fork_and_first_result_s, library

SNAPSHOTS, KEPT = 10_000, 100
FORK_EVERY_S = 0.25
BAR_S, BAR_MIB = 60.0, 256
QUIET_FORKS = 40
PROGRAM = "from worldfork.cli.main import main; main()"


def run(options: Options) -> dict[str, Any]:
    """Forks at a steady rate in this process; `worldfork prune` in one of its own, which is timed and weighed."""
    count, kept = (600, 50) if options.quick else (SNAPSHOTS, KEPT)
    own = Options(quick=options.quick, home=options.home / "prune", data=options.data)
    world = library(own).world("bench-prune", build=lambda sandbox: None)
    before = _prune(0)
    made = time.perf_counter()
    newest = _publish(world.snapshot_id, count)
    made = time.perf_counter() - made
    say(f"  {count} snapshots in {made:.1f} s")
    forks = _Forks(newest)
    with forks.going():
        forks.wait_for(10 if options.quick else QUIET_FORKS)
        quiet = forks.take()
        pruned = _prune(kept)
        busy = forks.take()
    values = {
        "snapshots": count,
        "made_s": round(made, 1),
        "pruned": pruned,
        "forks_before": summary_ms(quiet),
        "forks_meanwhile": summary_ms(busy) if busy else {"n": 0},
        "p50_ratio": round(ratio(busy, quiet), 3) if busy else None,
        "fork_errors": forks.errors,
        "prune_of_nothing": before,
    }
    left = _prune(0)
    bars = [
        bar("prune", pruned["took_s"], BAR_S, unit="s"),
        bar("memory of the pruning process at its peak", pruned["peak_mib"], BAR_MIB, unit="mib"),
        must("no fork fails", not forks.errors, said=f"{len(busy)} forks meanwhile"),
        must("it keeps what it should", left["deleted"] == kept and pruned["deleted"] == count - kept),
        must("nothing fails", pruned["failures"] == 0),
        bar("time between two forks meanwhile", _gap_s(pruned["took_s"], busy), FORK_EVERY_S * 1.5, unit="s"),
    ]
    return figure("prune", f"prune of {count} snapshots down to {kept} beside 4 forks a second", values, bars)


def _gap_s(took_s: float, busy: list[float]) -> float:
    return took_s / len(busy) if busy else took_s


def _prune(kept: int) -> dict[str, Any]:
    """Run the program; return what it said, how long it took and how much memory it had at its peak."""
    line = [sys.executable, "-c", PROGRAM, "prune", "--keep-last", str(kept), "--json"]
    start = time.perf_counter()
    with subprocess.Popen(line, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        said = json.loads(running.stdout.read())
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    took_s = time.perf_counter() - start
    return {
        "deleted": len(said["deleted"]),
        "layers": len(said["layers"]),
        "failures": len(said["failures"]),
        "took_s": round(took_s, 3),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "peak_mib": round(usage.ru_maxrss / 1024, 1),
    }


def _publish(world_id: str, count: int) -> str:
    """Publish snapshots of the world with a small layer each, all durable; return the id of the last."""
    from worldfork.core.ids import new_id
    from worldfork.lineage.place import place

    store = place().store
    world = store.snapshot(world_id)
    record = world
    waiting = []
    for number in range(count):
        draft = store.begin_layer(form=world.form)
        (draft.path / "workspace").mkdir(parents=True)
        (draft.path / "workspace" / "number").write_text(f"{number}\n" * 100)
        record = dataclasses.replace(
            world,
            snapshot_id=new_id("sn"),
            parent_id=world_id,
            layers=(draft.layer_id, *world.layers),
            created_s=time.time(),
        )
        store.publish(record, [draft.layer_id])
        waiting.append(record.snapshot_id)
        if len(waiting) == 1000 or number == count - 1:
            failed = store.make_all_durable(waiting)
            if failed:
                raise RuntimeError(f"not durable: {failed}")
            waiting.clear()
    return record.snapshot_id


class _Forks:
    """Sandboxes that start at a steady rate, each in a thread of its own, so that a slow one delays no other."""

    def __init__(self, snapshot_id: str) -> None:
        self._snapshot_id = snapshot_id
        self._taken: list[float] = []
        self._condition = threading.Condition()
        self._stop = threading.Event()
        self.errors: list[str] = []

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        thread = threading.Thread(target=self._start_them)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def wait_for(self, count: int) -> None:
        with self._condition:
            self._condition.wait_for(lambda: len(self._taken) + len(self.errors) >= count, timeout=120)

    def take(self) -> list[float]:
        """Return how long the forks since the last call took, in seconds."""
        with self._condition:
            taken, self._taken = self._taken, []
        return taken

    def _start_them(self) -> None:
        threads = []
        due_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            threads.append(threading.Thread(target=self._one))
            threads[-1].start()
            due_s += FORK_EVERY_S
        for thread in threads:
            thread.join()

    def _one(self) -> None:
        try:
            taken: float | None = fork_and_first_result_s(_Source(self._snapshot_id))
        except Exception as error:
            taken = None
            with self._condition:
                self.errors.append(f"{type(error).__name__}: {error}")
        with self._condition:
            if taken is not None:
                self._taken.append(taken)
            self._condition.notify_all()


class _Source:
    """A snapshot by its id."""

    def __init__(self, snapshot_id: str) -> None:
        self._snapshot_id = snapshot_id

    def fork(self, n: int) -> Any:
        from worldfork import Sandbox

        return Sandbox.fork_snapshot(self._snapshot_id, n)
