"""The protocol that a sandbox's init speaks, version 1, as bytes; `native/proto.h` is the other side.

A frame is a header of 12 bytes, little-endian (u32 payload length, u16 type, u16 flags, u32 channel), and
its payload. A text is a u32 length and its bytes. Nothing here does input or output.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from worldfork.core.errors import ConfigError
from worldfork.sandbox.command import CommandSpec

VERSION: Final = 1
MAX_PAYLOAD_BYTES: Final = 64 * 1024
MAX_EXEC_BYTES: Final = 8 * 1024 * 1024
STDIN_CREDIT_BYTES: Final = 64 * 1024
"""Bytes of stdin that a new command takes before it grants more."""

EXEC: Final = 1
STDIN: Final = 2
CREDIT: Final = 3
SIGNAL: Final = 4
DETACH: Final = 5
ATTACH: Final = 6
LIST: Final = 7
INFO: Final = 8
HOLD: Final = 9
RELEASE: Final = 10
FREEZE: Final = 11
THAW: Final = 12
NSFDS: Final = 13
SHUTDOWN: Final = 14
RESIZE: Final = 15
ACCOUNT: Final = 16
MAPPED: Final = 17
HELLO: Final = 101
STARTED: Final = 102
STDOUT: Final = 103
STDERR: Final = 104
EXIT: Final = 105
ERROR: Final = 106
REPLY: Final = 107
STDIN_CREDIT: Final = 108
TRUNCATED: Final = 109

FLAG_EOF: Final = 1
"""On STDIN: nothing follows this frame."""
FLAG_TREE: Final = 1
"""On SIGNAL: to every process of the command."""

EXEC_STDIN: Final = 1
EXEC_MERGE: Final = 2
EXEC_PTY: Final = 4
EXEC_BUILTIN: Final = 8
EXEC_KEEP: Final = 16
EXEC_DISCARD_STDOUT: Final = 32
EXEC_DISCARD_STDERR: Final = 64

ATTACH_REPLAY: Final = 1
ATTACH_FOLLOW: Final = 2
ATTACH_EXIT_ONLY: Final = 4
ATTACH_STDIN: Final = 8

REASON_NOT_STARTED: Final = 5
"""In EXIT: the exit code is the errno that stopped the start."""

_HEADER = struct.Struct("<IHHI")
_U32 = struct.Struct("<I")
_HEADER_BYTES: Final = 12
_EXEC_START = struct.Struct("<IIQI")
_EXIT = struct.Struct("<B3xiiQQQQ")
_UNLIMITED: Final = 2**64 - 1


class MalformedFrame(ValueError):
    """The other side sent bytes that are not this protocol."""


class Frame(NamedTuple):
    """One frame as received."""

    kind: int
    flags: int
    channel: int
    payload: bytes


class FrameReader:
    """Cuts a stream of bytes into frames, whatever the pieces it arrives in."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes, in order.

        Raises:
            MalformedFrame: a header announces more than a frame may carry.
        """
        source = self._pending + data if self._pending else data
        frames: list[Frame] = []
        position, end = 0, len(source)
        while end - position >= _HEADER_BYTES:
            length, kind, flags, channel = _HEADER.unpack_from(source, position)
            if length > MAX_PAYLOAD_BYTES:
                raise MalformedFrame(f"a frame of type {kind} announces {length} bytes")
            start = position + _HEADER_BYTES
            if end - start < length:
                break
            position = start + length
            frames.append(Frame(kind, flags, channel, source[start:position]))
        self._pending = source[position:]
        return frames


def frame(kind: int, channel: int, payload: bytes | memoryview = b"", flags: int = 0) -> bytes:
    """One frame, ready to send."""
    return b"".join((_HEADER.pack(len(payload), kind, flags, channel), payload))


def text(value: str | bytes) -> bytes:
    """A text of the protocol: its length, then its bytes. Surrogates stand for bytes that are not UTF-8."""
    raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    return _U32.pack(len(raw)) + raw


def exec_frame(channel: int, spec: CommandSpec, credit_bytes: int) -> bytes:
    """EXEC for a command that may send `credit_bytes` of output at once.

    Raises:
        ConfigError: arguments and variables are larger than a frame can carry.
    """
    flags = (
        (EXEC_STDIN if spec.stdin is not False else 0)
        | (EXEC_MERGE if spec.merge else 0)
        | (EXEC_PTY if spec.tty else 0)
        | (EXEC_BUILTIN if spec.builtin else 0)
        | (EXEC_KEEP if spec.keep else 0)
        | (EXEC_DISCARD_STDOUT if spec.discard_stdout else 0)
        | (EXEC_DISCARD_STDERR if spec.discard_stderr else 0)
    )
    timeout_ms = 0 if spec.timeout_s is None else max(1, round(spec.timeout_s * 1000))
    parts = [
        _EXEC_START.pack(flags, credit_bytes, timeout_ms, round(spec.drain_s * 1000)),
        text(spec.user),
        text(spec.working_dir),
        struct.pack("<HHI", *(spec.tty or (0, 0)), len(spec.rlimits)),
    ]
    parts += (struct.pack("<IQQ", kind, soft & _UNLIMITED, hard & _UNLIMITED) for kind, soft, hard in spec.rlimits)
    parts += _texts(spec.argv)
    parts += _texts([f"{name}={value}" for name, value in spec.env.items()])
    payload = b"".join(parts)
    if len(payload) > MAX_EXEC_BYTES:
        raise ConfigError(
            f"the command's arguments and variables take {len(payload)} bytes, at most {MAX_EXEC_BYTES} can be sent",
            remedy="write the large part to a file in the sandbox, or send it on stdin",
        )
    return frame(EXEC, channel, payload)


def _texts(values: Iterable[str | bytes]) -> list[bytes]:
    encoded = [text(value) for value in values]
    return [_U32.pack(len(encoded)), *encoded]


def u32_frame(kind: int, channel: int, value: int) -> bytes:
    """A frame whose payload is one u32."""
    return _HEADER.pack(4, kind, 0, channel) + _U32.pack(value)


def signal_frame(channel: int, number: int, *, tree: bool) -> bytes:
    """SIGNAL, to the command's process or to its whole tree."""
    return frame(SIGNAL, channel, struct.pack("<i", number), FLAG_TREE if tree else 0)


