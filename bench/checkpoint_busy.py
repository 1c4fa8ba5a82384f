"""A checkpoint while a shell sleeps inside: how long the sandbox stands still, and what a second checkpoint stores."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from bench.harness import Options, bar, figure, must, summary_ms
from bench.worlds import checked, library, make_files, one_fork, plain_world

LARGE = (10_000, 30_000)
SMALL = (34, 30_000)
BAR_SECOND_BYTES = 3_000_000

# A process inside reads its own clock every millisecond and keeps the longest gap: the pause as the sandbox feels it.
_TICKER = """
import sys, time
longest, last = 0.0, time.monotonic()
sys.stdout.write("on\\n"); sys.stdout.flush()
import select
while not select.select([sys.stdin], [], [], 0.001)[0]:
    now = time.monotonic()
    longest = max(longest, now - last)
    last = now
print(longest)
"""


def _layer_bytes(home: Path) -> int:
    """Allocated bytes under the store's layers."""
    total = 0
    for directory, _, names in os.walk(home / "layers"):
        for name in names:
            total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def _ticking(sandbox: Any, act: Any) -> tuple[float, float]:
    """Run `act` beside the ticker: (seconds of the act, longest gap in seconds)."""
    ticker = sandbox.start_process("python3", ["-u", "-c", _TICKER], stdin_mode="pipe")
    for _ in range(500):
        if sandbox.get_stdout(ticker.pid).lines:
            break
        time.sleep(0.01)
    start = time.perf_counter()
    act()
    taken = time.perf_counter() - start
    sandbox.write_stdin(ticker.pid, b"x")
    for _ in range(1000):
        lines = sandbox.get_stdout(ticker.pid).lines
        if len(lines) > 1:
            return taken, float(lines[1])
        time.sleep(0.01)
    raise RuntimeError("the ticker did not report")


def run(options: Options) -> dict[str, Any]:
    """Report totals without and with the ticker, the pause, and the bytes of a second checkpoint after 1 MB more."""
    door = library(options).Sandbox
    home = options.home / "home"
    snapshot = plain_world(options)
    totals: list[float] = []
    pauses: list[float] = []
    told: list[float] = []
    seconds: list[float] = []
    second_bytes: list[int] = []
    for _ in range(options.samples(5, 1)):
        with one_fork(snapshot) as sandbox:
            sandbox.start_process("/bin/sh", ["-c", "sleep 100000"])
            make_files(sandbox, "/workspace/change", *LARGE)
            made: list[Any] = []
            taken, pause = _ticking(sandbox, lambda made=made, sandbox=sandbox: made.append(sandbox.checkpoint()))
            totals.append(taken)
            pauses.append(pause)
            told.append(made[0].pause_s)
            before = _layer_bytes(home)
            make_files(sandbox, "/workspace/more", *SMALL)
            start = time.perf_counter()
            made.append(sandbox.checkpoint())
            seconds.append(time.perf_counter() - start)
            second_bytes.append(_layer_bytes(home) - before)
            with one_fork(made[-1]) as child:
                checked(
                    child.run("/usr/bin/test", ["-s", "/workspace/change/0009/0009999.bin"]),
                    "the first change in a fork of the second",
                )
                checked(
                    child.run("/usr/bin/test", ["-s", "/workspace/more/0000/0000033.bin"]),
                    "the second change in a fork of the second",
                )
            alive = sandbox.run("/bin/sh", ["-c", "grep -l sleep /proc/[0-9]*/cmdline | head -1"])
        for each in reversed(made):
            door.delete_snapshot(each.snapshot_id)
    stored = max(second_bytes)
    values = {
        "first_total_with_300_mb": summary_ms(totals),
        "first_pause_felt_inside": summary_ms(pauses),
        "first_pause_told": summary_ms(told),
        "second_total_with_1_mb_more": summary_ms(seconds),
        "second_stored_bytes": stored,
        "copied_mb_per_s": round(300 / (sum(totals) / len(totals)), 1),
    }
    bars = [
        bar("a second checkpoint after 1 MB more stores", float(stored), BAR_SECOND_BYTES, unit="bytes"),
        must("the sleeping shell lives on", "/proc" in alive.stdout),
    ]
    return figure("checkpoint_busy", "checkpoint with a sleeping shell inside, 300 MB changed", values, bars)
