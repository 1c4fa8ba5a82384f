"""One event loop in a thread of its own, through which synchronous callers reach the asynchronous core.

Works from any number of threads, from inside a running event loop (a notebook), and after `os.fork()`, where the
child gets a loop of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def through(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the door's loop and return its result; an interrupt cancels it and waits for its end."""
    future = asyncio.run_coroutine_threadsafe(work, _open_loop())
    try:
        return future.result()
    except BaseException:
        # KeyboardInterrupt and its like: what was begun is undone before the caller goes on.
        if not future.done():
            future.cancel()
            _settle(future)
        raise


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


def _settle(future: Any) -> None:
    try:
        future.exception(timeout=30)
    except BaseException:
        return


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
