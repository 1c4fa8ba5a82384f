"""What is laid over a fresh fork of a task's starting state before it is judged: edits, then hidden tests."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping

from worldfork.core.errors import PathError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.task import Task
from worldfork.reward.places import inside_task

_GONE = (errno.ENOENT, errno.ENOTDIR)


async def lay_edits(sandbox: AsyncSandbox, edits: Edits) -> None:
    """Make the starting state what the policy left of its editable files.

    Args:
        sandbox: a fresh fork of the starting state, in which nothing of the policy ever ran.
        edits: regular files get mode 644 or 755, and the fork's own user.

    Raises:
        SandboxError: the fork could not be written to.
    """
    await _remove(sandbox, edits.removed)
    for path, file in edits.files.items():
        inside = inside_task(path)
        # Where the starting state has a link, the file takes its place instead of going where it leads.
        await _remove(sandbox, [path])
        await sandbox.write_file(inside, file.content, mode=0o755 if file.executable else 0o644)


async def lay_tests(sandbox: AsyncSandbox, task: Task, tests: Mapping[str, bytes]) -> None:
    """Lay the hidden tests down, over and in place of whatever lies at their paths.

    Args:
        sandbox: a fork with the edits in it.
        task: its `test_roots` are removed whole first.
        tests: path of the task -> content.

    Raises:
        SandboxError: the fork could not be written to.
    """
    await _remove(sandbox, task.test_roots)
    for path, content in tests.items():
        if path in task.test_roots:
            await sandbox.write_file(inside_task(path), content)
            continue
        await _remove(sandbox, [path])
        await sandbox.write_file(inside_task(path), content)


async def _remove(sandbox: AsyncSandbox, paths: Iterable[str]) -> None:
    for path in paths:
        try:
            await sandbox.delete_file(inside_task(path), recursive=True)
        except PathError as error:
            if error.errno not in _GONE:
                raise
