"""What is laid over a fresh fork of a task's starting state before it is judged: edits, then hidden tests.

All of it goes in one request, so that a repository's hundreds of test files cost little more than one. No link in the
task's directory is followed: what stands in a file's way gives way to it.
"""

from __future__ import annotations

from collections.abc import Mapping

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import Edits
from worldfork.records.task import Task
from worldfork.reward.places import TASK_DIRECTORY


async def lay_edits(sandbox: AsyncSandbox, edits: Edits) -> None:
    """Make the starting state what the policy left of its editable files.

    Args:
        sandbox: a fresh fork of the starting state, in which nothing of the policy ever ran.
        edits: regular files get mode 644 or 755, and the fork's own user.

    Raises:
        SandboxError: the fork could not be written to.
    """
    files = {path: (file.content, 0o755 if file.executable else 0o644) for path, file in edits.files.items()}
    if files or edits.removed:
        await sandbox.lay_files(TASK_DIRECTORY, files, removed=edits.removed)


async def lay_tests(sandbox: AsyncSandbox, task: Task, tests: Mapping[str, bytes]) -> None:
    """Lay the hidden tests down, over and in place of whatever lies at their paths.

    Args:
        sandbox: a fork with the edits in it.
        task: its `test_roots` are removed whole first.
        tests: path of the task -> content. One that names its interpreter in its first line can be run by its path.

    Raises:
        SandboxError: the fork could not be written to.
    """
    files = {path: (content, 0o755 if content.startswith(b"#!") else 0o644) for path, content in tests.items()}
    if files or task.test_roots:
        await sandbox.lay_files(TASK_DIRECTORY, files, removed=task.test_roots)
