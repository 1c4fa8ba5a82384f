"""Requests to the guest of a running machine, through the socket `control` of its `keep`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Final

from worldfork.core.errors import SandboxDied, SandboxError
from worldfork.sandbox.microvm import wire
from worldfork.sandbox.microvm.wire import Kind, Op, Target

ANSWER_S: Final = 30.0
"""How long a guest may take for one request; one that QEMU interprets is slow."""
_SOCKET: Final = "control"


class Control:
    """One connection to a machine's `keep`. Made by `control`; used by one task at a time."""

    def __init__(self, run: Path, sock: socket.socket) -> None:
        self._run = run
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._busy = False
        self._broken = False

    async def ask(self, op: Op, body: bytes = b"", *, timeout_s: float = ANSWER_S) -> bytes:
        """Send one request to the guest and return the body of its answer.

        After a time limit or a cancellation the connection is of no more use, since a late answer could be taken for
        that of the next request.

        Args:
            op: what is wanted.
            body: as `native/mux.h` describes it.
            timeout_s: for the answer.

        Raises:
            SandboxDied: the machine has ended.
            SandboxError: the guest refused (`errno` says how, `what` names the item), or gave no answer in time.
        """
        data = wire.control(op, 1, body)
        payload = await self._bounded(op.name.lower(), self._exchange(data, Kind.CONTROL), timeout_s)
        message = wire.read_control(payload)
        if message.error_number:
            what = message.body.rstrip(b"\0").decode(errors="replace")
            reason = os.strerror(message.error_number)
            raise SandboxError(
                f"the guest could not do {op.name.lower()}: {f'{what}: {reason}' if what else reason}",
                errno=message.error_number,
                what=what,
                step=op.name.lower(),
            )
        return message.body

    async def ask_if_able(self, op: Op, body: bytes = b"") -> None:
        """Ask for what only saves time later; a guest that refuses, as one of an older image does, is let be.

        Raises:
            SandboxDied: the machine has ended.
            SandboxError: the guest gave no answer in time.
        """
        try:
            await self.ask(op, body)
        except SandboxError as error:
            if "errno" not in error.fields:
                raise

    async def quiesce(self, *, timeout_s: float = ANSWER_S) -> None:
        """Let both directions rest at the end of a frame, with nothing under way; until `go` or this one's end.

        Raises:
            SandboxDied: the machine has ended, or another client has quieted it.
            SandboxError: it did not become quiet in time.
        """
        await self._bounded("quiesce", self._exchange(wire.frame(Kind.QUIESCE), Kind.QUIET), timeout_s)

    async def go(self, *, timeout_s: float = ANSWER_S) -> None:
        """Let both directions go on.

        Raises:
            SandboxDied: the machine has ended.
        """
        await self._bounded("go", self._exchange(wire.frame(Kind.GO), Kind.GO), timeout_s)

    async def stream(self, target: Target, argument: bytes = b"") -> socket.socket:
        """Return a connection of its own, not blocking, to something in the guest; the caller closes it.

        Raises:
            SandboxDied: the machine has ended.
        """
        return await open_stream(self._run, target, argument)

    async def _bounded(self, what: str, work: Coroutine[Any, Any, bytes], timeout_s: float) -> bytes:
        if self._busy or self._broken:
            work.close()
            raise SandboxError(f"this connection to the machine cannot carry out {what}", step=what)
        self._busy = True
        done = False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await work
            done = True
        except TimeoutError:
            raise SandboxError(
                f"the guest gave no answer to {what} within {timeout_s:g} s", step=what, timeout_s=timeout_s
            ) from None
        except (OSError, EOFError) as error:
            raise SandboxDied(f"the machine has ended: {error}", step=what) from error
        finally:
            self._busy = False
            self._broken |= not done
        return answer

    async def _exchange(self, data: bytes, wanted: Kind) -> bytes:
        await self._loop.sock_sendall(self._socket, data)
        size, kind, _ = wire.HEADER.unpack(await exactly(self._socket, wire.HEADER.size))
        payload = await exactly(self._socket, min(size, wire.PAYLOAD_BYTES_MAX))
        if kind != wanted or size > wire.PAYLOAD_BYTES_MAX or (kind == Kind.CONTROL and size < wire.CONTROL_HEAD.size):
            raise EOFError("what answers is not its keep")
        return payload


@contextlib.asynccontextmanager
async def control(run: Path) -> AsyncIterator[Control]:
    """Give a connection to the `keep` of a running machine; its end lets a machine that it quieted go on.

    Args:
        run: the sandbox's directory below `run`.

    Raises:
        SandboxDied: there is no such machine.
    """
    with reach(run / _SOCKET) as sock:
        yield Control(run, sock)


async def open_stream(run: Path, target: Target, argument: bytes = b"") -> socket.socket:
    """Return a connection, not blocking, to something in the guest; it ends at once where the guest has no such thing.

    Args:
        run: the sandbox's directory below `run`.
        target: what is wanted.
        argument: of the target: for EXPORT a directory of the guest.

    Raises:
        SandboxDied: there is no such machine.
    """
    sock = reach(run / _SOCKET)
    try:
        data = wire.frame(Kind.OPEN, 0, wire.open_payload(target, argument))
        await asyncio.get_running_loop().sock_sendall(sock, data)
    except OSError as error:
        sock.close()
        raise SandboxDied(f"the machine has ended: {error}", step="stream") from error
    except BaseException:
        sock.close()
        raise
    return sock


def reach(path: Path) -> socket.socket:
    """Return a connection, not blocking, to a unix socket of a machine; the caller closes it.

    Raises:
        SandboxDied: nobody listens there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        # The path of a unix socket has 108 bytes: reached through its directory's descriptor.
        directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sock.connect(f"/proc/self/fd/{directory}/{path.name}")
        finally:
            os.close(directory)
    except OSError as error:
        sock.close()
        raise SandboxDied(f"no machine listens at {path}: {error.strerror}", step="connect") from error
    return sock


async def exactly(sock: socket.socket, size: int) -> bytes:
    """Read so many bytes.

    Raises:
        EOFError: the stream ended before.
    """
    loop = asyncio.get_running_loop()
    parts = []
    while size > 0:
        part = await loop.sock_recv(sock, size)
        if not part:
            raise EOFError("its connection ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
