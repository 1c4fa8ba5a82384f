"""Calls that may block for ever, each in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: object) -> T:
    """Call a function that may block, in a thread of its own.

    A function that never returns keeps that one thread, and no place in a pool that others wait for.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast(T, result))

    def call() -> None:
        result: T | None = None
        failed: BaseException | None = None
        try:
            result = function(*args)
        except BaseException as error:
            # A future cannot carry a StopIteration.
            failed = RuntimeError(f"StopIteration: {error}") if isinstance(error, StopIteration) else error
        with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits any more
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=call, name="worldfork-call", daemon=True).start()
    return await answer
