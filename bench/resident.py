"""Fork from a caller that holds 8 GiB of memory against a small caller."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

from bench.harness import CHECKOUT, Options, Skip, available_memory_bytes, bar, figure, interleave, ratio, summary_ms
from bench.worlds import plain_world

BAR = 1.2
HELD_BYTES = 8 << 30

_CALLER = """
import json, mmap, sys
held = int(sys.argv[1])
memory = mmap.mmap(-1, held) if held else None
for at in range(0, held, 4096):
    memory[at] = 1
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from bench.harness import Options
from bench.worlds import fork_and_first_result_s, plain_world
snapshot = plain_world(Options(home=Path(sys.argv[2])))
fork_and_first_result_s(snapshot)
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps([fork_and_first_result_s(snapshot) for _ in range(int(line))]), flush=True)
"""


class _Caller:
    def __init__(self, options: Options, held_bytes: int, stack: ExitStack) -> None:
        command = [sys.executable, "-c", _CALLER, str(held_bytes), str(options.home), str(CHECKOUT)]
        self._process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self._close)

    def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def ready(self) -> None:
        self._line()

    def take(self, count: int) -> list[float]:
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        return [float(each) for each in json.loads(self._line())]

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a caller ended early")
        return line


def run(options: Options) -> dict[str, Any]:
    """Two processes, both kept; they fork in turn."""
    held = HELD_BYTES if not options.quick else 1 << 30
    if available_memory_bytes() < held + (2 << 30):
        raise Skip(f"less than {(held >> 30) + 2} GiB of memory is available")
    plain_world(options)
    with ExitStack() as stack:
        small, large = _Caller(options, 0, stack), _Caller(options, held, stack)
        small.ready()
        large.ready()
        block = options.samples(20, 5)
        taken = interleave(
            options.samples(15, 2),
            {"small_caller": lambda: small.take(block), "large_caller": lambda: large.take(block)},
        )
    share = ratio(taken["large_caller"], taken["small_caller"])
    values: dict[str, Any] = {name: summary_ms(samples) for name, samples in taken.items()}
    values |= {
        "held_bytes": held,
        "p50_ratio": round(share, 3),
        "p99_ratio": round(ratio(taken["large_caller"], taken["small_caller"], 0.99), 3),
    }
    return figure(
        "resident",
        "fork from a caller with 8 GiB resident",
        values,
        [bar("p50, large against small caller", share, BAR, unit="ratio")],
    )
