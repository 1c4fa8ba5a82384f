"""The hazard of clocks that stood still while a snapshot lay there."""

from __future__ import annotations

import asyncio
import time

from worldfork.core.clock import SystemClock
from worldfork.testing.checks import check, expect
from worldfork.testing.live import ask, hold
from worldfork.testing.trial import Trial

_CLOCK = "import json, time; print(json.dumps([time.time(), time.monotonic()]))"
LIMIT_S = 0.5


@check(
    21, "the clock of a fork is right, does not go backwards, and timers fire",
    "forkd#288, mitos#6, smolvm#521, microsandbox#831, boxlite#788, CelestoAI/SmolVM#330",
)  # fmt: skip
async def _clocks(trial: Trial) -> None:
    box = await trial.create()
    live = trial.memory and trial.adapter.abilities.processes
    if live:
        await hold(box)
    earlier = await (ask(box, "clock") if live else box.python(_CLOCK))
    snapshot = await trial.snapshot(box)
    await asyncio.sleep(3)
    for turn, child in enumerate(await trial.fork(snapshot, 2)):
        before_s = SystemClock().now_s()
        told, monotonic = await (ask(child, "clock") if live else child.python(_CLOCK))
        after_s = SystemClock().now_s()
        off_s = max(before_s - told, told - after_s, 0)
        expect(off_s < LIMIT_S, f"the clock of fork {turn + 1} is {off_s:.1f} s off, {after_s - before_s:.1f} s to ask")
        if live:
            back_s = earlier[1] - monotonic
            expect(back_s <= 0, f"the monotonic clock of a program went back by {back_s:.1f} s")
        start_s = time.monotonic()
        code = await child.sh("timeout 1 sleep 20; echo $?")
        took_s = time.monotonic() - start_s
        expect(code == "124" and 0.9 < took_s < 6, f"a time limit of 1 s ended with {code} after {took_s:.1f} s")
