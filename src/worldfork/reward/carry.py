"""What leaves a policy's sandbox: the declared files, as plain bytes, and nothing else."""

from __future__ import annotations

import asyncio
import errno
from pathlib import PurePosixPath

from worldfork.core.errors import OutOfSpace, PathError, SandboxDied, SandboxError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.task import Task
from worldfork.reward.places import inside_task

ABSENT_ERRNOS = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.EINVAL, errno.ENXIO,
    errno.ENAMETOOLONG, errno.EFBIG,
})  # fmt: skip
"""What a policy's own doing to a path can answer: it is gone, no plain file, closed off or too large."""

_KILL_S = 2.0
_READ_S = 6.0
"""Ending the processes and reading a few files takes milliseconds; longer means that something resists."""


async def carry_out(sandbox: AsyncSandbox, task: Task) -> dict[str, bytes]:
    """End every process in a policy's sandbox, then read the task's editable files out of it.

    Returns:
        path of the task -> content. A file is absent if it, or a directory above it, is a link, if it is anything
        but a regular file, or if with it there were more files or bytes than `task.limits` let be carried.

    Raises:
        SandboxDied: the sandbox did not live to be read. OutOfSpace: it was ended for its disk.
        SandboxError, StoreError, ForkError: it could not be read.
    """
    try:
        async with asyncio.timeout(_READ_S):
            await _end_processes(sandbox)
            return await _read_files(sandbox, task)
    except (SandboxDied, OutOfSpace):
        raise
    except (SandboxError, TimeoutError):
        return await _read_stopped(sandbox, task)


async def _end_processes(sandbox: AsyncSandbox) -> None:
    # One call of kill(2), during which the kernel lets no process be made.
    await sandbox.run("/bin/sh", ["-c", "kill -KILL -1"], timeout=_KILL_S, max_output_bytes=1 << 16)


async def _read_stopped(sandbox: AsyncSandbox, task: Task) -> dict[str, bytes]:
    """Read the files where nothing of the policy runs: in a fork of what its sandbox was when it was stopped.

    Processes that outlived the kill can stop or kill whatever reads beside them. This costs two starts more.
    """
    stopped = await sandbox.checkpoint(stop=True)
    try:
        (quiet,) = (await stopped.fork_async(1)).unwrap()
        async with quiet:
            return await _read_files(quiet, task)
    finally:
        await AsyncSandbox.delete_snapshot(stopped.snapshot_id)


async def _read_files(sandbox: AsyncSandbox, task: Task) -> dict[str, bytes]:
    carried: dict[str, bytes] = {}
    kinds: dict[str, str] = {}
    room = task.limits.carry_bytes
    for path in task.editable[: task.limits.carry_files]:
        if not await _is_plain_file(sandbox, path, kinds):
            continue
        try:
            content = await sandbox.read_file(inside_task(path), max_bytes=room)
        except PathError as error:
            if error.errno not in ABSENT_ERRNOS:
                raise
            continue
        room -= len(content)
        carried[path] = content
    return carried


async def _is_plain_file(sandbox: AsyncSandbox, path: str, kinds: dict[str, str]) -> bool:
    """Walk down to the file and accept no link on the way. `kinds` remembers what was asked."""
    whole = PurePosixPath(inside_task(path))
    for step in [*reversed(whole.parents), whole][1:]:
        inside = str(step)
        if inside not in kinds:
            kinds[inside] = await _kind(sandbox, inside)
        if kinds[inside] != ("f" if step == whole else "d"):
            return False
    return True


async def _kind(sandbox: AsyncSandbox, path: str) -> str:
    try:
        return (await sandbox.stat_file(path, follow_links=False)).kind
    except PathError as error:
        if error.errno not in ABSENT_ERRNOS:
            raise
        return ""
