"""What a command is asked with and what it gives back; nothing here talks to a sandbox."""

from __future__ import annotations

import errno
import math
import os
import signal as signals
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from worldfork.core.errors import CommandFailed, CommandTimeout, ConfigError

MAX_SIGNAL = 64
"""The highest signal number that Linux knows."""


class Reason(str, Enum):
    """Why a command is over. The first four and `NOT_STARTED` come from the sandbox."""

    EXITED = "exited"
    SIGNALED = "signaled"
    OOM_KILLED = "oom_killed"
    TIMED_OUT = "timed_out"
    OUTPUT_LIMIT = "output_limit"
    NOT_STARTED = "not_started"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """One command, complete: nothing is inherited from the calling process.

    Raises:
        ConfigError: a part that no sandbox could carry out, before anything starts.
    """

    argv: tuple[str | bytes, ...]
    """Program and arguments. The program is searched in the command's own PATH; no shell is involved."""
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = "/"
    user: str = ""
    """"name", "uid" or "uid:gid", as known inside the sandbox; empty for the sandbox's own user."""
    stdin: bool | bytes = False
    """False: /dev/null. True: the caller writes it. Bytes: exactly these, then the end."""
    merge: bool = False
    """Send stderr into stdout, in the order written."""
    tty: tuple[int, int] | None = None
    """(rows, columns) of a terminal to run on."""
    keep: bool = False
    """Outlive the connection; the sandbox keeps the last output for those who attach later."""
    timeout_s: float | None = None
    """Wall-clock limit, kept inside the sandbox; the whole process tree ends at it."""
    drain_s: float = 0.1
    """How long to go on reading after the process ended while a background child holds its output open."""
    rlimits: tuple[tuple[int, int, int], ...] = ()
    """(resource, soft, hard), the numbers of `resource.RLIMIT_*`; -1 is no limit."""
    discard_stdout: bool = False
    discard_stderr: bool = False
    builtin: bool = False
    """argv names a file operation of the sandbox's own init instead of a program."""

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0]:
            raise ConfigError("a command needs a program to run")
        for part in self.argv:
            if (b"\0" if isinstance(part, bytes) else "\0") in part:  # type: ignore[operator]
                raise ConfigError(f"a command's argument cannot hold a NUL byte: {part[:80]!r}")
        for name, value in self.env.items():
            if not name or "=" in name or "\0" in name or "\0" in value:
                raise ConfigError(f"not a variable that a process can be given: {name!r}")
        if "\0" in self.working_dir or "\0" in self.user:
            raise ConfigError("working_dir and user cannot hold a NUL byte")
        if self.timeout_s is not None and not (self.timeout_s > 0 and math.isfinite(self.timeout_s)):
            raise ConfigError(f"timeout_s must be above 0, not {self.timeout_s}", remedy="use None for no limit")
        if self.tty is not None and not all(0 <= size <= 0xFFFF for size in self.tty):
            raise ConfigError(f"not the size of a terminal: {self.tty}")
        if not 0 <= self.drain_s <= 60:
            raise ConfigError(f"drain_s must be between 0 and 60, not {self.drain_s}")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended and what it printed. A result is never an error by itself; see `check`."""

    exit_code: int
    """The process's own code; minus the signal when killed; 127 or 126 when it could not be started."""
    stdout_bytes: bytes
    stderr_bytes: bytes
    reason: Reason
    signal: int | None
    wall_s: float
    cpu_s: float
    """User and system time of the process and of the children it waited for."""
    max_rss_bytes: int
    stdout_dropped_bytes: int = 0
    """Bytes of stdout that were printed but left out because of an output limit."""
    stderr_dropped_bytes: int = 0

    @property
    def stdout(self) -> str:
        """stdout as UTF-8; bytes that are not become U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """stderr as UTF-8; bytes that are not become U+FFFD."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def timed_out(self) -> bool:
        """True when the command met its time limit."""
        return self.reason is Reason.TIMED_OUT

    @property
    def ok(self) -> bool:
        """True when the process ended by itself with code 0."""
        return self.reason is Reason.EXITED and self.exit_code == 0

    def check(self) -> CommandResult:
        """Return this result if it is `ok`.

        Raises:
            CommandTimeout: it met its time limit.
            CommandFailed: anything else but code 0; `.result` is this result.
        """
        if self.ok:
            return self
        if self.timed_out:
            raise CommandTimeout(f"the command met its time limit after {self.wall_s:.1f} s", result=self)
        raise CommandFailed(f"{self._ending()}{self._last_words()}", result=self)

    def _ending(self) -> str:
        if self.reason is Reason.EXITED:
            return f"the command ended with exit code {self.exit_code}"
        if self.reason is Reason.SIGNALED and self.signal is not None:
            return f"the command was ended by {signal_name(self.signal)}"
        return {
            Reason.OOM_KILLED: "the command was killed because the sandbox ran out of memory",
            Reason.OUTPUT_LIMIT: "the command printed more than its output limit",
            Reason.NOT_STARTED: "the command could not be started",
            Reason.CANCELLED: "the command was cancelled",
        }.get(self.reason, "the command was ended by a signal")

    def _last_words(self) -> str:
        lines = (self.stderr_bytes or self.stdout_bytes)[-2000:].decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1][-300:]}" if lines else ""


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL, or "signal 40" where it has none."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def not_started_text(error_number: int, program: str | bytes) -> str:
    """One line, for stderr, on why a program could not be started."""
    return f"{os.fsdecode(program)}: {os.strerror(error_number)}\n"


