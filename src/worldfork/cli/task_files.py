"""Reading the tasks that a verb is given."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from worldfork.cli.printing import note
from worldfork.core.errors import ConfigError
from worldfork.records.checked import checked_strings, checked_text
from worldfork.records.task import Task
from worldfork.rollout.loading import load_tasks
from worldfork.rollout.swebench import LocalRepository

RepositoriesFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="TOML or JSON: where the repositories of rows as of SWE-bench lie."),
]
Repository = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=PATH", help="Where one of these repositories lies; may be repeated."),
]

_QUOTES = 'write "owner/name" = "PATH" in TOML, with the quotes, and {"owner/name": "PATH"} in JSON'
_SHOWN = 5
"""Of rows that are left out, so many are told of one by one."""
_FIELDS = {"path", "dependencies", "commands"}


def read_tasks(
    path: Path, wanted: Sequence[str] | None, repositories: Path | None, repository: Sequence[str] | None
) -> list[Task]:
    """Return the tasks of a file or directory.

    Args:
        path: in any form that `load_tasks` takes.
        wanted: ids of those that are asked for; all by default.
        repositories, repository: the values of the two options.

    Raises:
        ConfigError: one of these cannot be read, or there is no task of an id.
    """
    unusable: dict[object, ConfigError] = {}

    def leave_out(error: ConfigError) -> None:
        unusable[error.fields["task_id"]] = error

    tasks = load_tasks(path, repositories=read_repositories(repositories, repository), on_unusable=leave_out)
    missing = sorted(set(wanted or ()) - {task.task_id for task in tasks})
    if missing and missing[0] in unusable:
        raise unusable[missing[0]]
    if unusable and not wanted:
        _tell(list(unusable.values()), len(tasks))
    if missing:
        raise ConfigError(f"there is no task {missing[0]!r} in the file", task_id=missing[0])
    return [task for task in tasks if not wanted or task.task_id in wanted]


def _tell(unusable: Sequence[ConfigError], tasks: int) -> None:
    for error in unusable[:_SHOWN]:
        note(f"left out: {error}")
    if len(unusable) > _SHOWN:
        note(f"left out: {len(unusable) - _SHOWN} more, of {len(unusable) + tasks} rows")


def read_repositories(file: Path | None, pairs: Sequence[str] | None) -> dict[str, LocalRepository]:
    """Return where repositories lie, by `owner/name`; what single options say comes before what the file does.

    In the file each is a path, or a table with `path`, `dependencies` and `commands`. Paths are relative to it.

    Raises:
        ConfigError: the file cannot be read or says something else, or an option is not `NAME=PATH`.
    """
    found = {} if file is None else _read_file(file)
    for pair in pairs or ():
        name, _, path = pair.partition("=")
        if not name or not path:
            raise ConfigError(
                f"--repository {pair!r} is not NAME=PATH", remedy="as in --repository psf/requests=./requests"
            )
        before = found.get(name, LocalRepository(""))
        found[name] = LocalRepository(path, before.dependencies, before.commands)
    return found


def _read_file(file: Path) -> dict[str, LocalRepository]:
    try:
        text = file.read_text(encoding="utf-8")
        data = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"--repositories {file}: {error.strerror or error}", path=str(file)) from error
    except (ValueError, RecursionError) as error:
        kind = "TOML" if file.suffix == ".toml" else "JSON"
        raise ConfigError(f"--repositories {file} is no {kind}: {error}", remedy=_QUOTES, path=str(file)) from None
    if not isinstance(data, Mapping):
        raise ConfigError(f"--repositories {file} is no table of names and paths", path=str(file))
    return {name: _read_one(file, name, value) for name, value in data.items()}


def _read_one(file: Path, name: str, value: Any) -> LocalRepository:
    said = {"path": value} if isinstance(value, str) else value
    if not isinstance(said, Mapping) or not said.get("path") or set(said) - _FIELDS:
        raise ConfigError(
            f"--repositories {file}: {name!r} is neither a path nor a table with path, dependencies and commands",
            remedy=_QUOTES,
            path=str(file),
        )
    try:
        return _repository(file.parent, said)
    except ConfigError as error:
        raise ConfigError(f"--repositories {file}: {name!r}: {error.message}", path=str(file)) from error


def _repository(directory: Path, said: Mapping[str, Any]) -> LocalRepository:
    commands = said.get("commands", ())
    if not isinstance(commands, list | tuple):
        raise ConfigError("commands is not a list", field="commands")
    return LocalRepository(
        str(directory / checked_text("path", said["path"])),
        checked_strings("dependencies", said.get("dependencies", ())),
        tuple(checked_strings("commands", command) for command in commands),
    )
