"""Starting `wf-init` from a process of any size, without leaking a descriptor into it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from worldfork.core.errors import DriverUnavailable, LaunchFailed
from worldfork.sandbox.remedies import explain

PLAN_FD = 3
_HIGH_FD = 64
"""Descriptors that are passed on are first moved above this, so that none overwrites another."""
_PLAN_BYTES_MAX = 150_000
"""A unix socket's default buffer takes this much before anybody reads."""

_lock = threading.Lock()
_memfd: int | None = None


def program_path() -> Path:
    """Return the compiled `wf-init` of this installation.

    Raises:
        DriverUnavailable: the package was installed without its C part.
    """
    path = Path(__file__).with_name("wf-init")
    if not path.exists():
        raise DriverUnavailable(
            f"{path} is missing: the package was installed without its C part",
            remedy="run `python native/build.py` in the checkout, or reinstall with a C compiler (gcc, libc6-dev)",
        )
    return path


def sealed_program() -> int:
    """Return a descriptor of a sealed copy of `wf-init` in memory; one per process.

    A sandbox runs from it, so that nothing on disk is pinned and nothing inside can alter it.
    """
    global _memfd
    with _lock:
        if _memfd is None:
            content = program_path().read_bytes()
            fd = os.memfd_create("wf-init", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.write(fd, content)
                os.fchmod(fd, 0o555)
                seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
                _memfd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
            finally:
                os.close(fd)
        return _memfd


def encode_plan(items: Iterable[tuple[str, str]]) -> bytes:
    """Encode (key, value) items as `native/plan.h` reads them: a length, then NUL-terminated `key=value`.

    Raises:
        LaunchFailed: a value holds a NUL, or the whole is too long.
    """
    parts = []
    for key, value in items:
        if "\0" in value:
            raise LaunchFailed(f"the value of {key} holds a NUL byte")
        parts.append(os.fsencode(f"{key}={value}") + b"\0")
    body = b"".join(parts)
    if len(body) > _PLAN_BYTES_MAX:
        raise LaunchFailed(
            f"the plan of the sandbox takes {len(body)} bytes, more than {_PLAN_BYTES_MAX}",
            remedy="use a shorter WORLDFORK_HOME, or squash the snapshot's chain",
        )
    return struct.pack("<I", len(body)) + body


def spawn(face: str, plan: bytes, fds: Mapping[int, int]) -> tuple[int, socket.socket]:
    """Start one face of `wf-init`; return its pid and the socket to it.

    The child gets /dev/null for 0 to 2, the socket as 3 and `fds` (number there -> descriptor here). It is
    started by posix_spawn(3), whose cost does not grow with this process, in a session of its own.

    Raises:
        LaunchFailed: the kernel refused.
    """
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise explain("starting wf-init", error.errno or 0, "") from error
    high: list[int] = []
    try:
        ours.sendall(plan)
        actions: list[tuple[int, int, int] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
        ]
        for number, fd in {PLAN_FD: theirs.fileno(), **fds}.items():
            lifted = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD)
            high.append(lifted)
            actions.append((os.POSIX_SPAWN_DUP2, lifted, number))
        pid = os.posix_spawn(
            f"/proc/self/fd/{sealed_program()}", ["wf-init", face], {}, file_actions=actions, setsid=True
        )
    except OSError as error:
        ours.close()
        raise explain("starting wf-init", error.errno or 0, "") from error
    finally:
        theirs.close()
        for fd in high:
            os.close(fd)
    return pid, ours


def _forked() -> None:
    """In a forked child nobody would open a lock that another thread held at that moment."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
