"""Files and whole directories from a sandbox to the host.

What a sandbox says is not trusted: a download writes only below its target, whatever entries are called
and wherever links point, and sets no set-id bits on the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import secrets
from collections.abc import AsyncGenerator
from typing import Final

from worldfork.core.errors import PathError
from worldfork.sandbox import files
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.replies import FileRecord
from worldfork.sandbox.transfer import PIECE_BYTES, Job, TransferReport, work

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_HOST_MODE: Final = 0o777


async def download_file(
    connection: Connection, path: str, local: str | os.PathLike[str], *, user: str = "", working_dir: str = "/"
) -> int:
    """Copy one file of a sandbox to the host, with its permission bits and time.

    `local` is replaced whole, at once, and only on success; a link there is replaced, not followed.

    Returns:
        Its size in bytes.

    Raises:
        PathError: the sandbox's file cannot be read.
        OSError: the host's cannot be written.
    """
    record = await files.stat(connection, path, user=user, working_dir=working_dir)
    parent, name = os.path.split(os.path.abspath(local))
    directory = os.open(parent, _DIRECTORY)
    try:
        stream = files.read_stream(connection, path, user=user, working_dir=working_dir)
        return await _store(stream, record, directory, name)
    finally:
        os.close(directory)


async def _store(stream: AsyncGenerator[bytes, None], record: FileRecord, directory: int, name: str) -> int:
    """Write a stream to a new file, then put it in the place of `name`; returns its size in bytes."""
    temporary = _temporary_name()
    descriptor = os.open(temporary, _NEW, 0o600, dir_fd=directory)
    try:
        size_bytes = await _pour(stream, descriptor)
        os.fchmod(descriptor, record.mode & _HOST_MODE)
        os.utime(descriptor, ns=(record.mtime_ns, record.mtime_ns))
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(temporary, dir_fd=directory)
        raise
    finally:
        os.close(descriptor)
    return size_bytes


async def _pour(stream: AsyncGenerator[bytes, None], descriptor: int) -> int:
    total_bytes, held_bytes = 0, 0
    held: list[bytes] = []
    async with contextlib.aclosing(stream):
        async for piece in stream:
            held.append(piece)
            held_bytes += len(piece)
            total_bytes += len(piece)
            if held_bytes >= PIECE_BYTES:
                await asyncio.to_thread(_write_all, descriptor, b"".join(held))
                held, held_bytes = [], 0
    await asyncio.to_thread(_write_all, descriptor, b"".join(held))
    return total_bytes


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _temporary_name() -> str:
    return f".worldfork-{secrets.token_hex(8)}"


async def download_tree(
    connection: Connection, remote: str, local: str | os.PathLike[str], *, user: str = ""
) -> TransferReport:
    """Copy a sandbox directory's content into `local`, which is made if missing; what else is there stays.

    Links stay links, as written; links on the host are replaced or refused, never followed. Permission
    bits (no set-id bits) and the times of files are kept; the host's user owns what is made.

    Raises:
        PathError: a sandbox's file cannot be read, or is called what no file can be called.
        OSError: the host's cannot be written.
    """
    os.makedirs(local, exist_ok=True)
    root = os.open(local, _DIRECTORY)
    try:
        download = _Download(connection, remote, root, user)
        await download.run()
    finally:
        os.close(root)
    return download.report


class _Download:
    def __init__(self, connection: Connection, remote: str, root: int, user: str) -> None:
        self.report = TransferReport()
        self._connection = connection
        self._remote = remote
        self._root = root
        self._user = user
        self._jobs: list[Job] = []
        self._modes: list[tuple[tuple[str, ...], int]] = []

    async def run(self) -> None:
        self._jobs.append(functools.partial(self._directory, ()))
        await work(self._jobs)
        # Only now: a directory that its owner may not write could not have been filled. Deepest first.
        for names, mode in sorted(self._modes, reverse=True):
            descriptor = self._open(names)
            try:
                os.fchmod(descriptor, mode)
            finally:
                os.close(descriptor)

    def _open(self, names: tuple[str, ...]) -> int:
        """Open a directory below the target one name at a time, so that no link on the way is followed."""
        descriptor = os.dup(self._root)
        for name in names:
            try:
                below = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            finally:
                os.close(descriptor)
            descriptor = below
        return descriptor

    def _inside(self, names: tuple[str, ...]) -> str:
        return os.path.join(self._remote, *names)

    async def _directory(self, names: tuple[str, ...]) -> None:
        records = await files.list_directory(self._connection, self._inside(names), user=self._user)
        directory = self._open(names)
        try:
            for record in records:
                self._add((*names, _checked(record.name, self._inside(names))), record, directory)
        finally:
            os.close(directory)

    def _add(self, names: tuple[str, ...], record: FileRecord, directory: int) -> None:
        if record.kind == "d":
            with contextlib.suppress(FileExistsError):
                os.mkdir(record.name, 0o700, dir_fd=directory)
            self.report.directories += 1
            self._modes.append((names, record.mode & _HOST_MODE))
            self._jobs.append(functools.partial(self._directory, names))
        elif record.kind == "l":
            temporary = _temporary_name()
            os.symlink(record.target, temporary, dir_fd=directory)
            try:
                os.rename(temporary, record.name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                os.unlink(temporary, dir_fd=directory)
                raise
            self.report.links += 1
        elif record.kind == "f":
            self._jobs.append(functools.partial(self._file, names, record))
        else:
            self.report.skipped += (os.path.join(*names),)

    async def _file(self, names: tuple[str, ...], record: FileRecord) -> None:
        directory = self._open(names[:-1])
        try:
            stream = files.read_stream(self._connection, self._inside(names), user=self._user)
            size_bytes = await _store(stream, record, directory, names[-1])
        finally:
            os.close(directory)
        self.report.size_bytes += size_bytes
        self.report.files += 1


def _checked(name: str, directory: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise PathError(
            f"the sandbox lists an entry of {directory} as {name!r}, which no file can be called",
            path=directory,
            errno=errno.EBADMSG,
        )
    return name
