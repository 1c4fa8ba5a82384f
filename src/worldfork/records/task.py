"""A task: a frozen problem, known by the hash of what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.core.ids import content_id
from worldfork.records.checked import (
    check_path,
    checked_files,
    checked_strings,
    checked_text,
    checked_variables,
)
from worldfork.records.globs import is_editable, is_literal
from worldfork.records.origin import Mount, TreeSource, WorldSource
from worldfork.records.task_limits import TaskLimits

TASK_FORMAT = 2
"""Version of the JSON form; part of the hash."""

MAX_TASK_ID_CHARACTERS = 200

TASK_DIRECTORY = "/workspace"
"""A task's directory inside a sandbox: the default working directory of every one."""

SCORES = ("fraction", "fail_to_pass", "resolved")
"""What the reward of tests is: passed of expected; or the fraction of those that the starting state fails, and 0 as
soon as one that it passes is lost; or whether that fraction is whole."""

_FIRST_FORMAT = ("task_id", "prompt", "files", "editable", "hidden_tests", "test_args", "solution", "limits")
"""The fields of format 1. A task that uses no others is written as format 1, and its hash stays what it was."""


@dataclass(frozen=True)
class Task:
    """A problem whose answer is judged by hidden tests, or by what its verifier looks at.

    Paths are relative to the task's directory inside a sandbox, in normal form, with `/`.
    """

    task_id: str
    """Name for people, such as `quixbugs/bitcount`; unique within a set."""
    prompt: str
    """What the policy is told."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path -> text, laid over the world: the starting state of the task's directory."""
    editable: tuple[str, ...] = ()
    """Patterns (see `records.globs`) of the paths that are carried from the policy's sandbox to the verifier."""
    hidden_tests: Mapping[str, str] = field(default_factory=dict)
    """Path -> text: laid down for grading only; they win over every other file."""
    test_args: tuple[str, ...] = ()
    """Arguments for pytest, run in the task's directory."""
    solution: Mapping[str, str] = field(default_factory=dict)
    """Path -> text: the reference, laid over the starting state."""
    limits: TaskLimits = field(default_factory=TaskLimits)
    world: WorldSource = field(default_factory=WorldSource)
    """What lies below `files`."""
    patch: str = ""
    """A unified diff that turns the world with `files` into the starting state."""
    tests_from: TreeSource | None = None
    """Hidden tests that lie elsewhere; `hidden_tests` win over them."""
    test_roots: tuple[str, ...] = ()
    """Paths that are removed whole before hidden tests are laid down, so that nothing planted there remains."""
    test_patch: str = ""
    """A unified diff that is applied after the hidden tests are laid down; only of paths that are not editable."""
    test_command: tuple[str, ...] = ()
    """What runs the tests in place of pytest; empty for pytest under the verifier's own eyes."""
    reader: str = "pytest"
    """How results are read: `pytest`; for a `test_command`: `junit:PATH` or `tap`."""
    rebuild: tuple[str, ...] = ()
    """A command after a change of sources, run in the task's directory: at the starting state's making, and in every
    grading before the tests."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of every command in the task's sandboxes, such as PYTHONPATH."""
    fail_to_pass: tuple[str, ...] = ()
    """Ids that the starting state fails and the reference passes. Empty: what calibration finds."""
    pass_to_pass: tuple[str, ...] = ()
    """Ids that both pass; checked by calibration, which may find more."""
    score: str = "fraction"
    """One of `SCORES`."""
    solution_from: TreeSource | None = None
    """A reference that lies elsewhere; `solution` wins over it."""
    solution_patch: str = ""
    """The reference as a unified diff of the starting state."""
    verifier: Mapping[str, Any] = field(default_factory=dict)
    """What judges, as `{"kind": ..., ...}`; empty: `split` where the tests allow it, else `pytest`."""
    mounts: tuple[Mount, ...] = ()

    def __post_init__(self) -> None:
        checked_text("task_id", self.task_id)
        if not self.task_id or len(self.task_id) > MAX_TASK_ID_CHARACTERS or not self.task_id.isprintable():
            raise ConfigError(f"task_id {self.task_id[:80]!r} is empty, too long or not printable", field="task_id")
        for name in ("prompt", "patch", "test_patch", "reader", "score", "solution_patch"):
            checked_text(name, getattr(self, name))
        for name in ("files", "hidden_tests", "solution"):
            object.__setattr__(self, name, checked_files(name, getattr(self, name)))
        for name in _LISTS:
            object.__setattr__(self, name, checked_strings(name, getattr(self, name)))
        for name in ("editable", "test_roots"):
            for path in getattr(self, name):
                check_path(name, path)
        object.__setattr__(self, "env", checked_variables("env", self.env))
        object.__setattr__(self, "mounts", tuple(self.mounts))
        _check_judge(self)
        _check_tree({*self.files, *filter(is_literal, self.editable), *self.hidden_tests})
        outside = sorted(path for path in self.solution if not is_editable(path, self.editable))
        if outside:
            raise ConfigError(f"solution changes {outside[0]!r}, which is not editable", field="solution")

    def __hash__(self) -> int:
        return hash(self.task_hash)

    @cached_property
    def task_hash(self) -> str:
        """64 hex digits over everything in the task: equal hashes are the same problem."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return content_id(b"worldfork task", canonical.encode("ascii"))

    @property
    def has_tests(self) -> bool:
        """Whether there are hidden tests."""
        return bool(self.hidden_tests or self.tests_from or self.test_patch)

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference solution."""
        return bool(self.solution or self.solution_from or self.solution_patch)

    def to_json(self) -> dict[str, Any]:
        """Return the task as plain JSON values, with the format's version."""
        whole = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        later = {
            each.name: whole[each.name]
            for each in fields(self)
            if each.name not in _FIRST_FORMAT and getattr(self, each.name) != _default(each)
        }
        first = {name: whole[name] for name in _FIRST_FORMAT}
        return {"format": TASK_FORMAT if later else 1, **first, **later}

    @classmethod
    def from_json(cls, data: object) -> Task:
        """Read a task; every field but `task_id` and `prompt` may be absent.

        Raises:
            ConfigError: something is missing, unknown or malformed; `field` names it.
        """
        if not isinstance(data, Mapping):
            raise ConfigError("a task is a JSON object", field="")
        version = data.get("format", TASK_FORMAT)
        if isinstance(version, bool) or version not in (1, TASK_FORMAT):
            raise ConfigError(f"task format {version!r} is not {TASK_FORMAT}", field="format")
        known = {each.name for each in fields(cls)}
        unknown = sorted(set(map(str, data)) - known - {"format"})
        if unknown:
            raise ConfigError(f"a task has no field {unknown[0]!r}", field=unknown[0])
        missing = sorted({"task_id", "prompt"} - set(data))
        if missing:
            raise ConfigError(f"field {missing[0]!r} is missing", field=missing[0])
        values = {name: data[name] for name in known if name in data}
        for name, read in _READERS.items():
            if values.get(name) is not None:
                values[name] = read(values[name])
        return cls(**values)


