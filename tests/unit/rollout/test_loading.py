from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.rollout.loading import load_tasks

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
"""The task sets; data beside the project, not part of it."""


def row(**changes: Any) -> dict[str, Any]:
    return {
        "task_id": "set/one",
        "prompt": "Repair it.",
        "files": {"a.py": ""},
        "editable": ["a.py"],
        "hidden_tests": {"test_a.py": ""},
        "test_args": [],
        "solution": {"a.py": "x"},
        **changes,
    }


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


@pytest.mark.parametrize(("name", "count"), [("quixbugs", 40), ("exercism", 138)])
def test_the_task_sets_load(name: str, count: int) -> None:
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    tasks = load_tasks(path)
    assert len({task.task_hash for task in tasks}) == count
    assert all(task.task_id.startswith(f"{name}/") and task.solution for task in tasks)


def test_rows_of_another_kind_name_what_they_lack(tmp_path: Path) -> None:
    package = {"task_id": "a", "package": "b", "base_version": "1", "fix_version": "2", "prompt": ""}
    with pytest.raises(ConfigError) as raised:
        load_tasks(write(tmp_path / "rows.jsonl", row(), package))
    assert raised.value.fields["line"] == 2
    assert raised.value.fields["field"] == "changed_files"


def test_blank_lines_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", "", row(), "   ", row(task_id="set/two"))
    assert [task.task_id for task in load_tasks(str(path))] == ["set/one", "set/two"]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ("{", ""),
        ("[]", ""),
        ("[" * 100_000, ""),
        (row(files=3), "files"),
        (row(task_id="set/one"), "task_id"),
        ({**row(task_id="set/two"), "solution": {"b.py": ""}}, "solution"),
        ({"task_id": "set/two"}, "prompt"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: object, field: str) -> None:
    path = write(tmp_path / "t.jsonl", row(), "", bad)
    with pytest.raises(ConfigError) as raised:
        load_tasks(path)
    assert str(raised.value).startswith(f"{path}:3: ")
    assert raised.value.fields == {"path": str(path), "line": 3, "field": field}


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(ConfigError) as raised:
        load_tasks(path)
    assert raised.value.fields["line"] == 1


PATCH = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"


def swebench_row(name: str, *ids: str, repo: str = "o/n") -> dict[str, Any]:
    return {
        "instance_id": name,
        "repo": repo,
        "base_commit": "abc",
        "patch": PATCH.format("a.py"),
        "test_patch": PATCH.format("test_a.py"),
        "problem_statement": "",
        "FAIL_TO_PASS": list(ids),
        "PASS_TO_PASS": [],
    }


ODD = swebench_row("odd", "test_x (tests.A)")
UNKNOWN = swebench_row("unknown", "test_a.py::test_a", repo="else/where")
GOOD = swebench_row("good", "test_a.py::test_a")


def test_rows_that_can_be_no_tasks_here_leave_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ODD, GOOD, UNKNOWN)
    errors: list[ConfigError] = []
    (task,) = load_tasks(path, repositories={"o/n": "/src/n"}, on_unusable=errors.append)
    assert task.task_id == "good"
    told = [(each.fields["line"], each.fields["task_id"], each.fields["field"]) for each in errors]
    assert told == [(1, "odd", "FAIL_TO_PASS"), (3, "unknown", "repo")]
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: .*\(2 of 3 rows cannot be used\)") as raised:
        load_tasks(path, repositories={"o/n": "/src/n"})
    assert raised.value.fields["task_id"] == "odd"


def test_rows_of_which_none_is_a_task_are_an_error(tmp_path: Path) -> None:
    errors: list[ConfigError] = []
    with pytest.raises(ConfigError, match="2 of 2"):
        load_tasks(write(tmp_path / "rows.jsonl", ODD, UNKNOWN), on_unusable=errors.append)
    assert errors == []


def test_what_is_no_row_is_an_error_all_the_same(tmp_path: Path) -> None:
    for bad in ("{", [["x"]], row(files=3)):
        with pytest.raises(ConfigError, match=":2: "):
            load_tasks(
                write(tmp_path / "rows.jsonl", GOOD, bad), repositories={"o/n": "/n"}, on_unusable=lambda _: None
            )


def test_no_file_no_tasks(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path, write(tmp_path / "empty.jsonl")):
        with pytest.raises(ConfigError) as raised:
            load_tasks(path)
        assert raised.value.fields["path"] == str(path)
