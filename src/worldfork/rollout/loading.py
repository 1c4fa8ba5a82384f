"""Tasks from files: JSON, one object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from worldfork.core.errors import ConfigError
from worldfork.records.task import Task

MAX_LINE_BYTES = 64 << 20
"""A longer line is no task."""


def load_tasks(path: str | Path) -> list[Task]:
    """Read every task of a JSONL file; blank lines are left out.

    The fields are those of `Task`; `solution` and `limits` may be absent.

    Raises:
        ConfigError: the file cannot be read, a line is no task or a `task_id` comes twice. `path`, `line`
            (from 1) and `field` say where.
    """
    path = Path(path)
    tasks: list[Task] = []
    lines_by_id: dict[str, int] = {}
    for number, line in _lines(path):
        task = _read_line(path, number, line)
        first = lines_by_id.setdefault(task.task_id, number)
        if first != number:
            raise _at(path, number, "task_id", f"{task.task_id!r} is already in line {first}")
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{path}: no task in it", path=str(path))
    return tasks


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise _at(path, number, "", f"longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", path=str(path)) from error


def _read_line(path: Path, number: int, line: bytes) -> Task:
    try:
        data = json.loads(line)
    except RecursionError:
        raise _at(path, number, "", "nested too deeply") from None
    except ValueError as error:
        raise _at(path, number, "", f"not JSON: {error}") from None
    try:
        return Task.from_json(data)
    except ConfigError as error:
        raise _at(path, number, getattr(error, "field", ""), error.message) from error


def _at(path: Path, number: int, field: str, message: str) -> ConfigError:
    return ConfigError(f"{path}:{number}: {message}", path=str(path), line=number, field=field)
