"""Where a task lies inside a sandbox."""

from __future__ import annotations

from worldfork.records.task import TASK_DIRECTORY

__all__ = ["TASK_DIRECTORY", "inside_task"]


def inside_task(path: str) -> str:
    """Return the path inside the sandbox of a path of a task."""
    return f"{TASK_DIRECTORY}/{path}"
