"""Where rows as of SWE-bench find their repositories, said on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import Invoke
from tests.unit.cli.test_rollouts import PlayedRuns, runs

from worldfork.cli.task_files import read_repositories, read_tasks
from worldfork.core.errors import ConfigError
from worldfork.rollout.journal import Journal
from worldfork.rollout.swebench import LocalRepository

__all__ = ["runs"]

PATCH = "--- a/{0}\n+++ b/{0}\n@@ -1 +1 @@\n-a\n+b\n"
ROW = {
    "instance_id": "owner__name-1",
    "repo": "owner/name",
    "base_commit": "a" * 40,
    "patch": PATCH.format("name.py"),
    "test_patch": PATCH.format("test_name.py"),
    "problem_statement": "Repair it.",
    "FAIL_TO_PASS": '["test_name.py::test_one"]',
    "PASS_TO_PASS": [],
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "instance_id": "owner__name-2"}) + "\n")
    return path


def test_rows_that_are_no_tasks_are_left_out_and_told_of(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = [{**ROW, "instance_id": f"odd-{number}", "FAIL_TO_PASS": ["test_x (a.B)"]} for number in range(7)]
    with rows.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in odd)
    tasks = read_tasks(rows, None, None, ["owner/name=/src/name"])
    assert [task.task_id for task in tasks] == ["owner__name-1", "owner__name-2"]
    told = capsys.readouterr().err.splitlines()
    assert "rows.jsonl:3: FAIL_TO_PASS holds" in told[0]
    assert told[5:] == ["left out: 2 more, of 9 rows"]
    assert len(read_tasks(rows, ["owner__name-2"], None, ["owner/name=/src/name"])) == 1
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigError, match="no id of pytest's"):
        read_tasks(rows, ["odd-1"], None, ["owner/name=/src/name"])


def test_a_file_in_toml_and_in_json_and_single_options(rows: Path, tmp_path: Path) -> None:
    toml = tmp_path / "sub" / "where.toml"
    toml.parent.mkdir()
    toml.write_text(
        '"owner/name" = "here"\n["other/one"]\npath = "/abs"\ndependencies = ["attrs"]\ncommands = [["make", "x"]]\n'
    )
    inside = str(toml.parent / "here")
    other = LocalRepository("/abs", ("attrs",), (("make", "x"),))
    assert read_repositories(toml, None) == {"owner/name": LocalRepository(inside), "other/one": other}
    found = tmp_path / "where.json"
    found.write_text(json.dumps({"owner/name": {"path": "../up"}}))
    assert read_repositories(found, ["a/b=c=d"]) == {
        "owner/name": LocalRepository(str(tmp_path / "../up")),
        "a/b": LocalRepository("c=d"),
    }
    # A single option moves a repository, and leaves how its world is made.
    assert read_repositories(toml, ["other/one=/moved"])["other/one"] == LocalRepository("/moved", *other_parts(other))
    (task,) = read_tasks(rows, ["owner__name-2"], toml, ["owner/name=/src/name"])
    assert task.world is not None
    assert task.world.origin.git == f"/src/name@{'a' * 40}"


def other_parts(other: LocalRepository) -> tuple[Any, Any]:
    return other.dependencies, other.commands


def test_what_makes_a_world_of_a_repository_is_in_its_tasks(rows: Path, tmp_path: Path) -> None:
    path = tmp_path / "where.json"
    path.write_text(json.dumps({"owner/name": {"path": "r", "dependencies": ["a>1"], "commands": [["pip", "x"]]}}))
    task = read_tasks(rows, None, path, None)[0]
    assert task.world is not None
    assert (task.world.dependencies, task.world.commands) == (("a>1",), (("pip", "x"),))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("w.toml", "owner/name = 'x'"),
        ("w.json", "{"),
        ("w.json", "[" * 100_000),
        ("w.json", "[]"),
        ("w.json", '{"a/b": 3}'),
        ("w.json", '{"a/b": {}}'),
        ("w.json", '{"a/b": {"path": "x", "paths": "y"}}'),
        ("w.json", '{"a/b": {"path": "x", "commands": "make"}}'),
        ("w.json", '{"a/b": {"path": "x", "commands": ["make"]}}'),
        ("w.json", '{"a/b": {"path": "x", "dependencies": "attrs"}}'),
        ("w.toml", None),
        ("w.toml", b"\xff"),
    ],
)
def test_a_file_that_says_something_else(tmp_path: Path, name: str, text: str | bytes | None) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="--repositories"):
        read_repositories(path, None)


@pytest.mark.parametrize("pair", ["owner/name", "=x", "owner/name="])
def test_an_option_that_names_no_place(pair: str) -> None:
    with pytest.raises(ConfigError, match=r"--repository .* is not NAME=PATH"):
        read_repositories(None, [pair])


@pytest.mark.parametrize(
    "verb",
    [
        ("rollout", "{}", "--policy", "nop"),
        ("tasks", "check", "{}"),
        ("tasks", "leaks", "{}"),
        ("regrade", "RUN", "--tasks", "{}"),
        ("export-episodes", "RUN", "--tasks", "{}"),
    ],
)
def test_every_verb_that_takes_tasks_says_what_is_missing(
    invoke: Invoke, rows: Path, tmp_path: Path, verb: tuple[str, ...]
) -> None:
    with Journal.open(tmp_path / "run" / "episodes.jsonl"):
        pass
    words = [word.format(rows).replace("RUN", str(tmp_path / "run")) for word in verb]
    result = invoke(*words)
    assert result.exit_code == 2
    assert "nobody says where owner/name lies" in result.stderr
    assert "--repository owner/name=PATH" in result.stderr
    assert f"{rows}:1" in result.stderr


def test_rollouts_of_rows(invoke: Invoke, runs: PlayedRuns, rows: Path) -> None:
    result = invoke("rollout", str(rows), "--policy", "nop", "--repository", "owner/name=/src/name")
    assert result.exit_code == 0, result.stderr
    assert runs.asked["tasks"] == ["owner__name-1", "owner__name-2"]
