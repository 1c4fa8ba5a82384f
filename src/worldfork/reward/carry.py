"""What leaves a policy's sandbox: the declared files, as plain bytes, and nothing else."""

from __future__ import annotations

import errno
from pathlib import PurePosixPath

from worldfork.core.errors import PathError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.task import Task
from worldfork.reward.places import inside_task
from worldfork.sandbox import files

ABSENT_ERRNOS = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.EINVAL, errno.ENXIO,
    errno.ENAMETOOLONG, errno.EFBIG,
})  # fmt: skip
"""What a policy's own doing to a path can answer: it is gone, no plain file, closed off or too large."""

_KILL_S = 5.0


async def end_processes(sandbox: AsyncSandbox) -> None:
    """Kill every process in a sandbox but its init.

    The command that does it is a program of the sandbox, which a policy may have replaced. It would gain nothing:
    what still ran could only change files that the policy may write anyway, and ends with the sandbox.
    """
    # One call of kill(2), which the kernel carries out while no process can be made.
    await sandbox.run("/bin/sh", ["-c", "kill -KILL -1"], timeout=_KILL_S, max_output_bytes=1 << 16)


async def carry_out(sandbox: AsyncSandbox, task: Task) -> dict[str, bytes]:
    """Read the task's editable files out of a sandbox.

    Returns:
        path of the task -> content. A file is absent if it, or a directory above it, is a link, if it is anything
        but a regular file, or if with it there were more files or bytes than `task.limits` let be carried.

    Raises:
        SandboxError: the sandbox could not be read.
    """
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
        return (await files.stat(await sandbox._live.connection(), path, follow=False)).kind
    except PathError as error:
        if error.errno not in ABSENT_ERRNOS:
            raise
        return ""
