"""The end of a machine that does not do what it is asked."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from pathlib import Path
from typing import Final

from worldfork.core.errors import Corrupt, SandboxDied
from worldfork.sandbox.microvm.control import reach
from worldfork.sandbox.microvm.manifest import read_running

_PEER: Final = struct.Struct("3i")


def end_machine(run: str) -> None:
    """Kill the QEMU of a machine that another process started; its keep ends then. Nothing where there is none.

    Its guest is not asked: it may have nobody in it any more who would do it.

    Args:
        run: the sandbox's directory below `run`.
    """
    with contextlib.suppress(SandboxDied, Corrupt, OSError):
        number = read_running(Path(run)).qemu_pid
        with reach(Path(run) / "control") as sock:
            keep, _, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            machine = os.pidfd_open(number)
            try:
                # Of a keep that lives a child keeps its number: what has it is no other process.
                if keep > 0 and _parent(number) == keep:
                    signal.pidfd_send_signal(machine, signal.SIGKILL)
            finally:
                os.close(machine)


def _parent(pid: int) -> int:
    # Behind the name, which may hold anything.
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
