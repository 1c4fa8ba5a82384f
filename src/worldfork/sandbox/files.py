"""Files inside a sandbox: every path is resolved there, by a process with the command's user.

Paths and names are text in which surrogates stand for bytes that are not UTF-8. Relative paths begin at
`working_dir`. Copying between the host and a sandbox: `sandbox/upload.py` and `sandbox/download.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import struct
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping
from typing import Final

from worldfork.core.errors import ConfigError, PathError
from worldfork.sandbox import replies
from worldfork.sandbox.command import CommandSpec
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.process import Process

MAX_READ_BYTES: Final = 256 * 1024 * 1024
"""What `read_file` returns at most unless told otherwise."""
_MAX_LISTING_BYTES: Final = 256 * 1024 * 1024
_MAX_WORDS_BYTES: Final = 4096
_SIZE_BYTES: Final = 8
"""A read begins with the file's size, a u64."""
_REAP_S: Final = 10.0
_LAY_HEAD: Final = struct.Struct("<cxHIQ")
"""Of one thing to lay: r or f, a mode, the sizes in bytes of its path and its content."""
_LAY_BYTES: Final = 256 * 1024
"""What is sent of these at a time, where they are small."""


async def read_file(
    connection: Connection,
    path: str,
    *,
    max_bytes: int = MAX_READ_BYTES,
    user: str = "",
    working_dir: str = "/",
) -> bytes:
    """A regular file's content.

    Raises:
        PathError: no such file, not a regular file, or (EFBIG) larger than `max_bytes`; a larger one is not
            read any further than it takes to know.
    """
    stream = _read(connection, path, ("0",), max_bytes, user=user, working_dir=working_dir)
    async with contextlib.aclosing(stream):
        return b"".join([piece async for piece in stream])


async def read_stream(
    connection: Connection,
    path: str,
    *,
    offset_bytes: int = 0,
    limit_bytes: int | None = None,
    user: str = "",
    working_dir: str = "/",
) -> AsyncGenerator[bytes, None]:
    """A regular file's content in pieces, of any size; the file is read no faster than they are taken.

    Leave the iteration early only inside `contextlib.aclosing`, which ends the read at once.

    Raises:
        PathError: no such file, or not a regular file.
    """
    if offset_bytes < 0 or (limit_bytes is not None and limit_bytes < 0):
        raise ConfigError("offset_bytes and limit_bytes cannot be negative")
    arguments = (str(offset_bytes),) if limit_bytes is None else (str(offset_bytes), str(limit_bytes))
    stream = _read(connection, path, arguments, None, user=user, working_dir=working_dir)
    async with contextlib.aclosing(stream):
        async for piece in stream:
            yield piece


async def _read(
    connection: Connection, path: str, arguments: tuple[str, ...], max_bytes: int | None, *, user: str, working_dir: str
) -> AsyncGenerator[bytes, None]:
    spec = CommandSpec(("read", path, *arguments), builtin=True, user=user, working_dir=working_dir)
    process = connection.launch(spec)
    start, words, received_bytes = b"", b"", 0
    try:
        async for stream, data in process:
            if stream == "stderr":
                words = (words + data)[:_MAX_WORDS_BYTES]
                continue
            if len(start) < _SIZE_BYTES:
                start += data
                data = start[_SIZE_BYTES:]
                start = start[:_SIZE_BYTES]
            # A file may grow meanwhile, and those of /proc say 0.
            received_bytes += len(data)
            size_bytes = max(received_bytes, int.from_bytes(start, "little") if len(start) == _SIZE_BYTES else 0)
            if max_bytes is not None and size_bytes > max_bytes:
                raise _too_large(path, size_bytes, max_bytes)
            if data:
                yield data
        await _check_read(process, words, path, connection.sandbox_id)
    finally:
        if not process.ended:
            await process.reap(_REAP_S)


async def _check_read(process: Process, words: bytes, path: str, sandbox_id: str) -> None:
    result = dataclasses.replace(await process.wait(), stderr_bytes=words)
    if error := replies.builtin_error(result, "read", path, sandbox_id=sandbox_id):
        raise error


def _too_large(path: str, size_bytes: int, max_bytes: int) -> PathError:
    return PathError(
        f"cannot read {path}: it has {size_bytes} bytes or more, this call returns at most {max_bytes}",
        remedy="pass a larger max_bytes, download it to a file, or read it in pieces",
        path=path,
        errno=errno.EFBIG,
        size_bytes=size_bytes,
    )


