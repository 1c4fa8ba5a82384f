"""The frames between a host and the guest of a virtual machine; `native/mux.h` describes them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

HEADER: Final = struct.Struct("<IHH")
"""Length of the payload, kind, stream."""
CONTROL_HEAD: Final = struct.Struct("<HHIi")
"""Op, 0, tag, errno; a body follows."""
EXPORT_HEAD: Final = struct.Struct("<BBHIIIIIIIIIqQQ")
"""kind, again, mode, uid, gid, name, xattrs and target lengths, major, minor, links, mtime ns, mtime s, size, inode."""
STRETCH: Final = struct.Struct("<QQ")
"""Offset and length of a stretch of data; the last one has the file's size and 0."""
PAYLOAD_BYTES_MAX: Final = 64 * 1024
DATA_BYTES_MAX: Final = 32 * 1024
WINDOW_BYTES: Final = 256 * 1024
ENTROPY_BYTES_MAX: Final = 512
LAUNCHED: Final = 110
READY: Final = 111
"""What `keep` says on its start socket, in frames like those of a sandbox's init."""


class Kind(IntEnum):
    """Kinds of frames."""

    OPEN = 1
    DATA = 2
    CREDIT = 3
    CLOSE = 4
    CONTROL = 5
    QUIESCE = 6
    QUIET = 7
    GO = 8
    RESET = 9


class Target(IntEnum):
    """What a stream leads to."""

    SANDBOX = 0
    LAUNCH = 1
    REROOT = 2
    EXPORT = 3


class Op(IntEnum):
    """Requests to the guest; ENDED is its own message."""

    PREPARE = 1
    RESUME = 2
    SYNC = 3
    STATS = 4
    NETWORK = 5
    SHUTDOWN = 6
    ENDED = 7
    CLOSE_OUTSIDE = 8
    LOOK = 9
    REHEARSE = 10


class KeepEnd(IntEnum):
    """What `keep` exits with, besides what a sandbox's init does; `native/wf.h` has the same."""

    MACHINE = 3
    GUEST = 4
    INIT = 5


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """A request, or an answer to one."""

    op: int
    tag: int
    error_number: int
    body: bytes


def frame(kind: int, stream: int = 0, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    return HEADER.pack(len(payload), kind, stream) + payload


def control(op: int, tag: int, body: bytes = b"", error_number: int = 0) -> bytes:
    """Encode a CONTROL frame."""
    return frame(Kind.CONTROL, 0, CONTROL_HEAD.pack(op, 0, tag, error_number) + body)


def read_control(payload: bytes) -> ControlMessage:
    """Decode the payload of a CONTROL frame."""
    op, _, tag, error_number = CONTROL_HEAD.unpack_from(payload)
    return ControlMessage(op, tag, error_number, payload[CONTROL_HEAD.size :])


def open_payload(target: int, argument: bytes = b"") -> bytes:
    """Encode the payload of OPEN."""
    return struct.pack("<H", target) + argument


def items(*pairs: tuple[str, str]) -> bytes:
    """Encode "key=value" items, each with a NUL behind."""
    return b"".join(f"{key}={value}".encode() + b"\0" for key, value in pairs)


def resume_body(generation: int, wall_ns: int, entropy: bytes, *pairs: tuple[str, str]) -> bytes:
    """Encode the body of RESUME.

    Args:
        generation: what the guest was told last by RESET.
        wall_ns: the host's clock.
        entropy: at most `ENTROPY_BYTES_MAX`.
        pairs: ("hostname", NAME), ("idfile", "PATH\\tTEXT") for each identity file, ("program", PATH) to ask whether
            the sandbox has one there; the answer's body names the paths, each with a NUL behind, where there is none.
    """
    return struct.pack("<IQI", generation, wall_ns, len(entropy)) + entropy + items(*pairs)
