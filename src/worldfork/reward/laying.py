"""What is laid over a fresh fork of a task's starting state before it is judged: edits, then hidden tests."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from functools import partial

from worldfork.core.errors import PathError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.task import Task
from worldfork.reward.places import inside_task
from worldfork.sandbox.transfer import work

_GONE = (errno.ENOENT, errno.ENOTDIR)


async def lay_edits(sandbox: AsyncSandbox, edits: Edits) -> None:
    """Make the starting state what the policy left of its editable files.

    Args:
        sandbox: a fresh fork of the starting state, in which nothing of the policy ever ran.
        edits: regular files get mode 644 or 755, and the fork's own user.

    Raises:
        SandboxError: the fork could not be written to.
    """
    ground = _Ground(sandbox)
    for path in edits.removed:
        await ground.remove(path)
    await ground.put_all({
        path: (file.content, 0o755 if file.executable else 0o644) for path, file in edits.files.items()
    })  # fmt: skip


async def lay_tests(sandbox: AsyncSandbox, task: Task, tests: Mapping[str, bytes]) -> None:
    """Lay the hidden tests down, over and in place of whatever lies at their paths.

    Args:
        sandbox: a fork with the edits in it.
        task: its `test_roots` are removed whole first.
        tests: path of the task -> content. One that names its interpreter in its first line can be run by its path.

    Raises:
        SandboxError: the fork could not be written to.
    """
    ground = _Ground(sandbox)
    for path in task.test_roots:
        await ground.remove(path)
    await ground.put_all({
        path: (content, 0o755 if content.startswith(b"#!") else 0o644) for path, content in tests.items()
    })  # fmt: skip


class _Ground:
    """The task's directory of one fork. No link in it is followed: what stands in a file's way gives way to it."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox
        self._directories: set[str] = set()
        """Known to be such, and no links."""
        self._emptied: set[str] = set()
        """Nothing was left at and below these."""

    async def put_all(self, files: Mapping[str, tuple[bytes, int]]) -> None:
        """Write files, each a content and a mode; some at a time."""
        for path in files:
            await self._clear(path)
        await work([partial(self._put, path, *file) for path, file in files.items()])

    async def _put(self, path: str, content: bytes, mode: int) -> None:
        if self._emptied.isdisjoint((*_parents(path), path)):
            await self._delete(path)
        await self._sandbox.write_file(inside_task(path), content, mode=mode)

    async def remove(self, path: str) -> None:
        """Remove whatever is at a path."""
        if await self._is_reached(path):
            await self._delete(path)
        self._emptied.add(path)
        self._directories = {each for each in self._directories if not f"{each}/".startswith(f"{path}/")}

    async def _clear(self, path: str) -> None:
        for parent in _parents(path):
            if parent in self._directories:
                continue
            kind = await self._kind(parent)
            if kind == "d":
                self._directories.add(parent)
                continue
            if kind:
                await self._delete(parent)
            return

    async def _is_reached(self, path: str) -> bool:
        """Whether all that is above a path are directories."""
        for parent in _parents(path):
            if parent not in self._directories:
                if await self._kind(parent) != "d":
                    return False
                self._directories.add(parent)
        return True

    async def _kind(self, path: str) -> str:
        try:
            return (await self._sandbox.stat_file(inside_task(path), follow_links=False)).kind
        except PathError as error:
            if error.errno not in _GONE:
                raise
            return ""

    async def _delete(self, path: str) -> None:
        try:
            await self._sandbox.delete_file(inside_task(path), recursive=True)
        except PathError as error:
            if error.errno not in _GONE:
                raise


def _parents(path: str) -> list[str]:
    """Return what is above a path within the task's directory, the uppermost first."""
    names = path.split("/")
    return ["/".join(names[:depth]) for depth in range(1, len(names))]
