"""One event loop in a thread of its own, through which synchronous callers reach the asynchronous core.

Works from any number of threads, from inside a running event loop (a notebook), and after `os.fork()`, where the
child gets a loop of its own.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, cast

from worldfork.core.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")

_UNDO_S = 30.0
"""How long an interrupted call waits for what it began to be undone."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def through(work: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **options: P.kwargs) -> T:
    """Call a coroutine function on the door's loop and return its result; an interrupt cancels it and waits.

    The function and not its coroutine is passed: an interrupt between making a coroutine and handing it over would
    leave one that nobody awaits.

    Raises:
        ConfigError: called on the door's own thread, by what runs there; it would wait for itself.
    """
    loop = _open_loop()
    if asyncio._get_running_loop() is loop:
        raise ConfigError(
            "a synchronous call, from a function that Worldfork's own event loop runs, would wait for itself",
            remedy="await the asynchronous form, such as AsyncSandbox, or make the call by `asyncio.to_thread`",
        )
    call = _Call(partial(work, *args, **options), loop)
    try:
        return call.outcome()
    except BaseException:
        # KeyboardInterrupt and its like: what was begun is undone before the caller goes on.
        call.undo()
        raise


class _Call(Generic[T]):
    """One piece of work on its way through the door.

    Its outcome is handed over in its last step: a future's callbacks would take two more turns of the loop, and a
    lock is the lightest thing that a thread can sleep on.
    """

    __slots__ = ("_done", "_ended", "_error", "_loop", "_result", "_task", "_work")

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self._task: asyncio.Task[Any] | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self._done = False
        self._ended = threading.Lock()
        self._ended.acquire()

    def outcome(self) -> T:
        """Begin, wait for the end, and return the result or raise the error. Once."""
        self._loop.call_soon_threadsafe(self._begin)
        self._ended.acquire()
        self._ended.release()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return cast(T, self._result)

    def undo(self) -> None:
        """Cancel what still runs, and wait until it has ended."""
        if not self._done:
            self._loop.call_soon_threadsafe(self._cancel)
            self._ended.acquire(timeout=_UNDO_S)

    def _begin(self) -> None:
        self._loop.create_task(self._run())

    async def _run(self) -> None:
        if self._done:
            return
        # Not earlier: a task that is cancelled before its first step ends without a word to who waits.
        self._task = asyncio.current_task()
        try:
            self._result = await self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._end()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self._done:
            self._error = asyncio.CancelledError()
            self._end()

    def _end(self) -> None:
        self._done = True
        self._ended.release()


def through_each(items: AsyncIterator[T]) -> Generator[T]:
    """Iterate an asynchronous iterator from synchronous code, item by item."""
    try:
        while True:
            try:
                yield through(_next, items)
            except StopAsyncIteration:
                return
    finally:
        close = getattr(items, "aclose", None)
        # Of an iterator that is still open when the interpreter ends: its loop's thread runs no more.
        if close is not None and not sys.is_finalizing():
            through(close)


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
