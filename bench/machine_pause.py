"""A live memory checkpoint: how long its guest stands still, as told and as a caller feels it."""

from __future__ import annotations

import threading
import time
from typing import Any

from bench.harness import Options, must, percentile, summary_ms
from bench.machines import Machine, Row, at_rest, row_figure, start_guest
from bench.worlds import checked

BAR_MS = 15.0
DIRTY_MB = 8


class _Asking:
    """A caller of the guest's init without a break, in a thread; the longest time without an answer is what it felt."""

    def __init__(self, sandbox: Any) -> None:
        self.longest_s = 0.0
        self.asked_n = 0
        self._sandbox = sandbox
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        last = time.perf_counter()
        while not self._done.is_set():
            self._sandbox.info()
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - last)
            self.asked_n += 1
            last = now

    def __enter__(self) -> _Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def run(options: Options) -> dict[str, Any]:
    """Checkpoints of one guest at rest, the same beside a caller, and the same with memory dirtied before each."""
    told: dict[str, list[float]] = {"at_rest": [], "beside_a_caller": [], f"{DIRTY_MB}_mb_dirtied": []}
    totals: list[float] = []
    felt: list[float] = []
    with start_guest(options) as source:
        door = type(source)
        machine = Machine.of(options, source)
        checked(source.run("/usr/bin/true"), "true")

        def freeze(name: str) -> None:
            snapshot = source.checkpoint(checkpoint_type="memory")
            told[name].append(snapshot.pause_s)
            totals.append(snapshot.total_s)
            door.delete_snapshot(snapshot.snapshot_id)

        for round_index in range(options.samples(20, 3)):
            at_rest(machine)
            freeze("at_rest")
            with _Asking(source) as asking:
                freeze("beside_a_caller")
            felt.append(asking.longest_s)
            fill = f"head -c {DIRTY_MB << 20} /dev/urandom > /dev/shm/{round_index}; rm -f /dev/shm/{round_index}"
            checked(source.run("/bin/sh", ["-c", fill]), "dirtying memory")
            freeze(f"{DIRTY_MB}_mb_dirtied")
        lives = source.run("/usr/bin/true").exit_code == 0
    values: dict[str, Any] = {name: summary_ms(samples) for name, samples in told.items()}
    values |= {"total": summary_ms(totals), "felt_by_the_caller": summary_ms(felt)}
    rows = [
        Row("pause of the source, p50", "ms", percentile(told["at_rest"], 0.5) * 1e3, BAR_MS),
        Row("the same as a caller feels it, p50", "ms", percentile(felt, 0.5) * 1e3),
    ]
    more = [must("the source goes on", lives)]
    return row_figure("machine_pause", "live memory checkpoint of a small guest", machine.accel, values, rows, more)
