"""Tasks as directories, for people who write them by hand.

::

    median/
      task.toml        the fields of a task that are not files; or task.json
      prompt.md        the prompt, where task.toml has none
      files/           the starting state of the task's directory
      tests/           hidden tests, laid down for grading at the same paths
      solution/        the reference, laid over the starting state
"""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.records.task import Task

HEADS = ("task.toml", "task.json")
PROMPT = "prompt.md"
TREES = {"files": "files", "tests": "hidden_tests", "solution": "solution"}
"""Directory -> field of the task."""

MAX_FILE_BYTES = 16 << 20
MAX_FILES = 10_000

_LEFT_OUT = frozenset({"__pycache__", ".pytest_cache", ".DS_Store"})
"""What tools leave beside files that were written by hand."""


def is_task_directory(path: Path) -> bool:
    """Tell whether a directory is one task."""
    return any((path / head).is_file() for head in HEADS)


def find_task_directories(path: Path) -> list[Path]:
    """Return the task directories right below a directory, by name; or itself, where it is one."""
    if is_task_directory(path):
        return [path]
    return sorted(each for each in path.iterdir() if each.is_dir() and is_task_directory(each))


def directory_task(path: str | Path) -> Task:
    """Return the task of a directory; its `task_id` is the directory's name where none is given.

    Args:
        path: as the module says. A field that the head gives wins over the tree of that name.

    Raises:
        ConfigError: something is missing, malformed, or no text file; `field` and `path` say what.
    """
    top = Path(path)
    values = _head(top)
    values.setdefault("task_id", top.resolve().name)
    prompt = top / PROMPT
    if "prompt" not in values and prompt.is_file():
        values["prompt"] = _text(prompt, "prompt")
    for name, field in TREES.items():
        if field not in values and (top / name).is_dir():
            values[field] = _tree(top / name, field)
    return Task.from_json(values)


def _head(top: Path) -> dict[str, Any]:
    found = [top / head for head in HEADS if (top / head).is_file()]
    if len(found) != 1:
        what = "both task.toml and task.json" if found else "neither task.toml nor task.json"
        raise ConfigError(f"{top} has {what}", remedy="write one of them", path=str(top), field="")
    text = _text(found[0], "")
    try:
        values = tomllib.loads(text) if found[0].suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{found[0]}: {error}", path=str(found[0]), field="") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{found[0]}: a task is an object", path=str(found[0]), field="")
    return values


def _tree(top: Path, field: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for above, directories, names in os.walk(top):
        directories[:] = sorted(name for name in directories if name not in _LEFT_OUT)
        for name in [*directories, *sorted(names)]:
            path = Path(above, name)
            if path.is_symlink():
                raise ConfigError(f"{path} is a link; a task holds files", path=str(path), field=field)
            if name in names and name not in _LEFT_OUT:
                found[path.relative_to(top).as_posix()] = _text(path, field)
        if len(found) > MAX_FILES:
            raise ConfigError(
                f"{top} holds more than {MAX_FILES} files",
                remedy='name it as the origin of the world instead: world = {origin = {directory = "..."}}',
                path=str(top),
                field=field,
            )
    return found


def _text(path: Path, field: str) -> str:
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path} is no regular file of at most {MAX_FILE_BYTES} bytes", path=str(path), field=field
            )
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path} is not text in UTF-8",
            remedy='what is not text can be part of the world: world = {origin = {directory = "..."}}',
            path=str(path),
            field=field,
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", path=str(path), field=field) from error
