"""A played init whose file operations work on a directory of the host, or answer what a test makes up."""

from __future__ import annotations

import asyncio
import os
import stat
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tests.unit.sandbox.fake_init import FakeInit, ending, output

from worldfork.sandbox import wire

KINDS = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "l", stat.S_IFIFO: "p", stat.S_IFSOCK: "s"}


def record(name: bytes, kind: str = "f", *, mode: int = 0o644, size: int = 0, target: bytes = b"") -> bytes:
    fields = struct.pack("<BIIIQqQI", ord(kind), mode, 0, 0, size, 10**18, 1, 1)
    return fields + wire.text(name) + wire.text(target)


def _record_of(path: bytes, name: bytes) -> bytes:
    facts = os.lstat(path)
    target = os.readlink(path) if stat.S_ISLNK(facts.st_mode) else b""
    kind = KINDS[stat.S_IFMT(facts.st_mode)]
    return record(name, kind, mode=facts.st_mode, size=facts.st_size, target=target)


class FakeFiles:
    """Answers `read`, `write`, `list`, `stat`, `mkdir`, `symlink`, `chmod` and `delete` below `root`.

    Output goes within the credit that its reader gave, as from the real one.
    """

    def __init__(self, init: FakeInit, root: Path) -> None:
        self._init = init
        self._root = os.fsencode(root)
        self._writes: dict[int, tuple[list[bytes], bytearray]] = {}
        self.answers: dict[tuple[bytes, ...], Callable[[int], list[bytes]]] = {}
        """Made-up answers to exact requests."""
        self.sent_bytes = 0
        self._room_bytes: dict[int, int] = {}
        self._unsent: dict[int, deque[bytes]] = {}

    def _path(self, path: bytes) -> bytes:
        return os.path.join(self._root, path.lstrip(b"/"))

    async def serve(self) -> None:
        try:
            while True:
                await self._one(await self._init.receive())
        except (EOFError, OSError):
            return

    async def _one(self, frame: wire.Frame) -> None:
        if frame.kind == wire.SIGNAL:
            await self._init.send(ending(frame.channel, 4, -9, 9))
        elif frame.kind == wire.STDIN:
            await self._stdin(frame)
        elif frame.kind == wire.CREDIT:
            self._room_bytes[frame.channel] += wire.Cursor(frame.payload).u32()
            await self._send(frame.channel)
        elif frame.kind == wire.EXEC:
            argv = self._argv(frame)
            if argv[0] == b"write":
                self._writes[frame.channel] = (argv, bytearray())
                return
            try:
                frames = (
                    self.answers[tuple(argv)](frame.channel) if tuple(argv) in self.answers else self._do(frame, argv)
                )
            except OSError as error:
                frames = [ending(frame.channel, 0, error.errno or 0)]
            self._unsent[frame.channel] = deque(frames)
            await self._send(frame.channel)

    async def _send(self, channel: int) -> None:
        unsent = self._unsent.get(channel, deque())
        sent: list[bytes] = []
        while unsent:
            length, kind = struct.unpack_from("<IH", unsent[0])
            size_bytes = length if kind in (wire.STDOUT, wire.STDERR) else 0
            if size_bytes > self._room_bytes[channel]:
                break
            self._room_bytes[channel] -= size_bytes
            sent.append(unsent.popleft())
        self.sent_bytes += sum(map(len, sent))
        await self._init.send(*sent)

    def _argv(self, frame: wire.Frame) -> list[bytes]:
        cursor = wire.Cursor(frame.payload)
        flags, self._room_bytes[frame.channel], *_ = cursor.take(struct.Struct("<IIQI"))
        assert flags & wire.EXEC_BUILTIN
        cursor.text(), cursor.text(), cursor.take(struct.Struct("<HHI"))
        return [cursor.raw_text() for _ in range(cursor.u32())]

    def _do(self, frame: wire.Frame, argv: list[bytes]) -> list[bytes]:
        channel, path = frame.channel, self._path(argv[1])
        content = b""
        match argv[0]:
            case b"read":
                with open(path, "rb") as source:
                    content = struct.pack("<Q", os.fstat(source.fileno()).st_size) + source.read()
            case b"list":
                content = b"".join(_record_of(os.path.join(path, name), name) for name in os.listdir(path))
            case b"stat":
                content = _record_of(path, os.path.basename(path))
            case b"mkdir":
                os.makedirs(path, exist_ok=True)
            case b"symlink":
                os.symlink(argv[1], self._path(argv[2]))
            case b"chmod":
                os.chmod(self._path(argv[2]), int(argv[1], 8))
            case b"delete":
                os.unlink(path)
        pieces = [content[at : at + wire.MAX_PAYLOAD_BYTES] for at in range(0, len(content), wire.MAX_PAYLOAD_BYTES)]
        return [*(output(channel, piece) for piece in pieces), ending(channel, 0)]

    async def _stdin(self, frame: wire.Frame) -> None:
        argv, content = self._writes[frame.channel]
        assert len(frame.payload) <= wire.MAX_PAYLOAD_BYTES
        content += frame.payload
        if frame.payload:
            await asyncio.sleep(0)
            await self._init.send(wire.u32_frame(wire.STDIN_CREDIT, frame.channel, len(frame.payload)))
        if frame.flags & wire.FLAG_EOF:
            path = self._path(argv[1])
            Path(os.fsdecode(path)).write_bytes(content)
            if argv[2] != b"-":
                os.chmod(path, int(argv[2], 8))
            if len(argv) > 4:
                os.utime(path, ns=(int(argv[4]), int(argv[4])))
            await self._init.send(ending(frame.channel, 0))
