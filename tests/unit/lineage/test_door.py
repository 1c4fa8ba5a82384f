"""An interrupt may come between any two lines of a call through the door."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.lineage import door

ENOUGH_S = 20.0
"""Longer than anything here takes, shorter than the wait of an interrupted call."""

pytestmark = pytest.mark.filterwarnings("error")


def test_an_iterator_that_is_open_at_the_end_of_the_interpreter_holds_nobody_up() -> None:
    program = (
        "from worldfork.lineage.door import through_each\n"
        "async def numbers():\n"
        "    while True:\n"
        "        yield 1\n"
        "kept = through_each(numbers())\n"
        "print(next(kept))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=ENOUGH_S, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


class Interrupted:
    """Raise KeyboardInterrupt in this thread at the `step`-th line of the door's code."""

    def __init__(self, step: int) -> None:
        self._left = step
        self.came = False

    def __enter__(self) -> Interrupted:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != door.__file__:
            return None
        if event == "line" and not self.came:
            self._left -= 1
            if self._left < 0:
                self.came = True
                raise KeyboardInterrupt
        return self._trace


def _interrupted_at(step: int, begun: list[int], ended: list[int]) -> bool:
    async def work() -> int:
        begun.append(step)
        try:
            await asyncio.sleep(0)
        finally:
            ended.append(step)
        return step

    with contextlib.suppress(KeyboardInterrupt), Interrupted(step) as interrupt:
        assert door.through(work) == step
    return interrupt.came


def test_an_interrupt_at_any_line_leaves_nothing_behind() -> None:
    door.through(asyncio.sleep, 0)
    begun: list[int] = []
    ended: list[int] = []
    steps = 0
    while _interrupted_at(steps, begun, ended):
        assert begun == ended
        steps += 1
    gc.collect()
    assert steps >= 10
    assert begun == ended
    assert door.through(_others) == []


async def _others() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.mark.parametrize("begins", [False, True])
def test_a_call_that_is_undone_before_its_first_step_ends_at_once(begins: bool) -> None:
    calls: list[int] = []

    async def work() -> None:
        calls.append(1)

    loop = door._open_loop()
    call = door._Call(work, loop)
    gate = threading.Event()
    loop.call_soon_threadsafe(gate.wait, ENOUGH_S)
    if begins:
        loop.call_soon_threadsafe(call._begin)
    loop.call_soon_threadsafe(call._cancel)
    if not begins:
        loop.call_soon_threadsafe(call._begin)
    gate.set()
    assert call._ended.acquire(timeout=ENOUGH_S)
    door.through(asyncio.sleep, 0)
    gc.collect()
    assert calls == []


def test_a_call_from_the_doors_own_thread_is_refused_at_once() -> None:
    refused: list[BaseException] = []

    async def outer() -> None:
        try:
            door.through(asyncio.sleep, 0)
        except ConfigError as error:
            refused.append(error)

    caller = threading.Thread(target=lambda: door.through(outer), daemon=True)
    caller.start()
    caller.join(ENOUGH_S)
    assert not caller.is_alive()
    assert "asyncio.to_thread" in str(refused[0])


def test_a_call_from_within_another_loop_is_none_of_these() -> None:
    async def outer() -> int:
        return door.through(asyncio.sleep, 0, 7)

    assert asyncio.run(outer()) == 7