_LISTS = ("editable", "test_args", "test_roots", "test_command", "rebuild", "fail_to_pass", "pass_to_pass")

_READERS: dict[str, Any] = {
    "limits": TaskLimits.from_json,
    "world": WorldSource.from_json,
    "tests_from": lambda data: TreeSource.from_json(data, "tests_from"),
    "solution_from": lambda data: TreeSource.from_json(data, "solution_from"),
    "mounts": lambda data: tuple(map(Mount.from_json, _listed("mounts", data))),
}


def _listed(name: str, data: object) -> list[object]:
    if not isinstance(data, list | tuple):
        raise ConfigError(f"{name} is not a list", field=name)
    return list(data)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value.to_json() if hasattr(value, "to_json") else value


def _default(each: Any) -> Any:
    return each.default_factory() if callable(each.default_factory) else each.default


def _check_judge(task: Task) -> None:
    if not isinstance(task.verifier, Mapping):
        raise ConfigError("verifier is not an object", field="verifier")
    try:
        plain = json.loads(json.dumps(_plain(task.verifier), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"verifier holds what JSON cannot say: {error}", field="verifier") from None
    object.__setattr__(task, "verifier", plain)
    kind = plain.get("kind", "")
    if plain and (not isinstance(kind, str) or not kind):
        raise ConfigError("verifier needs a kind", field="verifier.kind")
    if not task.has_tests and kind in ("", "auto", "pytest", "split"):
        raise ConfigError("hidden_tests is empty, so nothing could be graded", field="hidden_tests")
    if task.score not in SCORES:
        raise ConfigError(f"score {task.score!r} is none of {', '.join(SCORES)}", field="score")
    if task.reader not in ("pytest", "tap") and not task.reader.startswith("junit:"):
        raise ConfigError(f"reader {task.reader!r} is not pytest, tap or junit:PATH", field="reader")
    if task.reader != "pytest" and not task.test_command:
        raise ConfigError(f"reader {task.reader} reads what a test_command leaves", field="reader")


def _check_tree(paths: set[str]) -> None:
    """Refuse a path that would have to be a file and a directory."""
    for path in sorted(paths):
        for parent in PurePosixPath(path).parents:
            if str(parent) in paths:
                raise ConfigError(f"{str(parent)!r} is a file, and {path!r} lies below it", field="files")
