"""Orders to a running QEMU, one at a time, each with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

from worldfork.core.errors import SandboxDied, SandboxError

LINE_LIMIT_BYTES = 4 << 20
"""The longest line that is read; the schema of QEMU 7.2 has about 200 KB."""
ANSWER_S = 10.0
"""How long one order may take unless its caller says otherwise."""
_READ_BYTES = 64 << 10
_FDS_LIMIT = 16


class Qmp:
    """One connection to a QEMU's monitor. Made by `connect`; used by one task at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._pending = bytearray()
        self._last_id = 0
        self._busy = False
        self._broken = False
        self.version = ""
        """Of the QEMU, as `7.2.22`."""

    async def greet(self, timeout_s: float = ANSWER_S) -> None:
        """Read what QEMU says first, and leave the mode in which it only negotiates."""
        greeting = await self._bounded("the greeting", self._read_line(), timeout_s)
        try:
            number = greeting["QMP"]["version"]["qemu"]
            self.version = f"{number['major']}.{number['minor']}.{number['micro']}"
        except (KeyError, TypeError):
            self._broken = True
            raise SandboxError("what answers at this socket is not QEMU", step="qmp") from None
        await self.execute("qmp_capabilities", timeout_s=timeout_s)

    async def execute(
        self,
        order: str,
        arguments: dict[str, Any] | None = None,
        *,
        fds: Sequence[int] = (),
        timeout_s: float = ANSWER_S,
    ) -> Any:
        """Carry out one order and return what QEMU gives back; events that come meanwhile are dropped.

        After a time limit or a cancellation the connection is of no more use, since a late answer could be taken for
        that of the next order.

        Args:
            order: such as "stop".
            arguments: of the order.
            fds: descriptors that go along, for "getfd" and "add-fd".
            timeout_s: for the whole order.

        Raises:
            SandboxDied: QEMU has ended.
            SandboxError: QEMU refused (`qmp_class` says how), or gave no answer in time.
        """
        if self._busy or self._broken:
            raise SandboxError(f"this connection to QEMU cannot carry out {order}", order=order, step="qmp")
        self._busy = True
        try:
            answer = await self._bounded(order, self._exchange(order, arguments or {}, fds), timeout_s)
        finally:
            self._busy = False
        if "error" in answer:
            raise _refusal(order, answer["error"])
        return answer["return"]

    async def row(self, order: str, *, fds: Sequence[int] = ()) -> dict[str, Any]:
        """Do what `execute` does, for an order that gives back one object.

        Raises:
            SandboxDied, SandboxError: as `execute`, or it is none.
        """
        found = await self.execute(order, fds=fds)
        if not isinstance(found, dict):
            raise SandboxError(f"QEMU answered {order} with something else", order=order, step="qmp")
        return found

    async def rows(self, order: str) -> list[dict[str, Any]]:
        """Do what `execute` does, for an order that gives back a list of objects.

        Raises:
            SandboxDied, SandboxError: as `execute`, or it is none.
        """
        found = await self.execute(order)
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise SandboxError(f"QEMU answered {order} with something else", order=order, step="qmp")
        return found

    def close(self) -> None:
        """Close the connection; the QEMU goes on."""
        self._broken = True
        self._socket.close()

    async def _bounded(self, order: str, work: Coroutine[Any, Any, dict[str, Any]], timeout_s: float) -> dict[str, Any]:
        done = False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await work
            done = True
        except TimeoutError:
            raise SandboxError(
                f"QEMU gave no answer to {order} within {timeout_s:g} s", order=order, step="qmp", timeout_s=timeout_s
            ) from None
        except OSError as error:
            raise SandboxDied(f"QEMU has ended: {error}", order=order, step="qmp") from error
        finally:
            self._broken |= not done
        return answer

    async def _exchange(self, order: str, arguments: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        self._last_id += 1
        number = self._last_id
        request = {"execute": order, "arguments": arguments, "id": number}
        await self._send(json.dumps(request).encode() + b"\n", fds)
        while True:
            answer = await self._read_line()
            if "event" in answer:
                continue
            if answer.get("id") != number or not answer.keys() & {"return", "error"}:
                raise SandboxError(f"QEMU answered {order} with something else", order=order, step="qmp")
            return answer

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        if fds:
            if len(fds) > _FDS_LIMIT:
                raise ValueError(f"at most {_FDS_LIMIT} descriptors go along with one order")
            await self._writable()
            sent = socket.send_fds(self._socket, [data], list(fds))
            data = data[sent:]
        if data:
            await self._loop.sock_sendall(self._socket, data)

    async def _writable(self) -> None:
        ready = asyncio.Event()
        self._loop.add_writer(self._socket, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_writer(self._socket)

    async def _read_line(self) -> dict[str, Any]:
        while (end := self._pending.find(b"\n")) < 0:
            if len(self._pending) > LINE_LIMIT_BYTES:
                raise SandboxError(f"QEMU sent a line of more than {LINE_LIMIT_BYTES} bytes", step="qmp")
            data = await self._loop.sock_recv(self._socket, _READ_BYTES)
            if not data:
                raise ConnectionResetError("its monitor is closed")
            self._pending += data
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise SandboxError("QEMU sent a line that is no object", step="qmp")
        return answer


def _refusal(order: str, error: Any) -> SandboxError:
    known = error if isinstance(error, dict) else {}
    return SandboxError(
        f"QEMU refused {order}: {known.get('desc', error)}",
        order=order,
        step="qmp",
        qmp_class=str(known.get("class", "")),
    )


@contextlib.asynccontextmanager
async def connect(path: Path, *, timeout_s: float = ANSWER_S) -> AsyncIterator[Qmp]:
    """Give a connection to the QEMU that listens at a unix socket, for one operation.

    QEMU serves one connection at a time, and a second one waits until the first is closed.

    Raises:
        SandboxDied: nobody listens there.
        SandboxError: QEMU gave no answer in time, or something else answers there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        try:
            # The path of a unix socket has 108 bytes: reached through its directory's descriptor.
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sock.connect(f"/proc/self/fd/{directory}/{path.name}")
            finally:
                os.close(directory)
        except OSError as error:
            raise SandboxDied(f"no QEMU listens at {path}: {error.strerror}", step="qmp") from error
        qmp = Qmp(sock)
        await qmp.greet(timeout_s)
        yield qmp
    finally:
        sock.close()
