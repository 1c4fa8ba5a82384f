"""Connections of a sandbox in a machine that leave it, which a memory snapshot cannot carry honestly."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worldfork.core.errors import SandboxError
from worldfork.sandbox.microvm.control import Control, control
from worldfork.sandbox.microvm.wire import Op

_STATES: Final = {
    1: "established",
    2: "syn-sent",
    3: "syn-received",
    4: "fin-wait-1",
    5: "fin-wait-2",
    8: "close-wait",
    9: "last-ack",
    11: "closing",
    12: "syn-received",
}
"""Of a connection that has another end still. Source: include/net/tcp_states.h of Linux."""
_IPV4_DIGITS: Final = 8
_IPV6_DIGITS: Final = 32
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class OutsideConnection:
    """One connection whose other end is not in its sandbox."""

    protocol: str
    """"tcp" or "udp"."""
    local: str
    """Address and port, as `10.0.2.15:40000` or `[fd00::1]:40000`."""
    remote: str
    state: str
    """Such as "established"."""


async def outside(run: Path) -> tuple[OutsideConnection, ...]:
    """Return the connections of a running machine's sandbox that leave it.

    Args:
        run: the sandbox's directory below `run`.

    Raises:
        SandboxDied: the machine has ended.
        SandboxError: the guest gave no answer, has more connections than it can tell of, or told nonsense.
    """
    async with control(run) as client:
        return await ask_outside(client)


async def ask_outside(client: Control) -> tuple[OutsideConnection, ...]:
    """Do what `outside` does over a connection that is there."""
    return outside_connections(await client.ask(Op.NETWORK))


async def close_outside(client: Control) -> int:
    """Reset the connections that leave the sandbox; return how many. What runs in it may open others at once.

    Raises:
        SandboxDied: the machine has ended.
        SandboxError: the guest gave no answer, or cannot do so.
    """
    answer = await client.ask(Op.CLOSE_OUTSIDE)
    if len(answer) != 4:
        raise _nonsense(answer.decode("ascii", "replace"))
    return int(struct.unpack("<I", answer)[0])


def outside_connections(tables: bytes) -> tuple[OutsideConnection, ...]:
    """Read what /proc/net/{tcp,tcp6,udp,udp6} say, one after another.

    A socket that listens, that has no other end, or whose other end is on the loopback or at its own address stays
    inside. So does one in TIME_WAIT, which nobody holds any more.

    Raises:
        SandboxError: it is something else.
    """
    return tuple(_rows(tables.decode("ascii", "replace")))


def _rows(text: str) -> Iterator[OutsideConnection]:
    protocol = ""
    for line in text.splitlines():
        words = line.split()
        if not words:
            continue
        if words[0] == "sl":
            # Only those of UDP have a last column for what was dropped.
            protocol = "udp" if words[-1] == "drops" else "tcp"
            continue
        try:
            if not protocol:
                raise ValueError
            local, remote = _place(words[1]), _place(words[2])
            state = _STATES.get(int(words[3], 16))
        except (ValueError, IndexError, OverflowError):
            raise _nonsense(line) from None
        if state is not None and _leaves(local[0], remote):
            yield OutsideConnection(protocol, _shown(local), _shown(remote), state)


def _leaves(local: Address, remote: tuple[Address, int]) -> bool:
    address, port = remote
    return bool(port) and not address.is_unspecified and not address.is_loopback and address != local


def _place(word: str) -> tuple[Address, int]:
    digits, _, port = word.partition(":")
    if len(digits) not in (_IPV4_DIGITS, _IPV6_DIGITS) or len(port) != 4:
        raise ValueError
    # The kernel prints words of 32 bits as numbers of the machine, which is a little-endian one.
    words = (int(digits[at : at + 8], 16) for at in range(0, len(digits), 8))
    packed = b"".join(word.to_bytes(4, "little") for word in words)
    if len(packed) == 4:
        return ipaddress.IPv4Address(packed), int(port, 16)
    address = ipaddress.IPv6Address(packed)
    return address.ipv4_mapped or address, int(port, 16)


def _shown(place: tuple[Address, int]) -> str:
    address, port = place
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _nonsense(line: str) -> SandboxError:
    return SandboxError(
        f"the guest does not tell its connections: {line[:200]!r}",
        remedy="end this sandbox: what runs its machine is not what was started there",
        step="network",
    )
