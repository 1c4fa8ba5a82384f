"""A task: a frozen problem, known by the hash of what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from worldfork.core.errors import ConfigError
from worldfork.core.ids import content_id

TASK_FORMAT = 1
"""Version of the JSON form; part of the hash."""

MAX_TASK_ID_CHARACTERS = 200


@dataclass(frozen=True)
class TaskLimits:
    """What one rollout of a task, and one grading of it, may use."""

    policy_wall_s: float = 600.0
    """Wall time for the policy's turn. What it left by then is graded."""
    grade_cpu_s: float = 60.0
    """CPU seconds of each process of one grading."""
    grade_wall_s: float = 300.0
    """Wall time of one grading; the backstop for code that sleeps."""
    memory_mb: int = 1024
    """Memory of each sandbox, MiB."""
    disk_mb: int = 1024
    """What each sandbox may write, MiB."""
    pids: int = 256
    """Processes and threads in each sandbox."""
    carry_files: int = 256
    """How many files may be carried from the policy's sandbox to the verifier."""
    carry_bytes: int = 16 << 20
    """Their size in bytes, together."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            number = isinstance(value, int) or (isinstance(value, float) and each.type == "float")
            if isinstance(value, bool) or not number or not 0 < value < float("inf"):
                raise ConfigError(f"limit {each.name} is {value!r}, not a number above 0", field=f"limits.{each.name}")
            if each.type == "float":
                # 60 and 60.0 are the same limit and must hash alike.
                object.__setattr__(self, each.name, float(value))

    @classmethod
    def from_json(cls, data: object) -> TaskLimits:
        """Read limits; what is not given keeps its default.

        Raises:
            ConfigError: an unknown limit or a bad value; `field` names it.
        """
        if not isinstance(data, Mapping):
            raise ConfigError("limits is not an object", field="limits")
        unknown = sorted(set(data) - {each.name for each in fields(cls)})
        if unknown:
            raise ConfigError(f"there is no limit {unknown[0]!r}", field=f"limits.{unknown[0]}")
        return cls(**data)


@dataclass(frozen=True)
class Task:
    """A problem whose answer is judged by hidden tests.

    Paths are relative to the task's directory inside a sandbox, in normal form, with `/`.
    """

    task_id: str
    """Name for people, such as `quixbugs/bitcount`; unique within a set."""
    prompt: str
    """What the policy is told."""
    files: Mapping[str, str]
    """Path -> text: the starting state of the task's directory."""
    editable: tuple[str, ...]
    """The paths that are carried from the policy's sandbox to the verifier."""
    hidden_tests: Mapping[str, str]
    """Path -> text: laid down for grading only; they win over every other file."""
    test_args: tuple[str, ...]
    """Arguments for pytest, run in the task's directory."""
    solution: Mapping[str, str] = field(default_factory=dict)
    """Path -> text: the reference, laid over `files`."""
    limits: TaskLimits = field(default_factory=TaskLimits)

    def __post_init__(self) -> None:
        _check_text("task_id", self.task_id)
        if not self.task_id or len(self.task_id) > MAX_TASK_ID_CHARACTERS or not self.task_id.isprintable():
            raise ConfigError(f"task_id {self.task_id[:80]!r} is empty, too long or not printable", field="task_id")
        _check_text("prompt", self.prompt)
        for name in ("files", "hidden_tests", "solution"):
            object.__setattr__(self, name, _checked_files(name, getattr(self, name)))
        for name in ("editable", "test_args"):
            object.__setattr__(self, name, _checked_strings(name, getattr(self, name)))
        for path in self.editable:
            check_path("editable", path)
        if not self.hidden_tests:
            raise ConfigError("hidden_tests is empty, so nothing could be graded", field="hidden_tests")
        _check_tree({*self.files, *self.editable, *self.hidden_tests})
        outside = sorted(set(self.solution) - set(self.editable))
        if outside:
            raise ConfigError(f"solution changes {outside[0]!r}, which is not editable", field="solution")

    def __hash__(self) -> int:
        return hash(self.task_hash)

    @cached_property
    def task_hash(self) -> str:
        """64 hex digits over everything in the task: equal hashes are the same problem."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return content_id(b"worldfork task", canonical.encode("ascii"))

    def to_json(self) -> dict[str, Any]:
        """Return the task as plain JSON values, with the format's version."""
        return {
            "format": TASK_FORMAT,
            "task_id": self.task_id,
            "prompt": self.prompt,
            "files": dict(self.files),
            "editable": list(self.editable),
            "hidden_tests": dict(self.hidden_tests),
            "test_args": list(self.test_args),
            "solution": dict(self.solution),
            "limits": asdict(self.limits),
        }

    @classmethod
    def from_json(cls, data: object) -> Task:
        """Read a task; `format`, `solution` and `limits` may be absent.

        Raises:
            ConfigError: something is missing, unknown or malformed; `field` names it.
        """
        if not isinstance(data, Mapping):
            raise ConfigError("a task is a JSON object", field="")
        version = data.get("format", TASK_FORMAT)
        if version != TASK_FORMAT:
            raise ConfigError(f"task format {version!r} is not {TASK_FORMAT}", field="format")
        known = {each.name for each in fields(cls)}
        unknown = sorted(set(data) - known - {"format"})
        if unknown:
            raise ConfigError(f"a task has no field {unknown[0]!r}", field=unknown[0])
        missing = sorted(known - set(data) - {"solution", "limits"})
        if missing:
            raise ConfigError(f"field {missing[0]!r} is missing", field=missing[0])
        values = {name: data[name] for name in known if name in data}
        if "limits" in values:
            values["limits"] = TaskLimits.from_json(values["limits"])
        return cls(**values)


def check_path(name: str, path: object) -> str:
    """Return `path` if it is a relative path in normal form that stays inside the task's directory.

    Raises:
        ConfigError: it is not; `field` is `name`.
    """
    _check_text(name, path)
    assert isinstance(path, str)
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == "." or "\0" in path:
        raise ConfigError(f"{name}: {path!r} is not a plain relative path", field=name)
    return path


def _check_text(name: str, value: object, where: str = "") -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name}{where} is {type(value).__name__}, not text", field=name)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair; no file or argument can hold it.
        raise ConfigError(f"{name}{where} holds a lone surrogate", field=name) from None


def _check_tree(paths: set[str]) -> None:
    """Refuse a path that would have to be a file and a directory."""
    for path in sorted(paths):
        for parent in PurePosixPath(path).parents:
            if str(parent) in paths:
                raise ConfigError(f"{str(parent)!r} is a file, and {path!r} lies below it", field="files")


def _checked_files(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is not an object of path -> text", field=name)
    for path, text in value.items():
        check_path(name, path)
        _check_text(name, text, where=f"[{path!r}]")
    return dict(value)


def _checked_strings(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{name} is not a list of text", field=name)
    for each in value:
        _check_text(name, each)
        if "\0" in each:
            raise ConfigError(f"{name} holds a zero byte", field=name)
    return tuple(value)
