"""A hundred forks of one memory snapshot, one after another, each looked at: is it the snapshot, and is it its own?"""

from __future__ import annotations

import time
from typing import Any

from bench.harness import Options, summary_ms
from bench.machines import Frozen, Row, frozen_guest, row_figure

COUNT = 100
BAR_CLOCK_S = 0.5
_LOOK = """
set -e
date +%s.%N
cat /proc/sys/kernel/random/uuid
od -An -tx1 -N16 /dev/urandom | tr -d ' \\n'; echo
cat /workspace/mark /etc/hostname
echo "$WORLDFORK_SANDBOX_ID"
echo mine > /workspace/mark
"""
_ANSWER_S = 20.0


def _warm_answer(child: Any, pid: int, word: str) -> str:
    """What the process that lived in the snapshot says to a word; it counts what it was told."""
    child.write_stdin(pid, f"{word}\n".encode())
    began = time.perf_counter()
    while time.perf_counter() - began < _ANSWER_S:
        lines = child.get_stdout(pid).lines
        if len(lines) > 1:
            return str(lines[-1]).strip()
        time.sleep(0.01)
    return "nothing"


def _look(frozen: Frozen, child: Any) -> tuple[list[str], float, list[str]]:
    """What is wrong with one fork; how far its clock is off; the random values it drew."""
    before_s = time.time()
    result = child.run("/bin/sh", ["-c", _LOOK])
    after_s = time.time()
    lines = result.stdout.split()
    if result.exit_code or len(lines) != 6:
        return [f"the look gave {result.exit_code}: {result.stdout[-200:]}{result.stderr[-200:]}"], 0.0, []
    told_s, uuid, drawn, mark, hostname, own_id = lines
    # The guest read its clock at some moment between the two of the host.
    off_s = max(0.0, before_s - float(told_s), float(told_s) - after_s)
    wrong = []
    if mark != "frozen":
        wrong.append(f"the file of the snapshot says {mark!r}")
    if own_id != child.sandbox_id:
        wrong.append(f"it calls itself {own_id}, and is {child.sandbox_id}")
    answer = _warm_answer(child, frozen.warm_pid, child.sandbox_id)
    if answer != f"2 {child.sandbox_id}":
        wrong.append(f"the process of the snapshot said {answer!r}")
    return wrong, off_s, [uuid, drawn, hostname]


def run(options: Options) -> dict[str, Any]:
    """Count failures, distinct values and the largest error of the clock."""
    count = options.samples(COUNT, 5)
    wrong: list[str] = []
    offs: list[float] = []
    took: list[float] = []
    drawn: list[list[str]] = []
    with frozen_guest(options) as frozen:
        for index in range(count):
            start = time.perf_counter()
            try:
                with frozen.memory.fork(1).unwrap()[0] as child:
                    found, off_s, values = _look(frozen, child)
            except Exception as error:  # a fork that fails is what is counted here
                wrong.append(f"{index}: {type(error).__name__}: {error}")
                continue
            took.append(time.perf_counter() - start)
            wrong += [f"{index}: {what}" for what in found]
            offs.append(off_s)
            drawn.append(values)
        accel = frozen.accel
    if not offs:
        raise RuntimeError(f"no fork could be looked at; the first: {wrong[0]}")
    distinct = [len({values[place] for values in drawn if values}) for place in range(3)]
    failed_n = len({line.split(":")[0] for line in wrong})
    rows = [
        Row(f"{count} forks one after another: failures", "n", float(failed_n), 0.0, strict=False),
        Row("the same: random values that are not distinct", "n", float(2 * count - sum(distinct[:2])), 0.0,
            strict=False),
        Row("the same: largest error of the clock", "s", max(offs), BAR_CLOCK_S),
    ]  # fmt: skip
    told = {
        "forks_n": count,
        "wrong": wrong[:20],
        "distinct": dict(zip(("uuid", "urandom", "hostname"), distinct, strict=True)),
        "each": summary_ms(took) if took else {},
    }
    return row_figure("machine_hundred", "forks of one memory snapshot, each checked", accel, told, rows)
