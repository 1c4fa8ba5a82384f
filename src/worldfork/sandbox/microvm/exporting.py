"""What a sandbox in a machine has written, taken out of it as a layer.

The guest sends its overlay's upper as a stream. What comes is written by descriptors of directories that were made
here, so that no record can lead out of the layer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from worldfork.content.entry import Entry
from worldfork.content.ids import is_seen_whole
from worldfork.content.layer import walk
from worldfork.content.writing import Writer
from worldfork.core import mapped
from worldfork.core.errors import ConfigError, NotCapturable, SandboxDied
from worldfork.core.idmap import own_map
from worldfork.core.shielded import to_its_end
from worldfork.sandbox.microvm import wire
from worldfork.sandbox.microvm.arriving import Arriving, broken
from worldfork.sandbox.microvm.control import open_stream, reach

LIMIT_BYTES = 1 << 40
"""What one upper may take here unless the caller says less."""
STALL_S = 60.0
"""How long a guest may send nothing; one that another client has quieted sends nothing either."""

_BUFFER_BYTES = 256 << 10


async def copy_disk(
    run: Path,
    upper_in_guest: str,
    target: Path,
    form: str,
    *,
    below: Path | None = None,
    limit_bytes: int = LIMIT_BYTES,
    stall_s: float = STALL_S,
) -> int | None:
    """Write what a sandbox in a machine has changed as a layer; nothing may write it meanwhile.

    After a failure the caller removes what there is of `target`.

    Args:
        run: the sandbox's directory below `run`.
        upper_in_guest: the upper's path in the guest.
        target: does not exist yet; made only if something changed.
        form: "trusted" or "user": whose marks the overlay in the guest has, and the layer gets.
        below: a layer with the root that the upper had when it was empty, so that a change of the root alone is seen.
        limit_bytes: more than this is not taken.
        stall_s: how long the guest may send nothing.

    Returns:
        What the files take, in bytes; None if the sandbox changed nothing.

    Raises:
        NotCapturable: it holds what such a layer cannot carry.
        OutOfSpace: the disk is full, or the guest sent more than the limit.
        SandboxDied: the machine has ended.
        SandboxError: what the guest sends is no such stream, or it stalls.
        StoreError: the layer cannot be written.
        DriverUnavailable: the layer needs a range of ids that this user has not got.
    """
    if not own_map() and not is_seen_whole(target):
        # That process opens the stream itself: descriptors cannot be handed to it.
        arguments = (str(run), upper_in_guest, target, form, below, limit_bytes, stall_s)
        return await to_its_end(asyncio.to_thread(lambda: mapped.run(receive_from, *arguments)))
    sock = await open_stream(run, wire.Target.EXPORT, os.fsencode(upper_in_guest))
    with sock:
        sock.settimeout(stall_s)
        work = asyncio.to_thread(receive_layer, sock, target, form, below=below, limit_bytes=limit_bytes)
        return await to_its_end(work, hasten=lambda: _shut(sock))


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def receive_from(
    run: str, upper: str, target: Path, form: str, below: Path | None, limit_bytes: int, stall_s: float
) -> int | None:
    """Do what `copy_disk` does, in a process of its own. Blocking."""
    with reach(Path(run) / "control") as sock:
        sock.settimeout(stall_s)
        try:
            sock.sendall(wire.frame(wire.Kind.OPEN, 0, wire.open_payload(wire.Target.EXPORT, os.fsencode(upper))))
        except OSError as error:
            raise SandboxDied(f"the machine has ended: {error}", step="export") from error
        return receive_layer(sock, target, form, below=below, limit_bytes=limit_bytes)


def receive_layer(
    sock: socket.socket, target: Path, form: str, *, below: Path | None = None, limit_bytes: int = LIMIT_BYTES
) -> int | None:
    """Read a stream of records and write it as a layer; see `copy_disk`. Blocking, as long as the socket's timeout."""
    with BufferedReader(socket.SocketIO(sock, "r"), _BUFFER_BYTES) as stream:
        return _write(Arriving(cast(BinaryIO, stream), form, limit_bytes), target, form, below)


def _write(arriving: Arriving, target: Path, form: str, below: Path | None) -> int | None:
    root = arriving.next()
    if root is None:
        raise broken("it has no root", "")
    found = arriving.next()
    if found is None and (below is None or _is_like(root[0], below, form)):
        arriving.expect_end()
        return None
    with Writer(target, form, made_here=True) as writer:
        try:
            writer.add(root[0])
            while found is not None:
                writer.add(*found)
                found = arriving.next()
            arriving.expect_end()
            writer.finish()
        except ConfigError as error:
            raise NotCapturable(
                f"what the sandbox wrote cannot be a layer here: {error.message}",
                remedy="remove it in the sandbox, or work as root",
                what=str(error.fields.get("path", "")),
                why=error.message,
            ) from error
    return arriving.files_bytes


def _is_like(root: Entry, below: Path, form: str) -> bool:
    """Whether the root of an upper is what it was when it was made."""
    top = next(iter(walk(below, form, hashed=False))).entry
    return root == top._replace(opaque=root.opaque, redirect=root.redirect)
