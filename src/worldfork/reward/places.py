"""Where a task lies inside a sandbox."""

from __future__ import annotations

TASK_DIRECTORY = "/workspace"
"""The task's directory: the default working directory of every sandbox."""


def inside_task(path: str) -> str:
    """Return the path inside the sandbox of a path of a task."""
    return f"{TASK_DIRECTORY}/{path}"
