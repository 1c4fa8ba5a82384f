"""Files and whole directories from the host into a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import stat as modes
from collections.abc import AsyncGenerator
from typing import Final

from worldfork.core.errors import PathError
from worldfork.sandbox import files
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.transfer import PIECE_BYTES, Job, TransferReport, work

_NEW_DIRECTORY_MODE: Final = 0o755


async def upload_file(
    connection: Connection,
    local: str | os.PathLike[str],
    path: str,
    *,
    mode: int | None = None,
    user: str = "",
    working_dir: str = "/",
) -> int:
    """Copy one host file into a sandbox, with its time and, unless `mode` is given, its permission bits.

    Returns:
        Its size in bytes.

    Raises:
        OSError: the host file cannot be read or is not a regular file.
        PathError: the sandbox's cannot be written.
    """
    # A FIFO must not hold the event loop up.
    descriptor = os.open(local, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    return await _send(connection, descriptor, path, mode=mode, user=user, working_dir=working_dir)


async def _send(
    connection: Connection, descriptor: int, path: str, *, mode: int | None, user: str, working_dir: str = "/"
) -> int:
    """Send an open file and close it."""
    try:
        facts = os.fstat(descriptor)
        if not modes.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "only a regular file can be uploaded", path)
        write = functools.partial(
            files.write_file,
            connection,
            path,
            mode=modes.S_IMODE(facts.st_mode) if mode is None else mode,
            mtime_ns=facts.st_mtime_ns,
            user=user,
            working_dir=working_dir,
        )
        first = await asyncio.to_thread(os.read, descriptor, PIECE_BYTES)
        if len(first) < PIECE_BYTES:
            await write(first)
        else:
            async with contextlib.aclosing(_pieces(descriptor, first)) as pieces:
                await write(pieces)
        return facts.st_size
    finally:
        os.close(descriptor)


async def _pieces(descriptor: int, piece: bytes) -> AsyncGenerator[bytes, None]:
    while piece:
        yield piece
        piece = await asyncio.to_thread(os.read, descriptor, PIECE_BYTES)


async def upload_tree(
    connection: Connection, local: str | os.PathLike[str], remote: str, *, user: str = ""
) -> TransferReport:
    """Copy a host directory's content into `remote`, which is made if missing; what else is there stays.

    Links stay links, permission bits and the times of files are kept; owners are the sandbox's user, and
    hard links become files of their own.

    Raises:
        OSError: a host file cannot be read.
        PathError: a sandbox's cannot be written.
    """
    upload = _Upload(connection, os.fspath(local), remote, user)
    await upload.run()
    return upload.report


class _Upload:
    def __init__(self, connection: Connection, local: str, remote: str, user: str) -> None:
        self.report = TransferReport()
        self._connection = connection
        self._local = local
        self._remote = remote
        self._user = user
        self._jobs: list[Job] = []
        self._modes: list[tuple[str, int]] = []

    async def run(self) -> None:
        self._jobs.append(functools.partial(self._directory, ""))
        await work(self._jobs)
        # Only now: a directory that its owner may not write could not have been filled. Deepest first.
        for member, mode in sorted(self._modes, reverse=True):
            await files.change_mode(self._connection, self._inside(member), mode, user=self._user)

    def _inside(self, member: str) -> str:
        return os.path.join(self._remote, member) if member else self._remote

    async def _directory(self, member: str) -> None:
        await files.make_directory(self._connection, self._inside(member), user=self._user)
        for name, mode in await asyncio.to_thread(_scan, os.path.join(self._local, member)):
            self._add(os.path.join(member, name), mode)

    def _add(self, member: str, mode: int) -> None:
        if modes.S_ISDIR(mode):
            self.report.directories += 1
            if modes.S_IMODE(mode) != _NEW_DIRECTORY_MODE:
                self._modes.append((member, modes.S_IMODE(mode)))
            self._jobs.append(functools.partial(self._directory, member))
        elif modes.S_ISLNK(mode):
            self._jobs.append(functools.partial(self._link, member))
        elif modes.S_ISREG(mode):
            self._jobs.append(functools.partial(self._file, member))
        else:
            self.report.skipped += (member,)

    async def _link(self, member: str) -> None:
        target, path = os.readlink(os.path.join(self._local, member)), self._inside(member)
        try:
            await files.make_link(self._connection, target, path, user=self._user)
        except PathError as error:
            if error.errno != errno.EEXIST:
                raise
            await files.delete(self._connection, path, user=self._user)
            await files.make_link(self._connection, target, path, user=self._user)
        self.report.links += 1

    async def _file(self, member: str) -> None:
        local = os.path.join(self._local, member)
        descriptor = os.open(local, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        size_bytes = await _send(self._connection, descriptor, self._inside(member), mode=None, user=self._user)
        self.report.size_bytes += size_bytes
        self.report.files += 1


def _scan(directory: str) -> list[tuple[str, int]]:
    with os.scandir(directory) as entries:
        return sorted((entry.name, entry.stat(follow_symlinks=False).st_mode) for entry in entries)
