"""A client of PID 1 that knows frames and nothing more, so that tests can send what a good client never would."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

EXEC, STDIN, CREDIT, SIGNAL, DETACH, ATTACH, LIST, INFO, HOLD, RELEASE, FREEZE, THAW = range(1, 13)
NSFDS, SHUTDOWN, RESIZE, ACCOUNT, MAPPED = range(13, 18)
HELLO, STARTED, STDOUT, STDERR, EXIT, ERROR, REPLY, STDIN_MORE, TRUNCATED = range(101, 110)
WITH_STDIN, MERGE, PTY, BUILTIN, KEEP, DISCARD_OUT, DISCARD_ERR = (1 << bit for bit in range(7))
REPLAY, FOLLOW, QUIET, CLAIM = (1 << bit for bit in range(4))
TREE = 1
EOF_FLAG = 1
REASONS = ("exited", "signaled", "oom", "timeout", "cancelled", "not_started")
PATH = "PATH=/usr/local/bin:/usr/bin:/bin"


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(data)) + data


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def exec_payload(
    argv: list[str] | list[bytes],
    flags: int = 0,
    *,
    credit: int = 1 << 20,
    timeout_ms: int = 0,
    drain_ms: int = 100,
    user: str = "",
    cwd: str = "/",
    rlimits: tuple[tuple[int, int, int], ...] = (),
    env: tuple[str, ...] = (PATH,),
) -> bytes:
    head = struct.pack("<IIQI", flags, credit, timeout_ms, drain_ms) + text(user) + text(cwd)
    head += struct.pack("<HHI", 24, 80, len(rlimits)) + b"".join(struct.pack("<IQQ", *limit) for limit in rlimits)
    return head + u32(len(argv)) + b"".join(map(text, argv)) + u32(len(env)) + b"".join(map(text, env))


@dataclass
class Ending:
    """EXIT, ERROR or REPLY of a channel, and what came before it."""

    kind: int
    payload: bytes
    out: bytes = b""
    err: bytes = b""
    frames: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def reason(self) -> str:
        return REASONS[self.payload[0]] if self.kind == EXIT else f"frame {self.kind}: {self.payload!r}"

    @property
    def code(self) -> int:
        return int(struct.unpack_from("<i", self.payload, 4 if self.kind == EXIT else 0)[0])

    @property
    def signal(self) -> int:
        return int(struct.unpack_from("<i", self.payload, 8)[0])


class RawClient:
    """One connection. Frames of channels that nobody waits for yet are kept."""

    def __init__(self, place: Path | socket.socket) -> None:
        if isinstance(place, socket.socket):
            self.sock = place
        else:
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(str(place))
        self.sock.settimeout(20)
        self.fds: list[int] = []
        self._bytes = b""
        self._kept: list[tuple[int, int, bytes]] = []
        self._last = 0
        self.hello = self.frame()

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)

    def send(self, kind: int, channel: int, payload: bytes = b"", flags: int = 0) -> None:
        self.sock.sendall(struct.pack("<IHHI", len(payload), kind, flags, channel) + payload)

    def frame(self, channel: int | None = None) -> tuple[int, int, bytes]:
        """The next frame (type, channel, payload), of any channel or of one. EOFError when PID 1 closed."""
        for i, kept in enumerate(self._kept):
            if channel in (None, kept[1]):
                return self._kept.pop(i)
        while True:
            got = self._receive()
            if channel in (None, got[1]):
                return got
            self._kept.append(got)

    def _receive(self) -> tuple[int, int, bytes]:
        while True:
            if len(self._bytes) >= 12:
                length, kind, _, channel = struct.unpack_from("<IHHI", self._bytes)
                if len(self._bytes) >= 12 + length:
                    payload, self._bytes = self._bytes[12 : 12 + length], self._bytes[12 + length :]
                    return kind, channel, payload
            data, control, _, _ = self.sock.recvmsg(1 << 20, 256)
            for _, _, fds in control:
                self.fds += array.array("i", fds)
            if not data:
                raise EOFError
            self._bytes += data

    def quiet(self, seconds: float) -> list[tuple[int, int, bytes]]:
        """All frames that come within that time."""
        frames = []
        until = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            while (left := until - time.monotonic()) > 0:
                self.sock.settimeout(left)
                frames.append(self.frame())
        self.sock.settimeout(20)
        return frames

    def open(self, kind: int, payload: bytes = b"") -> int:
        self._last += 1
        self.send(kind, self._last, payload)
        return self._last

    def start(self, argv: list[str] | list[bytes], flags: int = 0, **fields: object) -> int:
        return self.open(EXEC, exec_payload(argv, flags, **fields))  # type: ignore[arg-type]

    def finish(self, channel: int) -> Ending:
        """Reads a channel to its end, giving back the credit of what it prints."""
        out, err, frames = bytearray(), bytearray(), []
        while True:
            kind, _, payload = self.frame(channel)
            if kind in (EXIT, ERROR, REPLY):
                return Ending(kind, payload, bytes(out), bytes(err), frames)
            if kind in (STDOUT, STDERR):
                (out if kind == STDOUT else err).extend(payload)
                with contextlib.suppress(BrokenPipeError):  # what is kept outlives the connection
                    self.send(CREDIT, channel, u32(len(payload)))
            else:
                frames.append((kind, payload))

    def run(self, argv: list[str] | list[bytes], flags: int = 0, **fields: object) -> Ending:
        return self.finish(self.start(argv, flags, **fields))

    def sh(self, line: str, flags: int = 0, **fields: object) -> Ending:
        return self.run(["sh", "-c", line], flags, **fields)

    def ask(self, kind: int, payload: bytes = b"") -> Ending:
        return self.finish(self.open(kind, payload))

    def kill(self, channel: int) -> Ending:
        self.send(SIGNAL, channel, struct.pack("<i", 9), TREE)
        return self.finish(channel)

    def inside(self) -> int:
        """Processes inside, as INFO counts them."""
        return int(struct.unpack_from("<III", self.ask(INFO).payload, 8)[1])


class Init:
    """The harness: PID 1 of a pid namespace, on a socket in `directory`."""

    def __init__(self, program: Path, directory: Path, *options: str | Path, keep: tuple[int, ...] = ()) -> None:
        self.place = directory / "sock"
        self.process = subprocess.Popen(
            [program, self.place, *options], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, pass_fds=keep
        )
        assert self.process.stdout is not None
        self.runs = self.process.stdout.readline() == b"ready\n"
        self._clients: list[RawClient] = []

    def client(self) -> RawClient:
        self._clients.append(RawClient(self.place))
        return self._clients[-1]

    def pid(self) -> int:
        """PID 1, as this side sees it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self.process.kill()
        self.process.communicate()


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "did not come true"
        time.sleep(0.005)
