"""What a policy's edits may not bring to a grading: files that run, or decide, before any test does."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePosixPath

from worldfork.records.edits import Edits
from worldfork.records.globs import is_editable
from worldfork.records.task import Task

_RUNNERS = frozenset({"sitecustomize", "usercustomize", "conftest"})
"""Modules that Python or pytest load by themselves, as files or as packages."""

_CODE = (".py", ".pyc", ".pyo", ".so", ".pyd")
_MOST_NAMED = 5


def admit(task: Task, edits: Edits, tests: Collection[str]) -> tuple[Edits, tuple[str, ...]]:
    """Return the edits that may be laid down, and notes on the others.

    What is left out is as the starting state has it. A path of the hidden tests is theirs in any case.
    """
    refused = sorted(
        path for path in {*edits.files, *edits.removed} if not is_editable(path, task.editable) or _is_refused(path)
    )
    if not refused:
        return edits, ()
    gone = set(refused)
    admitted = Edits(
        {path: file for path, file in edits.files.items() if path not in gone},
        tuple(path for path in edits.removed if path not in gone),
        edits.dropped,
    )
    named = ", ".join(refused[:_MOST_NAMED])
    own = [path for path in refused if path not in tests]
    more = f" and {len(refused) - _MOST_NAMED} more" if len(refused) > _MOST_NAMED else ""
    return admitted, (f"not laid down: {named}{more}",) if own else ()


def _is_refused(path: str) -> bool:
    parts = PurePosixPath(path).parts
    name = parts[-1]
    stem = name.partition(".")[0]
    return (
        "__pycache__" in parts
        or name.endswith((".pyc", ".pyo", ".pth"))
        or (stem in _RUNNERS and name.endswith(_CODE))
        or any(part in _RUNNERS for part in parts[:-1])
        or any(part.endswith((".dist-info", ".egg-info")) for part in parts[:-1])
    )
