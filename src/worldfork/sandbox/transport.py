"""Frames over one socket: what is read goes to the channel it names, and the end reaches every channel."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import weakref
from collections.abc import Callable
from typing import Final

from worldfork.core.errors import SandboxDied, SandboxError, WorldforkError
from worldfork.sandbox import wire
from worldfork.sandbox.process import Process

NAMESPACES: Final = 4
"""Descriptors that come with the answer to NSFDS."""
_READ_BYTES: Final = 64 * 1024 + 12


class Call:
    """A request with one answer."""

    __slots__ = ("future", "late", "wanted")

    def __init__(self, *, wanted: int = wire.REPLY, late: Callable[[], None] | None = None) -> None:
        self.wanted = wanted
        self.late = late
        """Called when the answer comes after the caller was cancelled, to undo what was granted."""
        self.future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_frame(self, kind: int, payload: bytes) -> bool:
        """Take the answer; it is the last frame of its channel."""
        if kind == self.wanted:
            if not self.future.done():
                self.future.set_result(payload)
            elif self.late is not None:
                self.late()
        elif kind == wire.ERROR:
            number, text = wire.read_error(payload)
            self.fail(lambda: SandboxError(text or os.strerror(number), errno=number))
        else:
            raise wire.MalformedFrame(f"a call cannot be answered with a frame of type {kind}")
        return True

    def fail(self, failure: Callable[[], WorldforkError]) -> None:
        """Answer with an error."""
        if not self.future.done():
            self.future.set_exception(failure())
            self.future.exception()  # counts as seen: the caller may be gone


class Transport:
    """The socket's side of a `Connection`; knows frames and channels, not what they are for."""

    __slots__ = (
        "__weakref__",
        "_channels",
        "_ending",
        "_last_channel",
        "_loop",
        "_outgoing",
        "_owner_pid",
        "_reader",
        "_socket",
        "closed",
        "descriptor_calls",
        "descriptors",
        "epitaph",
        "reads",
        "sandbox_id",
    )

    def __init__(self, sock: socket.socket, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self.closed = asyncio.Event()
        """Set once the connection has ended, for whatever reason."""
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._owner_pid = os.getpid()
        self._channels: dict[int, Process | Call] = {}
        self._last_channel = 0
        self._reader = wire.FrameReader()
        self._outgoing = bytearray()
        self.reads = 0
        """How often something came."""
        self.descriptor_calls = 0
        """Calls under way whose answer brings descriptors; without any, those that come are refused."""
        self.descriptors: list[int] = []
        """Received and not yet taken by a call."""
        self._ending = ""
        self.epitaph: Callable[[], SandboxError] | None = None
        """Says why the sandbox was ended, where somebody on this side did it for a reason."""
        sock.setblocking(False)
        _follow_fork()
        _live.add(self)
        # By number: asyncio describes a socket object to itself each time, with two system calls.
        self._loop.add_reader(sock.fileno(), self._readable)

    def close(self) -> None:
        """End the connection. What runs here without `keep` is killed; calls under way raise. Idempotent."""
        if self._owner_pid == os.getpid():
            self._end("the connection was closed on this side")

    @property
    def descriptor(self) -> int:
        """The socket's descriptor. As long as anybody has a copy open, init sees no end of this connection."""
        return self._socket.fileno()

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything from it."""
        return not self._channels

    def send(self, data: bytes) -> None:
        """Send whole frames: at once if the socket takes them, else as it does."""
        if self._outgoing:
            self._outgoing += data
            return
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return  # what it sent before it went is still to be read; the end is seen there
        if sent < len(data):
            self._outgoing += memoryview(data)[sent:]
            self._loop.add_writer(self._socket.fileno(), self._writable)

    def abandon(self) -> None:
        """Close the socket and no more: in a forked child, which shares the event loop's epoll object."""
        self._ending = "the process that opened the connection was forked"
        self._socket.close()

    def forget(self, channel: int) -> None:
        """Ignore what still comes on a channel."""
        self._channels.pop(channel, None)

    def new_channel(self) -> int:
        """A number that no live channel has.

        Raises:
            SandboxDied: the connection has ended.
            SandboxError: it belongs to the process that this one was forked from.
        """
        if self._owner_pid != os.getpid():
            raise SandboxError(
                f"the connection to sandbox {self.sandbox_id} belongs to the process that opened it",
                remedy="attach again by the sandbox's id after a fork",
                sandbox_id=self.sandbox_id,
            )
        if self._ending:
            raise self.death()
        self._last_channel = self._last_channel % 0xFFFF_FFFF + 1
        while self._last_channel in self._channels:
            self._last_channel = self._last_channel % 0xFFFF_FFFF + 1
        return self._last_channel

    def death(self) -> SandboxError:
        """The error of every call on an ended connection."""
        if self.epitaph is not None:
            return self.epitaph()
        return SandboxDied(
            f"sandbox {self.sandbox_id} is gone: {self._ending}",
            remedy="restore or fork its last snapshot; a sandbox that died is never replaced silently",
            sandbox_id=self.sandbox_id,
        )

    def _readable(self) -> None:
        try:
            data = self._receive()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(f"reading from its init failed, {os.strerror(error.errno or 0)}")
            return
        if not data:
            self._end("its init ended or dropped the connection")
            return
        self.reads += 1
        try:
            for kind, _flags, number, payload in self._reader.feed(data):
                if not number and kind == wire.ERROR:
                    self._end(f"its init refused the connection, {wire.read_error(payload)[1]}")
                    return
                if (channel := self._channels.get(number)) is not None and channel.on_frame(kind, payload):
                    self._channels.pop(number, None)
        except wire.MalformedFrame as error:
            self._end(f"its init broke the protocol, {error}")

    def _receive(self) -> bytes:
        if not self.descriptor_calls:
            return self._socket.recv(_READ_BYTES)
        data, ancillary, _flags, _address = self._socket.recvmsg(
            _READ_BYTES, socket.CMSG_SPACE(4 * NAMESPACES), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self.descriptors += numbers
        return data

    def _writable(self) -> None:
        try:
            sent = self._socket.send(self._outgoing)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._outgoing.clear()
        else:
            del self._outgoing[:sent]
        if not self._outgoing:
            self._loop.remove_writer(self._socket.fileno())

    def _end(self, ending: str) -> None:
        if self._ending:
            return
        self._ending = ending
        _live.discard(self)
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()
        channels = list(self._channels.values())
        self._channels.clear()
        for channel in channels:
            channel.fail(self.death)
        self.closed.set()


_live: weakref.WeakSet[Transport] = weakref.WeakSet()
_following_fork = False


def _follow_fork() -> None:
    """Have forked children let go of the sockets: a stream must end when its owner does."""
    global _following_fork
    if not _following_fork:
        _following_fork = True
        os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    for transport in list(_live):
        transport.abandon()