async def write_file(
    connection: Connection,
    path: str,
    data: bytes | AsyncIterable[bytes],
    *,
    mode: int | None = None,
    append: bool = False,
    exclusive: bool = False,
    mtime_ns: int | None = None,
    user: str = "",
    working_dir: str = "/",
) -> None:
    """Write a regular file in place, with its parents where they are missing.

    Not atomic: what had arrived stays when the call fails. Large data goes out no faster than it is written.

    Args:
        mode: permission bits; None leaves an existing file's and gives a new one 0644.
        exclusive: fail with EEXIST if it exists.

    Raises:
        PathError: the path is a directory, a device or a FIFO, or cannot be written.
    """
    if append and exclusive:
        raise ConfigError("a file cannot be both appended to and new")
    arguments = [
        "-" if mode is None else f"{mode & 0o7777:o}",
        "append" if append else "excl" if exclusive else "-",
    ]
    if mtime_ns is not None:
        arguments.append(str(mtime_ns))
    await connection.builtin("write", path, *arguments, stdin=data, user=user, working_dir=working_dir)


async def lay(
    connection: Connection,
    directory: str,
    files: Mapping[str, tuple[bytes, int]],
    *,
    removed: Iterable[str] = (),
    user: str = "",
    working_dir: str = "/",
) -> None:
    """Remove what is at some paths below a directory, then write regular files there, all in one request.

    No link in the directory is followed, and no mount crossed. What stands in a file's way gives way to it, whatever
    it is; directories above it are made. What is removed need not be there. Not atomic.

    Args:
        directory: must be there.
        files: path -> content and permission bits. As those of `removed`, relative, without `.` and `..`.

    Raises:
        PathError: something cannot be removed or written; the message says what.
    """
    async with contextlib.aclosing(_records(files, removed)) as records:
        await connection.builtin("lay", directory, stdin=records, user=user, working_dir=working_dir)


async def _records(files: Mapping[str, tuple[bytes, int]], removed: Iterable[str]) -> AsyncGenerator[bytes, None]:
    waiting: list[bytes] = []
    size_bytes = 0
    for kind, path, content, mode in (
        *((b"r", path, b"", 0) for path in removed),
        *((b"f", path, *file) for path, file in files.items()),
    ):
        name = os.fsencode(path)
        waiting += (_LAY_HEAD.pack(kind, mode, len(name), len(content)), name, content)
        size_bytes += len(name) + len(content)
        if size_bytes >= _LAY_BYTES:
            yield b"".join(waiting)
            waiting.clear()
            size_bytes = 0
    if waiting:
        yield b"".join(waiting)


async def list_directory(
    connection: Connection, path: str, *, user: str = "", working_dir: str = "/"
) -> list[replies.FileRecord]:
    """A directory's entries, sorted by name, without `.` and `..`.

    Raises:
        PathError: no such directory, or not one.
    """
    data = await connection.builtin(
        "list", path, user=user, working_dir=working_dir, max_output_bytes=_MAX_LISTING_BYTES
    )
    return sorted(connection.decoded(replies.read_files, data), key=lambda record: record.name)


async def stat(
    connection: Connection, path: str, *, follow: bool = True, user: str = "", working_dir: str = "/"
) -> replies.FileRecord:
    """One file's record; with `follow=False` a link's own.

    Raises:
        PathError: no such file.
    """
    arguments = () if follow else ("nofollow",)
    data = await connection.builtin("stat", path, *arguments, user=user, working_dir=working_dir)
    return connection.decoded(replies.read_file, data)


async def delete(
    connection: Connection, path: str, *, recursive: bool = False, user: str = "", working_dir: str = "/"
) -> None:
    """Remove a file, a link (never what it points to) or an empty directory; `recursive`: a whole one.

    Raises:
        PathError: no such file, a directory that is not empty, or one with a mount in it.
    """
    arguments = ("recursive",) if recursive else ()
    await connection.builtin("delete", path, *arguments, user=user, working_dir=working_dir)


async def make_directory(
    connection: Connection, path: str, *, mode: int = 0o755, user: str = "", working_dir: str = "/"
) -> None:
    """Make a directory and its parents; one that exists is fine.

    Raises:
        PathError: the path or a parent is not a directory.
    """
    await connection.builtin("mkdir", path, f"{mode & 0o7777:o}", user=user, working_dir=working_dir)


async def make_link(connection: Connection, target: str, path: str, *, user: str = "", working_dir: str = "/") -> None:
    """Make a symbolic link at `path` that says `target`.

    Raises:
        PathError: something is at `path` (EEXIST), or its directory cannot be written.
    """
    await connection.builtin("symlink", target, path, path=path, user=user, working_dir=working_dir)


async def change_mode(connection: Connection, path: str, mode: int, *, user: str = "", working_dir: str = "/") -> None:
    """Set a file's permission bits.

    Raises:
        PathError: no such file, or not the user's.
    """
    await connection.builtin("chmod", f"{mode & 0o7777:o}", path, path=path, user=user, working_dir=working_dir)


async def rename(
    connection: Connection, source: str, destination: str, *, user: str = "", working_dir: str = "/"
) -> None:
    """Move a file or a directory, over what is at the destination as `rename(2)` does.

    Raises:
        PathError: named after the source.
    """
    await connection.builtin("rename", source, destination, user=user, working_dir=working_dir)
