from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "task_id": "set/one",
        "prompt": "Repair it.",
        "files": {"a.py": "x = 1\n"},
        "editable": ["a.py"],
        "hidden_tests": {"test_a.py": "def test(): pass\n"},
        "test_args": ["test_a.py"],
        "solution": {"a.py": "x = 2\n"},
        **changes,
    }


def test_a_task_survives_json() -> None:
    task = Task.from_json(fields(limits={"memory_mb": 64}))
    again = Task.from_json(json.loads(json.dumps(task.to_json())))
    assert again == task
    assert again.task_hash == task.task_hash
    assert again.limits.memory_mb == 64
    assert pickle.loads(pickle.dumps(task)) == task
    assert len({task, again}) == 1


def test_the_hash_is_over_the_content_and_not_over_the_order() -> None:
    one = Task.from_json(fields(files={"a": "1", "b": "2"}, solution={}))
    two = Task.from_json(dict(reversed(fields(files={"b": "2", "a": "1"}, solution={}).items())))
    assert one.task_hash == two.task_hash


@pytest.mark.parametrize(
    "changes",
    [
        {"task_id": "set/two"},
        {"prompt": "Repair it"},
        {"files": {"a.py": "x = 1"}},
        {"editable": ["a.py", "b.py"]},
        {"hidden_tests": {"test_a.py": ""}},
        {"test_args": ["-x", "test_a.py"]},
        {"solution": {}},
        {"limits": {"pids": 10}},
    ],
)
def test_every_field_is_in_the_hash(changes: dict[str, Any]) -> None:
    assert Task.from_json(fields(**changes)).task_hash != Task.from_json(fields()).task_hash


def test_equal_limits_hash_alike() -> None:
    whole = Task.from_json(fields(limits={"grade_wall_s": 60}))
    assert whole.task_hash == Task.from_json(fields(limits={"grade_wall_s": 60.0})).task_hash


def test_the_hash_stays_the_same_between_versions() -> None:
    assert Task.from_json(fields()).task_hash.startswith("1fbd8502751bfd00")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task_id", ""),
        ("task_id", 3),
        ("task_id", "a\nb"),
        ("task_id", "x" * 201),
        ("prompt", None),
        ("prompt", "\ud800"),
        ("files", ["a.py"]),
        ("files", {"/a.py": ""}),
        ("files", {"../a.py": ""}),
        ("files", {"a/../b": ""}),
        ("files", {"a//b": ""}),
        ("files", {"": ""}),
        ("files", {".": ""}),
        ("files", {"a\0": ""}),
        ("files", {"a": "", "a/b": ""}),
        ("editable", "a.py"),
        ("editable", ["a/"]),
        ("editable", [1]),
        ("hidden_tests", {}),
        ("test_args", ["a\0b"]),
        ("solution", {"b.py": ""}),
        ("limits", 3),
        ("limits", {"cpus": 3}),
        ("limits", {"pids": 0}),
        ("limits", {"pids": 1.5}),
        ("limits", {"pids": True}),
        ("limits", {"grade_wall_s": float("nan")}),
        ("limits", {"grade_wall_s": float("inf")}),
        ("format", 3),
        ("format", True),
        ("world", {"without": ["/a"]}),
        ("world", {"build_wall_s": 0}),
        ("mounts", [{"target": "data", "origin": {"directory": "/data"}}]),
        ("verifier", {"weight": 1}),
        ("score", "best"),
        ("reader", "tap"),
        ("env", {"A=B": ""}),
        ("colour", "red"),
    ],
)
def test_what_is_wrong_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as raised:
        Task.from_json(fields(**{field: value}))
    assert raised.value.fields["field"].split(".")[0] == field


@pytest.mark.parametrize("name", ["files", "hidden_tests"])
def test_no_path_is_a_file_and_a_directory(name: str) -> None:
    with pytest.raises(ConfigError):
        Task.from_json(fields(**{name: {"a.py/b.py": ""}}))


@pytest.mark.parametrize("field", ["task_id", "prompt", "hidden_tests"])
def test_what_is_missing_is_named(field: str) -> None:
    data = fields()
    del data[field]
    with pytest.raises(ConfigError) as raised:
        Task.from_json(data)
    assert raised.value.fields["field"] == field


def test_not_an_object() -> None:
    with pytest.raises(ConfigError):
        Task.from_json(["task"])


def test_records_do_not_change() -> None:
    task = Task.from_json(fields())
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.prompt = "other"  # type: ignore[misc]
    assert TaskLimits() == TaskLimits.from_json({})
