"""One command as seen from outside: its output, its input, its end.

Output comes only within the credit that was granted, so a slow reader slows its own command and nothing
else; input goes only within the credit that the sandbox grants.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal as signals
import struct
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from worldfork.core.errors import ConfigError, SandboxError, WorldforkError
from worldfork.sandbox import wire
from worldfork.sandbox.command import MAX_SIGNAL, CommandResult
from worldfork.sandbox.streams import WINDOW_BYTES, Credit, Input, Output, command_result

_EXHAUSTED: Final = frozenset({errno.EAGAIN, errno.ENOMEM, errno.E2BIG})
"""Refusals that the sandbox's own limits cause: the command's result, not a fault of ours."""
_WORDS_BYTES: Final = 4096
_U64: Final = struct.Struct("<Q")


class Link(Protocol):
    """What a process needs of its connection."""

    sandbox_id: str

    def send(self, data: bytes) -> None:
        """Send whole frames."""

    def forget(self, channel: int) -> None:
        """Ignore what still comes on a channel."""


class Process:
    """A command in a sandbox; made by `Connection.start` and `Connection.attach`.

    Iterate over it, one consumer at a time, for `(stream, data)` with stream "stdout" or "stderr"; on a
    terminal and with `merge` all is "stdout". The iteration ends with the command.
    """

    __slots__ = (
        "_credit",
        "_end_waiters",
        "_failure",
        "_input",
        "_iterated",
        "_limited",
        "_link",
        "_output",
        "_program",
        "_queue",
        "_result",
        "_room_bytes",
        "_waiters",
        "channel",
        "ended",
        "pid",
        "truncated_bytes",
    )

    def __init__(
        self, link: Link, channel: int, program: str | bytes, *, writable: bool = False, output: Output | None = None
    ) -> None:
        self.channel = channel
        self.pid = 0
        """As seen inside the sandbox; 0 until it has started."""
        self.truncated_bytes = 0
        """Bytes of a kept command's output that were gone before they could be sent here."""
        self._link = link
        self._program = program
        self._output = output
        self._limited = False
        self._iterated = False
        self._queue: deque[tuple[str, bytes]] = deque()
        self._credit = Credit()
        self._room_bytes = WINDOW_BYTES
        self._input = Input(channel, writable=writable)
        self.ended = False
        """True once the command's end, or the connection's, is known."""
        self._result: CommandResult | None = None
        self._failure: Callable[[], WorldforkError] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._end_waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> CommandResult:
        """Wait for the end. Cancelling the wait leaves the command alone.

        Output is dropped meanwhile, so that it cannot hold the command up, unless an iteration was begun:
        then it is that consumer's to take. The result holds output only where `Connection.run` made it.

        Raises:
            SandboxDied: the sandbox or the connection ended first.
        """
        if self._output is None and not self._iterated:
            self._drop_output()
        if not self.ended:
            await _next(self._end_waiters)
        if self._failure is not None:
            raise self._failure()
        if self._result is None:
            raise SandboxError("the process still runs", remedy="attach with follow=True")
        return self._result

    def __aiter__(self) -> Process:
        self._iterated = True
        return self

    async def __anext__(self) -> tuple[str, bytes]:
        self._iterated = True
        while not self._queue:
            if self.ended:
                if self._failure is not None:
                    raise self._failure()
                raise StopAsyncIteration
            await _next(self._waiters)
        item = self._queue.popleft()
        self._grant(len(item[1]))
        return item

    async def write_stdin(self, data: bytes) -> None:
        """Send input; returns when all of it is under way. Callers at the same time take turns.

        Raises:
            BrokenPipeError: the command ended, or its input was closed, before it took everything.
            SandboxDied: the sandbox or the connection ended first.
        """
        while self._input.busy and not self.ended:
            await _next(self._waiters)
        self._check_stdin()
        self._input.give(data)
        try:
            self._pump()
            while self._input.busy:
                await _next(self._waiters)
                self._check_stdin()
        finally:
            self._input.abandon()
            _wake(self._waiters)

    def close_stdin(self) -> None:
        """Send the end of input after what was written. May be called twice."""
        if not self._input.closed and not self.ended:
            self._input.close()
            self._pump()

    def feed(self, data: bytes) -> bytes:
        """Give the whole input; returns the frames to send with the request, the rest follows by itself."""
        self._input.give(data)
        self._input.close()
        return self._input.frames()

    def signal(self, number: int, *, tree: bool = False) -> None:
        """Send a signal to the process, or to everything that it started; nothing if it has ended.

        Raises:
            ConfigError: no such signal.
        """
        if not 1 <= number <= MAX_SIGNAL:
            raise ConfigError(f"signals are numbered 1 to {MAX_SIGNAL}, not {number}")
        if not self.ended:
            self._link.send(wire.signal_frame(self.channel, number, tree=tree))

    def kill(self) -> None:
        """Kill the whole tree, until none of it is left."""
        self.signal(signals.SIGKILL, tree=True)

    def detach(self) -> None:
        """Stop following it. A kept command lives on; any other is killed."""
        if not self.ended:
            self._link.send(wire.frame(wire.DETACH, self.channel))
            self._link.forget(self.channel)
            self.fail(lambda: SandboxError("detached from this process", remedy="attach to its pid to follow it"))

    def resize(self, rows: int, columns: int) -> None:
        """Tell the command's terminal its new size."""
        if not self.ended:
            self._link.send(wire.frame(wire.RESIZE, self.channel, struct.pack("<HH", rows, columns)))

    async def started(self) -> None:
        """Wait until the command runs or is known not to.

        Raises:
            SandboxError: the request was refused.
        """
        while not self.pid and not self.ended:
            await _next(self._waiters)
        if self._failure is not None:
            raise self._failure()

    async def reap(self, timeout_s: float) -> None:
        """Kill the tree and wait for its end, whatever cancels the caller; give up after `timeout_s`."""
        self.kill()
        self._drop_output()
        loop = asyncio.get_running_loop()
        deadline_s, end = loop.time() + timeout_s, loop.create_future()
        self._end_waiters.append(end)
        while not self.ended and (left_s := deadline_s - loop.time()) > 0:
            try:
                await asyncio.wait((end,), timeout=left_s)
            except asyncio.CancelledError:
                continue  # the caller passes on the first; until the tree is gone, more change nothing

    def on_frame(self, kind: int, payload: bytes) -> bool:
        """Take one frame of this channel; True when it was the last."""
        if kind == wire.STDOUT or kind == wire.STDERR:
            self._take("stdout" if kind == wire.STDOUT else "stderr", payload)
        elif kind == wire.EXIT:
            self._finish(wire.read_ending(payload))
        elif kind == wire.ERROR:
            self._refuse(*wire.read_error(payload))
        elif kind == wire.STDIN_CREDIT:
            self._input.grant(wire.Cursor(payload).u32())
            self._pump()
            _wake(self._waiters)
        elif kind == wire.STARTED:
            self.pid = wire.Cursor(payload).u32()
            _wake(self._waiters)
        elif kind == wire.TRUNCATED:
            self.truncated_bytes += wire.Cursor(payload).take(_U64)[0]
        elif kind == wire.REPLY:
            self._close()  # a replay that does not follow: the command runs on
        else:
            raise wire.MalformedFrame(f"a command cannot send a frame of type {kind}")
        return self.ended

    def fail(self, failure: Callable[[], WorldforkError]) -> None:
        """End with an error, made anew for each caller that meets it."""
        if not self.ended:
            self._failure = failure
            self._close()

    def _take(self, stream: str, data: bytes) -> None:
        self._room_bytes -= len(data)
        if self._room_bytes < 0:
            # Or whoever broke into a virtual machine could fill this process's memory with what nobody takes.
            raise wire.MalformedFrame("a command sent more output than it may")
        if self._output is not None:
            (self._output.stdout if stream == "stdout" else self._output.stderr).add(data)
            if self._output.at_limit and not self._limited:
                self._limited = True
                self.kill()
            self._grant(len(data))
        else:
            self._queue.append((stream, data))
            _wake(self._waiters)

    def _drop_output(self) -> None:
        """Count what is queued as taken, and gather the rest into nothing."""
        self._output = self._output or Output(0, keep_tail=True)
        self._grant(sum(len(data) for _, data in self._queue))
        self._queue.clear()

    def _grant(self, size_bytes: int) -> None:
        if (grant_bytes := self._credit.taken(size_bytes)) and not self.ended:
            self._room_bytes += grant_bytes
            self._link.send(wire.u32_frame(wire.CREDIT, self.channel, grant_bytes))

    def _pump(self) -> None:
        if frames := self._input.frames():
            self._link.send(frames)

    def _check_stdin(self) -> None:
        if self._failure is not None:
            raise self._failure()
        if self.ended or self._input.closed:
            raise BrokenPipeError(errno.EPIPE, "the command takes no more input")

    def _finish(self, ending: wire.Ending) -> None:
        output = self._output or Output(0)
        if self._output is None and ending.reason == wire.REASON_NOT_STARTED:
            output = Output(_WORDS_BYTES)  # the consumer's too, but a result says why there was no start
            for _, data in self._queue:
                output.stderr.add(data)
        self._result = command_result(ending, output, self._program, limited=self._limited)
        self._close()

    def _refuse(self, number: int, text: str) -> None:
        if number in _EXHAUSTED:
            self._finish(wire.Ending(wire.REASON_NOT_STARTED, number, 0, 0, 0, 0, 0))
            return
        name, sandbox_id = os.fsdecode(self._program), self._link.sandbox_id
        self.fail(lambda: SandboxError(f"{name}: {text or os.strerror(number)}", sandbox_id=sandbox_id, errno=number))

    def _close(self) -> None:
        self.ended = True
        _wake(self._waiters)
        _wake(self._end_waiters)


async def _next(waiters: list[asyncio.Future[None]]) -> None:
    """Wait until the next `_wake` of this list."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(waiter)
    await waiter


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()
