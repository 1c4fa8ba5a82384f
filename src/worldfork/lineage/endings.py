"""The end of a sandbox, for those who run it for somebody else."""

from __future__ import annotations

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.deaths import cleared
from worldfork.records.death import Death


async def see_end(sandbox: AsyncSandbox) -> Death | None:
    """Return how a sandbox ended, once it has."""
    await sandbox._live.wait_ended()
    return await sandbox.cause_of_death()


async def clear_away(sandbox: AsyncSandbox) -> None:
    """End a sandbox and clear it away, as `terminate` does; what is told of its death is that this was no one's wish.

    Raises:
        SandboxError: its processes did not end in time.
    """
    await sandbox._live.end(cleared())
