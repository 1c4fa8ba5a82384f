"""Starting `wf-init keep`, which starts and holds one machine, and ends it with its owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worldfork.core.errors import LaunchFailed, SandboxError
from worldfork.core.ids import content_id
from worldfork.sandbox import wire as sandbox_wire
from worldfork.sandbox.microvm import wire
from worldfork.sandbox.microvm.accel import kvm_group
from worldfork.sandbox.microvm.control import exactly
from worldfork.sandbox.microvm.machine import Accel
from worldfork.sandbox.namespace import natural_form
from worldfork.sandbox.program import encode_plan, spawn
from worldfork.sandbox.remedies import explain

AGENT_FD: Final = 16
QMP_FD: Final = 17
RAM_FD: Final = 18
STATE_FD: Final = 19
DISKS_FD: Final = 20
"""Numbers that QEMU gets its descriptors as; those of disks are this and the following."""

_OWNER_FD: Final = 4
_FIRST_USER: Final = 0x6000_0000
_HEADER: Final = struct.Struct("<IHHI")
_ENDED: Final = "keep: the machine ended: "
_WORDS: Final = 500
_END_S: Final = 5.0
_LAST_WORDS_S: Final = 2.0


@dataclass
class Kept:
    """A `keep` whose machine starts or runs."""

    pid: int
    """Of the keep, a child of this process."""
    sock: socket.socket
    """To it; its end is the end of both, unless the sandbox is detached."""
    qemu_pid: int = 0
    _qemu: int = -1

    async def launched(self) -> None:
        """Wait until QEMU's process exists.

        Raises:
            LaunchFailed: it could not be started.
        """
        self.qemu_pid = struct.unpack("<I", await self._expect(wire.LAUNCHED))[0]
        with contextlib.suppress(OSError):  # it has ended already, as is told next
            self._qemu = os.pidfd_open(self.qemu_pid)

    async def ready(self) -> None:
        """Wait until the guest has answered.

        Raises:
            LaunchFailed: QEMU ended before, with what it said.
        """
        await self._expect(wire.READY)

    async def last_words(self) -> SandboxError | None:
        """Return why a machine has ended that was seen to end; None if nothing tells."""
        with contextlib.suppress(TimeoutError, EOFError, OSError):
            async with asyncio.timeout(_LAST_WORDS_S):
                kind, payload = await self._frame()
                return _failure(*sandbox_wire.read_error(payload)) if kind == sandbox_wire.ERROR else None
        return None

    async def _expect(self, wanted: int) -> bytes:
        try:
            kind, payload = await self._frame()
        except (EOFError, OSError) as error:
            raise LaunchFailed("keep ended without a word", remedy="see `worldfork doctor`") from error
        if kind == sandbox_wire.ERROR:
            raise _failure(*sandbox_wire.read_error(payload))
        if kind != wanted:
            raise LaunchFailed(f"keep said {kind} where {wanted} was expected", remedy="install Worldfork again")
        return payload

    async def _frame(self) -> tuple[int, bytes]:
        size, kind, _, _ = _HEADER.unpack(await exactly(self.sock, _HEADER.size))
        return kind, await exactly(self.sock, min(size, sandbox_wire.MAX_PAYLOAD_BYTES))

    def put_down(self) -> None:
        """End the machine and reap its keep. Blocking, for some milliseconds."""
        self.sock.close()
        if self._qemu >= 0:
            # Its keep reaps it then, and ends: killed before, it would leave that to an init which may not do so.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._qemu, signal.SIGKILL)
        _await_end(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        if self._qemu >= 0:
            is_readable(self._qemu, _END_S)
        self.let_go()

    def let_go(self) -> int:
        """Return the descriptor of the socket, and hold nothing of the machine any more."""
        if self._qemu >= 0:
            os.close(self._qemu)
            self._qemu = -1
        return self.sock.detach()


def is_readable(fd: int, limit_s: float = 0.0) -> bool:
    """Whether there is something to read, or a process has ended. Blocking, up to the limit."""
    waiter = select.poll()
    waiter.register(fd, select.POLLIN)
    return bool(waiter.poll(limit_s * 1000))


def _await_end(pid: int) -> None:
    with contextlib.suppress(OSError):
        keep = os.pidfd_open(pid)
        try:
            is_readable(keep, _END_S)
        finally:
            os.close(keep)


def start_keep(
    items: Iterable[tuple[str, str]], arguments: Sequence[str], fds: Mapping[int, int], generation: int
) -> Kept:
    """Start a machine; wait for `launched` and `ready`, or call `put_down`.

    Args:
        items: of the plan: at least `id`, `run` and `lock`.
        arguments: QEMU's, its absolute path first.
        fds: what it gets: number there -> descriptor here, which stays open.
        generation: of the wire.

    Raises:
        LaunchFailed: the host is at a limit.
    """
    try:
        owner = os.pidfd_open(os.getpid())
    except OSError as error:
        raise explain("starting wf-init", error.errno or 0, "") from error
    try:
        plan = [
            *items,
            ("agent", str(AGENT_FD)),
            ("qmp", str(QMP_FD)),
            ("generation", str(generation)),
            *(("pass", str(number)) for number in fds),
            *(("arg", word) for word in arguments),
        ]
        pid, sock = spawn("keep", encode_plan(plan), {_OWNER_FD: owner, **fds})
    finally:
        os.close(owner)
    sock.setblocking(False)
    return Kept(pid, sock)


def new_generation() -> int:
    """Return a number for the wire of one restore."""
    return int.from_bytes(os.urandom(4), "little") or 1


async def put_down(kept: Kept) -> None:
    """End a machine without holding up the event loop, cancelled or not."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, kept.put_down))


def _failure(number: int, text: str) -> SandboxError:
    if not text.startswith(_ENDED):
        return explain(text, number, "")
    lines = [line for line in text.removeprefix(_ENDED).splitlines() if ": warning: " not in line]
    words = "; ".join(lines)[-_WORDS:]
    return LaunchFailed(f"the machine ended while it started: {words or 'QEMU said nothing'}", step="machine")


def walls(sandbox_id: str, accel: Accel, *, network: bool) -> list[tuple[str, str]]:
    """Return the items that leave a machine nothing but its descriptors; none where this process may not do so.

    It runs as a user that is nobody else, whose id lies where no distribution gives any out, and can write to no file
    system: a guest that breaks out of QEMU meets nothing of its own.

    Args:
        sandbox_id: of the machine's sandbox.
        accel: what runs its instructions.
        network: whether QEMU speaks over this host's network for its guest.
    """
    if natural_form() != "trusted":
        return []
    number = _FIRST_USER + int(content_id(sandbox_id.encode())[:7], 16)
    group = kvm_group() if accel == "kvm" else None
    net = "host" if network else "none"
    return [("uid", str(number)), ("gid", str(group or number)), ("walls", "1"), ("net", net)]


def base_items(sandbox_id: str, run: Path, lock: str) -> list[tuple[str, str]]:
    """Return the items that every plan of a keep has."""
    return [("id", sandbox_id), ("run", str(run)), ("lock", lock)]
