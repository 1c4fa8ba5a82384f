"""Tasks from files and directories, in whichever of the known forms they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from worldfork.core.errors import ConfigError
from worldfork.records.task import Task
from worldfork.rollout.directories import directory_task, find_task_directories
from worldfork.rollout.repositories import is_repository_row, repository_task
from worldfork.rollout.swebench import Repositories, is_swebench_row, swebench_task

MAX_LINE_BYTES = 64 << 20
"""A longer line is no task."""


def load_tasks(
    path: str | Path,
    *,
    repositories: Repositories | None = None,
    on_unusable: Callable[[ConfigError], None] | None = None,
) -> list[Task]:
    """Read every task of a JSONL file, of a directory of tasks, or of a directory that is one.

    A line is a task with the fields of `Task`, most of which may be absent; or a row of two versions of a package (see
    `rollout.repositories`); or one as of SWE-bench (see `rollout.swebench`). Blank lines are left out. For directories
    see `rollout.directories`.

    Args:
        path: the file or directory.
        repositories: for rows as of SWE-bench: `owner/name` -> a repository on this machine.
        on_unusable: called with the error of each row as of SWE-bench that can be no task here, which is then left out:
            their sets hold rows whose tests are not pytest's. Without it, or with no task left, the first is raised.

    Raises:
        ConfigError: it cannot be read, something is no task or a `task_id` comes twice. `path`, `line` (from 1, of a
            file), `field` and, of such a row, `task_id` say where.
    """
    path = Path(path)
    if path.is_dir():
        return _load_directory(path)
    tasks: list[Task] = []
    lines_by_id: dict[str, int] = {}
    unusable: list[ConfigError] = []
    for number, line in _lines(path):
        try:
            task = read_task(path, number, line, repositories or {})
        except ConfigError as error:
            if "task_id" not in error.fields:
                raise
            unusable.append(error)
            continue
        first = lines_by_id.setdefault(task.task_id, number)
        if first != number:
            raise _at(path, number, "task_id", f"{task.task_id!r} is already in line {first}")
        tasks.append(task)
    _pass_on(unusable, len(tasks), on_unusable)
    if not tasks:
        raise ConfigError(f"{path}: no task in it", path=str(path))
    return tasks


def _pass_on(unusable: Sequence[ConfigError], tasks: int, on_unusable: Callable[[ConfigError], None] | None) -> None:
    if unusable and (on_unusable is None or not tasks):
        first, many = unusable[0], len(unusable)
        count = f" ({many} of {many + tasks} rows cannot be used)" if many + tasks > 1 else ""
        raise ConfigError(f"{first.message}{count}", remedy=first.remedy, **first.fields) from first
    for error in unusable:
        assert on_unusable is not None  # else it has been raised
        on_unusable(error)


def _load_directory(path: Path) -> list[Task]:
    try:
        directories = find_task_directories(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", path=str(path)) from error
    found: dict[str, Path] = {}
    tasks = [directory_task(each) for each in directories]
    for task, directory in zip(tasks, directories, strict=True):
        first = found.setdefault(task.task_id, directory)
        if first is not directory:
            raise ConfigError(f"{directory}: {task.task_id!r} is already {first}", path=str(directory), field="task_id")
    if not tasks:
        raise ConfigError(
            f"{path}: no task in it", remedy="a task is a directory with task.toml or task.json", path=str(path)
        )
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


def read_task(path: Path, number: int, line: bytes, repositories: Repositories | None = None) -> Task:
    """Return the task of one line, in whichever form it is.

    Raises:
        ConfigError: it is none; `path`, `line` and `field` say where.
    """
    try:
        data = json.loads(line)
    except RecursionError:
        raise _at(path, number, "", "nested too deeply") from None
    except ValueError as error:
        raise _at(path, number, "", f"not JSON: {error}") from None
    try:
        if isinstance(data, dict) and is_repository_row(data):
            return repository_task(data)
        if isinstance(data, dict) and is_swebench_row(data):
            return swebench_task(data, repositories or {})
        return Task.from_json(data)
    except ConfigError as error:
        field = error.fields.get("field") or ""
        of_row = isinstance(data, dict) and is_swebench_row(data)
        named = {"task_id": str(data["instance_id"])} if of_row else {}
        raise _at(path, number, str(field), error.message, error.remedy, **named) from error


def _at(path: Path, number: int, field: str, message: str, remedy: str = "", **named: str) -> ConfigError:
    return ConfigError(f"{path}:{number}: {message}", remedy=remedy, path=str(path), line=number, field=field, **named)
