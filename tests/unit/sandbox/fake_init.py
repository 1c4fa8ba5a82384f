"""The other end of a connection, played by the test: frames in, frames out, nothing by itself."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from worldfork.sandbox import wire
from worldfork.sandbox.connection import Connection

SANDBOX_ID = "sb-aaaaaaaaaaaaaaaa"
T = TypeVar("T")


def run(test: Coroutine[Any, Any, T], timeout_s: float = 20) -> T:
    """Run one test's coroutine; a hang is a failure."""

    async def limited() -> T:
        async with asyncio.timeout(timeout_s):
            return await test

    return asyncio.run(limited())


def hello(version: int = wire.VERSION, sandbox_id: str = SANDBOX_ID) -> bytes:
    return wire.frame(wire.HELLO, 0, struct.pack("<HHI", version, 0, 1) + wire.text(sandbox_id))


class FakeInit:
    """Reads what the client sends, sends what the test says."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._pending = b""

    async def receive(self) -> wire.Frame:
        """The next frame; EOFError at the end of the stream."""
        loop = asyncio.get_running_loop()
        while True:
            if len(self._pending) >= 12:
                length, kind, flags, channel = struct.unpack_from("<IHHI", self._pending)
                if len(self._pending) >= 12 + length:
                    payload, self._pending = self._pending[12 : 12 + length], self._pending[12 + length :]
                    return wire.Frame(kind, flags, channel, payload)
            data = await loop.sock_recv(self.sock, 1 << 20)
            if not data:
                raise EOFError
            self._pending += data

    async def expect(self, kind: int) -> wire.Frame:
        """The next frame, which must be of this type."""
        frame = await self.receive()
        assert frame.kind == kind, frame
        return frame

    async def send(self, *frames: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, b"".join(frames))

    async def started(self, channel: int, pid: int = 7) -> None:
        await self.send(wire.u32_frame(wire.STARTED, channel, pid))

    async def exited(self, channel: int, code: int = 0) -> None:
        await self.send(ending(channel, 0, code))

    def close(self) -> None:
        self.sock.close()


def ending(channel: int, reason: int, code: int = 0, signal: int = 0) -> bytes:
    return wire.frame(wire.EXIT, channel, struct.pack("<B3xiiQQQQ", reason, code, signal, 1000, 500, 2048, 9000))


def output(channel: int, data: bytes, kind: int = wire.STDOUT) -> bytes:
    return wire.frame(kind, channel, data)


def error(channel: int, number: int, text: str = "") -> bytes:
    return wire.frame(wire.ERROR, channel, struct.pack("<i", number) + wire.text(text))


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[Connection, FakeInit]]:
    """An open connection and its other end."""
    ours, theirs = socket.socketpair()
    init = FakeInit(theirs)
    try:
        await init.send(hello())
        connection = await Connection.open(ours, sandbox_id=SANDBOX_ID)
        try:
            yield connection, init
        finally:
            connection.close()
    finally:
        init.close()
        ours.close()
