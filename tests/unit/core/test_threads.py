from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from worldfork.core.threads import in_thread


def test_what_it_gives_and_what_it_raises() -> None:
    assert asyncio.run(in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(KeyError):
        asyncio.run(in_thread({}.__getitem__, "x"))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(in_thread(next, iter(())))


def test_calls_that_never_return_keep_nobody_waiting() -> None:
    let_go = threading.Event()

    async def many() -> int:
        for _ in range(50):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.002):
                    await in_thread(let_go.wait, 30)
        return await asyncio.wait_for(in_thread(int, "5"), 5)

    try:
        assert asyncio.run(many()) == 5
    finally:
        let_go.set()
        for thread in threading.enumerate():
            if thread.name == "worldfork-call":
                thread.join(10)


def test_a_call_that_never_returns_does_not_keep_the_program_from_ending() -> None:
    program = (
        "import asyncio, time; from worldfork.core.threads import in_thread\n"
        "async def main():\n"
        "    try:\n"
        "        async with asyncio.timeout(0.05): await in_thread(time.sleep, 600)\n"
        "    except TimeoutError: print('over')\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout, done.stderr) == ("over\n", "")
