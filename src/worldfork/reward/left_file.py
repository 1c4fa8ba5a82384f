"""A file that a program inside leaves for its verifier: removed beforehand, read within bounds afterwards."""

from __future__ import annotations

import asyncio
import errno

from worldfork.core.errors import PathError, VerifierError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import FailureKind
from worldfork.reward.places import inside_task
from worldfork.reward.preparing import HOST_ERRNOS

_READ_S = 30.0


async def clear_file(sandbox: AsyncSandbox, path: str) -> None:
    """Remove whatever is where the file is to be.

    Args:
        sandbox: where.
        path: of the task, or absolute.

    Raises:
        SandboxError: it cannot be removed.
    """
    try:
        await sandbox.delete_file(_full(path), recursive=True)
    except PathError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise


async def read_left(sandbox: AsyncSandbox, path: str, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most so many bytes, and nothing for anything else.

    Args:
        sandbox, path: as `clear_file` takes them.
        max_bytes: the bound.

    Raises:
        SandboxDied: it is gone.
        PathError: the machine cannot read.
        VerifierError: it took too long, and what runs inside or the machine may have done that.
    """
    try:
        async with asyncio.timeout(_READ_S):
            facts = await sandbox.stat_file(_full(path), follow_links=False)
            if facts.kind != "f" or (facts.size or 0) > max_bytes:
                return b""
            return await sandbox.read_file(_full(path), max_bytes=max_bytes)
    except PathError as error:
        if error.errno in HOST_ERRNOS:
            raise
        # It is absent, too large, or was changed while it was read: that is no result.
        return b""
    except TimeoutError:
        raise VerifierError(
            f"reading {path} took more than {_READ_S:g} s",
            remedy="run fewer rollouts at once",
            kind=FailureKind.GRADING,
        ) from None


def _full(path: str) -> str:
    return path if path.startswith("/") else inside_task(path)
