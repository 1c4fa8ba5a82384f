"""One event loop in a thread of its own, through which synchronous callers reach the asynchronous core.

Works from any number of threads, from inside a running event loop (a notebook), and after `os.fork()`, where the
child gets a loop of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

_UNDO_S = 30.0
"""How long an interrupted call waits for what it began to be undone."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def through(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the door's loop and return its result; an interrupt cancels it and waits for its end."""
    loop = _open_loop()
    outcome: Future[T] = Future()
    tasks: list[asyncio.Task[T]] = []

    def begin() -> None:
        tasks.append(loop.create_task(work))
        tasks[0].add_done_callback(lambda task: _pass_on(task, outcome))

    def undo() -> None:
        if tasks:
            tasks[0].cancel()
        else:
            work.close()
            outcome.set_exception(asyncio.CancelledError())

    try:
        loop.call_soon_threadsafe(begin)
        return outcome.result()
    except BaseException:
        # KeyboardInterrupt and its like: what was begun is undone before the caller goes on.
        if not outcome.done():
            loop.call_soon_threadsafe(undo)
            wait([outcome], timeout=_UNDO_S)
        raise


def _pass_on(task: asyncio.Task[T], outcome: Future[T]) -> None:
    # The outcome itself is never cancelled: it would be done before the task is.
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


def through_each(items: AsyncIterator[T]) -> Iterator[T]:
    """Iterate an asynchronous iterator from synchronous code, item by item."""
    try:
        while True:
            try:
                yield through(_next(items))
            except StopAsyncIteration:
                return
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            through(close())


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


def _open_loop() -> asyncio.AbstractEventLoop:
    global _loop
    if _loop is None:
        with _lock:
            if _loop is None:
                loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(loop,), name="worldfork-door", daemon=True).start()
                _loop = loop
    return _loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _forked() -> None:
    """The parent's loop has no thread in a forked child; the next call opens another."""
    global _loop, _lock
    _loop = None
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