def not_started_hint(error_number: int) -> str:
    """A line on what to do about it; empty where the reason says it all."""
    return {
        "E2BIG": "one argument may have 128 KiB: write it to a file, or send it on stdin\n",
        "EAGAIN": "the sandbox is at its limit of processes\n",
    }.get(errno_name(error_number), "")


def errno_name(number: int) -> str:
    """The symbol of an errno, such as ENOENT, or its number as text."""
    return errno.errorcode.get(number, str(number))


class OutputBuffer:
    """One stream's output within a cap.

    Up to the cap the bytes are kept exactly. Above it the head is kept or, with `keep_tail`, the first and
    the last half, joined by a line that states how many bytes are missing. A cut never falls inside a
    UTF-8 character. A cap of 0 only counts.
    """

    __slots__ = ("_cap_bytes", "_head", "_head_cap_bytes", "_keep_tail", "_kept_bytes", "_tail", "total_bytes")

    def __init__(self, cap_bytes: int, *, keep_tail: bool = False) -> None:
        if cap_bytes < 0:
            raise ConfigError(f"an output limit cannot be negative: {cap_bytes}")
        self._cap_bytes = cap_bytes
        self._keep_tail = keep_tail
        self._head_cap_bytes = cap_bytes // 2 if keep_tail else cap_bytes
        self._head: list[bytes] = []
        self._kept_bytes = 0
        self._tail = bytearray()
        self.total_bytes = 0

    @property
    def over(self) -> bool:
        """True once more than the cap has come."""
        return self.total_bytes > self._cap_bytes

    def add(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        self.total_bytes += len(data)
        room = self._head_cap_bytes - self._kept_bytes
        if room > 0:
            part = data if len(data) <= room else data[:room]
            self._head.append(part)
            self._kept_bytes += len(part)
            data = data[len(part) :] if len(part) < len(data) else b""
        if data and self._keep_tail:
            self._add_tail(data)

    def _add_tail(self, data: bytes) -> None:
        tail_cap_bytes = self._cap_bytes - self._head_cap_bytes
        self._tail += data[-tail_cap_bytes:] if tail_cap_bytes else b""
        # Trimming at twice the cap makes the cost of a byte constant, however small the pieces are.
        if len(self._tail) > 2 * tail_cap_bytes:
            del self._tail[: len(self._tail) - tail_cap_bytes]

    def join(self) -> tuple[bytes, int]:
        """What was kept, and how many bytes of the stream are not in it."""
        head = b"".join(self._head)
        if self._cap_bytes == 0:
            return b"", self.total_bytes
        if not self.over:
            return head + bytes(self._tail), 0
        head = head[: len(head) - _cut_character_bytes(head)]
        tail_cap_bytes = self._cap_bytes - self._head_cap_bytes
        tail = bytes(self._tail[-tail_cap_bytes:]) if tail_cap_bytes else b""
        tail = tail[_continuation_bytes(tail) :]
        dropped_bytes = self.total_bytes - len(head) - len(tail)
        if not self._keep_tail:
            return head, dropped_bytes
        return head + f"\n[... {dropped_bytes} bytes left out ...]\n".encode() + tail, dropped_bytes


def _cut_character_bytes(data: bytes) -> int:
    """How many bytes at the end begin a UTF-8 character that the end cuts off."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        size = 2 if byte & 0xE0 == 0xC0 else 3 if byte & 0xF0 == 0xE0 else 4 if byte & 0xF8 == 0xF0 else 1
        return back if size > back else 0
    return 0


def _continuation_bytes(data: bytes) -> int:
    """How many bytes at the start belong to a UTF-8 character that began before it."""
    count = 0
    while count < min(3, len(data)) and data[count] & 0xC0 == 0x80:
        count += 1
    return count
