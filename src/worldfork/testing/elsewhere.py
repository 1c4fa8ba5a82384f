"""What a check has another process do: `python -m worldfork.testing.elsewhere ADAPTER make|read ...`.

`make TEXT` writes a file in a fresh sandbox, takes a snapshot, ends the sandbox and prints the snapshot;
`read SNAPSHOT` prints that file as a fork of the snapshot has it.
"""

from __future__ import annotations

import asyncio
import sys

from worldfork.testing.adapter import load_adapter
from worldfork.testing.trial import Box, Trial

FILE = "elsewhere"


async def _make(trial: Trial, text: str) -> str:
    box = Box(trial.adapter, (await trial.create()).called)
    await box.write(FILE, text)
    # Not through the trial, which would delete it.
    return await trial.adapter.snapshot(box.called, memory=False)


async def _read(trial: Trial, snapshot: str) -> str:
    return await (await trial.one(snapshot)).read(FILE)


async def _main(named: str, what: str, argument: str) -> str:
    trial = Trial(load_adapter(named))
    try:
        return await {"make": _make, "read": _read}[what](trial, argument)
    finally:
        await trial.close()


if __name__ == "__main__":
    sys.stdout.write(f"{asyncio.run(_main(*sys.argv[1:4]))}\n")
