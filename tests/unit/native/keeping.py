"""A `keep` with a stand-in for its machine, and clients of its sockets."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from tests.unit.native import stand_in

from worldfork.sandbox.microvm import wire
from worldfork.sandbox.microvm.wire import Kind
from worldfork.sandbox.program import encode_plan, spawn

STAND_IN = Path(stand_in.__file__)
WAIT_S = 20


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError(data)
        data += piece
    return data


class Control:
    """A client of `control`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, kind: int, payload: bytes = b"") -> None:
        self.sock.sendall(wire.frame(kind, 0, payload))

    def receive(self) -> tuple[int, bytes]:
        size, kind, _ = wire.HEADER.unpack(exactly(self.sock, wire.HEADER.size))
        return kind, exactly(self.sock, size)

    def ask(self, op: int, body: bytes = b"", tag: int = 77) -> wire.ControlMessage:
        self.sock.sendall(wire.control(op, tag, body))
        kind, payload = self.receive()
        assert kind == Kind.CONTROL
        return wire.read_control(payload)


class Keep:
    """A running `keep`."""

    def __init__(self, run: Path, owner: int, program: str, *items: tuple[str, str]) -> None:
        self.run = run
        plan = [
            ("id", "sb-keep"), ("run", str(run)), ("lock", str(run / "lock")),
            ("agent", "16"), ("qmp", "17"), ("generation", "5"), ("env", "WORD=here"),
            *[("arg", word) for word in (program, "-I", "-S", "-c", STAND_IN.read_text())],
            *items,
        ]  # fmt: skip
        self.pid, self.start = spawn("keep", encode_plan(plan), {4: owner})
        self.start.settimeout(WAIT_S)
        self.reaped: int | None = None
        self.machine = 0
        self.socks: list[socket.socket] = []

    def frame(self) -> tuple[int, bytes]:
        size, kind = struct.unpack_from("<IH", exactly(self.start, 12))
        return kind, exactly(self.start, size)

    def ready(self) -> None:
        kind, payload = self.frame()
        assert kind == wire.LAUNCHED
        self.machine = struct.unpack("<I", payload)[0]
        assert self.frame() == (wire.READY, struct.pack("<I", 5))

    def connect(self, name: str = "sock") -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        self.socks.append(sock)
        sock.settimeout(WAIT_S)
        sock.connect(str(self.run / name))
        return sock

    def control(self) -> Control:
        return Control(self.connect("control"))

    def code(self) -> int:
        if self.reaped is None:
            killer = threading.Timer(WAIT_S, os.kill, (self.pid, signal.SIGKILL))
            killer.start()
            try:
                self.reaped = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            finally:
                killer.cancel()
        return self.reaped


Start = Callable[..., Keep]


def gone(pid: int) -> bool:
    """Whether a process has ended within the time given; its pidfd tells."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(WAIT_S * 1000))
    finally:
        os.close(fd)