def attach_frame(channel: int, pid: int, credit_bytes: int, flags: int) -> bytes:
    """ATTACH to a running or kept command."""
    return frame(ATTACH, channel, struct.pack("<III", pid, credit_bytes, flags))


class Ending(NamedTuple):
    """EXIT, as sent."""

    reason: int
    exit_code: int
    signal: int
    user_us: int
    sys_us: int
    max_rss_kib: int
    wall_us: int


def read_ending(payload: bytes) -> Ending:
    """EXIT's payload.

    Raises:
        MalformedFrame: it has another size.
    """
    try:
        return Ending(*_EXIT.unpack(payload))
    except struct.error as error:
        raise MalformedFrame(f"EXIT has {len(payload)} bytes") from error


class Cursor:
    """Reads the fields of a payload one after the other; a short payload is a MalformedFrame."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def at_end(self) -> bool:
        """True when every byte has been read."""
        return self._position >= len(self._data)

    def take(self, layout: struct.Struct) -> tuple[int, ...]:
        """The next fixed fields."""
        try:
            fields: tuple[int, ...] = layout.unpack_from(self._data, self._position)
        except struct.error as error:
            raise MalformedFrame(f"a payload of {len(self._data)} bytes is too short") from error
        self._position += layout.size
        return fields

    def u32(self) -> int:
        """The next u32."""
        return self.take(_U32)[0]

    def raw_text(self) -> bytes:
        """The next text, as bytes."""
        length = self.u32()
        start, self._position = self._position, self._position + length
        if self._position > len(self._data):
            raise MalformedFrame(f"a text of {length} bytes does not fit its payload")
        return self._data[start : self._position]

    def text(self) -> str:
        """The next text; bytes that are not UTF-8 become surrogates."""
        return self.raw_text().decode("utf-8", "surrogateescape")


def read_error(payload: bytes) -> tuple[int, str]:
    """ERROR's errno and text."""
    cursor = Cursor(payload)
    (number,) = cursor.take(struct.Struct("<i"))
    return number, cursor.text()
