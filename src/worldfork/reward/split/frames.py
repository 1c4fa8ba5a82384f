"""Frames between a fork and the host: a length, a kind, a token of eight bytes, and what they carry."""

from __future__ import annotations

import marshal
import secrets
import struct
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import MAGIC_NUMBER

from worldfork.core.ids import content_id
from worldfork.reward.split.values import MAX_FRAME_BYTES, Malformed
from worldfork.sandbox.process import Process

HEADER_BYTES = 9
TOKEN_BYTES = 8

VALUE_MODULES = tuple(f"worldfork.reward.split.{name}" for name in ("values", "encoding", "decoding"))
"""What both programs need."""

_LAST_BYTES = 2000
_U32 = struct.Struct("<I")


@dataclass(frozen=True)
class Frame:
    """One frame."""

    kind: bytes
    token: bytes
    body: bytes


class FrameStream:
    """The frames of one process. What it may make the host hold is one frame and the window of its output."""

    def __init__(self, process: Process, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.process = process
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._last = bytearray()
        self.received_bytes = 0

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        return bytes(self._last).decode("utf-8", "replace").strip()

    async def next(self) -> Frame | None:
        """Return the next frame; None once the process has ended.

        Raises:
            Malformed: a frame of a size that none has.
            SandboxDied: its sandbox is gone.
        """
        while (frame := self._take()) is None:
            try:
                stream, data = await anext(self.process)
            except StopAsyncIteration:
                return None
            if stream == "stdout":
                self._buffer += data
                self.received_bytes += len(data)
            else:
                self._last += data
                del self._last[:-_LAST_BYTES]
        return frame

    async def send(self, frame: Frame) -> None:
        """Send a frame.

        Raises:
            BrokenPipeError: the process has ended. SandboxDied: its sandbox is gone.
        """
        size = HEADER_BYTES + len(frame.body)
        await self.process.write_stdin(_U32.pack(size) + frame.kind + frame.token + frame.body)

    def _take(self) -> Frame | None:
        if len(self._buffer) < _U32.size:
            return None
        (size,) = _U32.unpack_from(self._buffer)
        if not HEADER_BYTES <= size <= self._max_frame_bytes:
            raise Malformed(f"a frame of {size} bytes")
        if len(self._buffer) < _U32.size + size:
            return None
        data = bytes(self._buffer[_U32.size : _U32.size + size])
        del self._buffer[: _U32.size + size]
        return Frame(data[:1], data[1:HEADER_BYTES], data[HEADER_BYTES:])


def new_token() -> bytes:
    """Return what an answer must repeat; nobody can have answered before it was asked."""
    return secrets.token_bytes(TOKEN_BYTES)


@cache
def program_argument() -> str:
    """Return the first lines of a program, for `python -c`."""
    return resources.files(__package__).joinpath("bootstrap.py").read_text(encoding="utf-8")


@cache
def program_digest() -> str:
    """Return 64 hex digits over everything that runs in the forks."""
    names = sorted(each.name for each in resources.files(__package__).iterdir() if each.name.endswith(".py"))
    texts = [resources.files(__package__).joinpath(name).read_bytes() for name in names]
    return content_id(b"split programs", *texts, _source("worldfork.reward.reporter"))


def program_input(*modules: str, **texts: str) -> bytes:
    """Return what those first lines read: modules of this package by name, the last of which is run.

    Args:
        texts: modules that are no file, before the last: name -> text.
    """
    parts: list[bytes] = []
    for name in modules[:-1]:
        parts += [name.encode(), _code(name), _source(name)]
    for name, text in texts.items():
        whole = f"{__package__}.{name}"
        parts += [whole.encode(), _compiled(whole, text.encode("utf-8")), text.encode("utf-8")]
    parts += [modules[-1].encode(), _code(modules[-1]), _source(modules[-1])]
    head = _U32.pack(len(MAGIC_NUMBER)) + MAGIC_NUMBER + _U32.pack(len(parts) // 3)
    return head + b"".join(_U32.pack(len(part)) + part for part in parts)


def _compiled(name: str, text: bytes) -> bytes:
    return marshal.dumps(compile(text, f"<{name}>", "exec", dont_inherit=True))


@cache
def _code(module: str) -> bytes:
    return _compiled(module, _source(module))


@cache
def _source(module: str) -> bytes:
    above, _, name = module.rpartition(".")
    return resources.files(above).joinpath(f"{name}.py").read_bytes()
