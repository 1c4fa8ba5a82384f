"""A command's input and output on this side of the connection, with the credit that bounds each."""

from __future__ import annotations

import errno
from typing import Final

from worldfork.sandbox import wire
from worldfork.sandbox.command import CommandResult, OutputBuffer, Reason, not_started_hint, not_started_text

WINDOW_BYTES: Final = 256 * 1024
"""Output that a command may have under way; more is granted once half of it was taken."""

_REASONS: Final = (
    Reason.EXITED,
    Reason.SIGNALED,
    Reason.OOM_KILLED,
    Reason.TIMED_OUT,
    Reason.CANCELLED,
    Reason.NOT_STARTED,
)


class Output:
    """Gathers what a command prints, each stream within the same cap."""

    __slots__ = ("keep_tail", "stderr", "stdout")

    def __init__(self, max_bytes: int, *, keep_tail: bool = False) -> None:
        self.keep_tail = keep_tail
        self.stdout = OutputBuffer(max_bytes, keep_tail=keep_tail)
        self.stderr = OutputBuffer(max_bytes, keep_tail=keep_tail)

    @property
    def at_limit(self) -> bool:
        """True when the command has printed too much to go on."""
        return not self.keep_tail and (self.stdout.over or self.stderr.over)


def command_result(ending: wire.Ending, output: Output, program: str | bytes, *, limited: bool) -> CommandResult:
    """A command's end and what it printed, as its result; `limited` when it was killed for printing too much.

    Raises:
        MalformedFrame: the end names a reason that this version does not know.
    """
    if ending.reason >= len(_REASONS):
        raise wire.MalformedFrame(f"a command ended for the unknown reason {ending.reason}")
    reason, exit_code = _REASONS[ending.reason], ending.exit_code
    if reason is Reason.NOT_STARTED:
        if not output.stderr.total_bytes:
            output.stderr.add(not_started_text(exit_code, program).encode("utf-8", "surrogateescape"))
        output.stderr.add(not_started_hint(exit_code).encode())
        exit_code = 127 if exit_code == errno.ENOENT else 126
    stdout, stdout_dropped_bytes = output.stdout.join()
    stderr, stderr_dropped_bytes = output.stderr.join()
    return CommandResult(
        exit_code=exit_code,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        reason=Reason.OUTPUT_LIMIT if limited else reason,
        signal=ending.signal or None,
        wall_s=ending.wall_us / 1e6,
        cpu_s=(ending.user_us + ending.sys_us) / 1e6,
        max_rss_bytes=ending.max_rss_kib * 1024,
        stdout_dropped_bytes=stdout_dropped_bytes,
        stderr_dropped_bytes=stderr_dropped_bytes,
    )


class Credit:
    """Counts taken output and says when to grant more, so that a grant is rarer than a frame."""

    __slots__ = ("_taken_bytes",)

    def __init__(self) -> None:
        self._taken_bytes = 0

    def taken(self, size_bytes: int) -> int:
        """Note that `size_bytes` were taken; returns what to grant now, mostly 0."""
        self._taken_bytes += size_bytes
        if self._taken_bytes < WINDOW_BYTES // 2:
            return 0
        grant_bytes, self._taken_bytes = self._taken_bytes, 0
        return grant_bytes


class Input:
    """A command's stdin: what is still to be sent, within what the sandbox accepts."""

    __slots__ = ("_channel", "_credit_bytes", "_end", "_rest")

    def __init__(self, channel: int, *, writable: bool) -> None:
        self._channel = channel
        self._credit_bytes = wire.STDIN_CREDIT_BYTES
        self._rest = memoryview(b"")
        self._end = 0 if writable else 2  # 1: the end follows the rest, 2: it was sent

    @property
    def busy(self) -> bool:
        """True while something given waits for credit."""
        return bool(self._rest)

    @property
    def closed(self) -> bool:
        """True once no more may be given."""
        return self._end > 0

    def give(self, data: bytes) -> None:
        """Take over what is to be sent next; only while not `busy`."""
        self._rest = memoryview(data)

    def close(self) -> None:
        """Let the end follow what was given."""
        self._end = self._end or 1

    def abandon(self) -> None:
        """Forget what was given and is not sent."""
        self._rest = memoryview(b"")

    def grant(self, size_bytes: int) -> None:
        """The sandbox accepts so much more."""
        self._credit_bytes += size_bytes

    def frames(self) -> bytes:
        """The frames that may be sent now, in one piece; empty when there are none."""
        ready = []
        while self._rest and self._credit_bytes:
            piece = self._rest[: min(self._credit_bytes, wire.MAX_PAYLOAD_BYTES)]
            self._rest = self._rest[len(piece) :]
            self._credit_bytes -= len(piece)
            ready.append(wire.frame(wire.STDIN, self._channel, piece))
        if self._end == 1 and not self._rest:
            self._end = 2
            ready.append(wire.frame(wire.STDIN, self._channel, b"", wire.FLAG_EOF))
        return b"".join(ready)
