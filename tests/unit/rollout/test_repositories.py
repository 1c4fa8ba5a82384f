"""Rows of two versions of a package, and rows as of SWE-bench, as tasks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.globs import is_editable
from worldfork.records.origin import Origin
from worldfork.reward.startup import admit
from worldfork.rollout.loading import load_tasks
from worldfork.rollout.repositories import _crossing, repository_task
from worldfork.rollout.swebench import swebench_task

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "repos.jsonl"


def row(**changes: Any) -> dict[str, Any]:
    return {
        "task_id": "pypi/box-1.0",
        "package": "box",
        "base_version": "1.0",
        "fix_version": "1.1",
        "prompt": "Mend it.",
        "dependencies": ["pytest==8.3.5"],
        "pythonpath": [".", "src"],
        "env": {"A": "b"},
        "rebuild": "python setup.py -q build_ext --inplace",
        "editable": ["src/box/*.py", "box.py", "src/**/*.c"],
        "changed_files": ["src/box/core/a.py"],
        "test_roots": ["tests", "conftest.py"],
        "test_files": ["tests/test_a.py"],
        "test_args": ["-k", "one"],
        "fail_to_pass": ["tests/test_a.py::test_one"],
        "pass_to_pass": ["tests/test_a.py::test_two"],
        "licence": "for people",
        **changes,
    }


def test_a_row_says_where_everything_comes_from() -> None:
    task = repository_task(row())
    assert task.world.origin == Origin(package="box", version="1.0")
    assert task.world.dependencies == ("pytest==8.3.5",)
    assert task.tests_from is not None
    assert task.solution_from is not None
    assert (task.tests_from.origin.version, task.tests_from.paths) == ("1.1", ("tests", "conftest.py"))
    assert (task.solution_from.origin.version, task.solution_from.paths) == ("1.1", ("src/box/core/a.py",))
    assert task.test_args == ("-k", "one", "tests/test_a.py")
    assert task.rebuild == ("python", "setup.py", "-q", "build_ext", "--inplace")
    assert task.env == {"A": "b", "PYTHONPATH": "/workspace:/workspace/src"}
    assert task.score == "fail_to_pass"


@pytest.mark.parametrize(
    ("path", "means"),
    [
        ("src/box/a.py", True),
        ("src/box/core/deep/a.py", True),
        ("src/other/a.py", False),
        ("box.py", True),
        ("src/x/y.c", True),
        ("tests/a.py", False),
    ],
)
def test_a_star_of_a_row_crosses_directories(path: str, means: bool) -> None:
    assert is_editable(path, repository_task(row()).editable) is means


def test_programs_of_the_packages_own_metadata_are_made_and_none_is_replaced(tmp_path: Path) -> None:
    """As an installer would: what a package's tests call by name has to be on PATH."""
    task = repository_task(row(pythonpath=["src"]))
    ((python, flag, program, where),) = task.world.commands
    assert (python, flag, where) == ("python", "-c", "/workspace/src")
    assert repository_task(row(pythonpath=[])).world.commands == ()
    told = tmp_path / "src/box.egg-info"
    told.mkdir(parents=True)
    (told / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: box\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(
        "[console_scripts]\nbox = boxed:Main.run [extra]\ntaken = boxed:Main.run\n"
        "[gui_scripts]\nother = boxed:Main.run\n"
    )
    (tmp_path / "src/boxed.py").write_text("class Main:\n    @staticmethod\n    def run():\n        print('boxed')\n")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "taken").write_text("there already")
    there = f"import sysconfig; sysconfig.get_path = lambda _: {str(scripts)!r}\n{program}"
    subprocess.run([sys.executable, "-c", there, str(tmp_path / "src")], check=True)
    assert {path.name for path in scripts.iterdir()} == {"box", "taken"}
    assert (scripts / "taken").read_text() == "there already"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    assert subprocess.run([scripts / "box"], env=env, capture_output=True, check=True).stdout == b"boxed\n"


def test_tests_that_contradict_the_task_are_named_in_the_prompt() -> None:
    assert repository_task(row()).prompt == "Mend it."
    assert "tests/test_a.py::test_old" in repository_task(row(stale_visible_tests=["tests/test_a.py::test_old"])).prompt


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"editable": None}, "editable"),
        ({"fix_version": 2}, "fix_version"),
        ({"test_roots": ["../up"]}, "test_roots"),
        ({"env": ["A"]}, "env"),
        ({"rebuild": ["make"]}, "rebuild"),
        ({"base_sha256": 7}, "origin.sha256"),
    ],
)
def test_a_malformed_row_says_which_field(changes: dict[str, Any], field: str) -> None:
    data = {key: value for key, value in row(**changes).items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        repository_task(data)
    assert caught.value.fields["field"] == field


def test_the_repository_set_loads() -> None:
    if not DATA.exists():
        pytest.skip(f"{DATA} is not there")
    tasks = load_tasks(DATA)
    assert len({task.task_hash for task in tasks}) == 18
    assert sum(bool(task.rebuild) for task in tasks) == 4
    for task in tasks:
        assert task.solution_from is not None
        assert all(is_editable(path, task.editable) for path in task.solution_from.paths)


FIX = "--- a/lib/a.py\n+++ b/lib/a.py\n@@ -1 +1 @@\n-one\n+two\n--- a/docs/a.md\n+++ b/docs/a.md\n@@ -1 +1 @@\n-x\n+y\n"
TEST = "--- /dev/null\n+++ b/tests/test_a.py\n@@ -0,0 +1 @@\n+def test_a(): pass\n"


def bench_row(**changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "o__n-1",
        "repo": "o/n",
        "base_commit": "abc123",
        "problem_statement": "It breaks.",
        "patch": FIX,
        "test_patch": TEST,
        "FAIL_TO_PASS": json.dumps(["tests/test_a.py::test_a"]),
        "PASS_TO_PASS": ["tests/test_b.py::test_b[x::y]"],
        "hints_text": "for people",
        **changes,
    }


def test_a_star_of_a_row_crosses_directories_at_the_top_too() -> None:
    assert [_crossing(each) for each in ("*.py", "pkg/*.py", "pkg/**/*.py", "setup.py")] == [
        *["**/*.py", "pkg/**/*.py", "pkg/**/*.py", "setup.py"]
    ]


def test_a_swebench_row_stands_on_a_commit() -> None:
    task = swebench_task(bench_row(), {"o/n": "/src/n"}, commands=[["make"]])
    assert task.world.origin.git == "/src/n@abc123"
    assert task.world.commands == (("make",),)
    assert (task.test_patch, task.solution_patch) == (TEST, FIX)
    assert task.fail_to_pass == ("tests/test_a.py::test_a",)
    assert task.test_args == ("tests/test_a.py", "tests/test_b.py")
    assert is_editable("docs/a.md", task.editable)
    assert is_editable("lib/a.py", task.editable)


@pytest.mark.parametrize(
    "path", ["lib/b.pyx", "lib/templates/x.html", "lib/data.json", "NEWS", "setup.py", "build/x.py"]
)
def test_all_of_the_repository_of_a_swebench_row_is_editable(path: str) -> None:
    assert is_editable(path, swebench_task(bench_row(), {"o/n": "/src/n"}).editable)


@pytest.mark.parametrize("path", [".venv/lib/a.py", "js/node_modules/a.js", "lib/__pycache__/a.pyc", ".git/config"])
def test_what_tools_leave_beside_a_swebench_row_is_not_editable(path: str) -> None:
    assert not is_editable(path, swebench_task(bench_row(), {"o/n": "/src/n"}).editable)


@pytest.mark.parametrize(
    "path",
    [
        "pyproject.toml",
        "setup.cfg",
        "tests/data/a.json",
        "tests/test_a.py",
        "tests/test_b.py",
        "tests/helpers/__init__.py",
        "lib/tests/util.py",
        "testing/checks.py",
        "lib/conftest.py",
        "lib/b_test.py",
        "check/odd.py",
        "spec.py",
    ],
)
def test_tests_of_a_swebench_row_and_what_they_use_are_not_editable(path: str) -> None:
    """A policy could else break what PASS_TO_PASS names, and rewrite the tests that would tell."""
    row = bench_row(
        PASS_TO_PASS=["tests/test_b.py::test_b", "check/odd.py::test_c"],
        test_patch=TEST + TEST.replace("tests/test_a.py", "spec.py"),
    )
    editable = swebench_task(row, {"o/n": "/src/n"}).editable
    assert not is_editable(path, editable)
    assert is_editable("lib/new/b.py", editable)


def test_what_a_policy_made_of_the_tests_of_a_swebench_row_is_not_graded() -> None:
    task = swebench_task(bench_row(), {"o/n": "/src/n"})
    own = EditedFile(b"def test_b(): pass\n")
    edits = Edits({"lib/a.py": EditedFile(b"two\n"), "tests/test_b.py": own, "tests/checks/__init__.py": own})
    admitted, notes = admit(task, edits, ["tests/test_a.py"])
    assert set(admitted.files) == {"lib/a.py"}
    assert "tests/test_b.py" in notes[0]


def test_what_the_fix_of_a_swebench_row_touches_is_editable_wherever_it_lies() -> None:
    editable = swebench_task(bench_row(patch=FIX.replace("lib/a.py", "lib/testing/a.py")), {"o/n": "/n"}).editable
    assert is_editable("lib/testing/a.py", editable)
    assert not is_editable("lib/testing/b.py", editable)


def test_a_swebench_row_whose_fix_changes_its_tests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tests/test_b\.py.*one of the tests") as caught:
        swebench_task(bench_row(patch=FIX.replace("lib/a.py", "tests/test_b.py")), {"o/n": "/n"})
    assert caught.value.fields["field"] == "patch"


def test_a_swebench_row_of_an_unknown_repository_says_what_to_pass(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(bench_row()) + "\n")
    with pytest.raises(ConfigError, match="where o/n lies") as caught:
        load_tasks(path)
    assert caught.value.fields["field"] == "repo"
    assert [task.task_id for task in load_tasks(path, repositories={"o/n": "/src/n"})] == ["o__n-1"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"FAIL_TO_PASS": "[not json"}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": ["test_a (tests.A)"]}, "FAIL_TO_PASS"),
        ({"patch": "no diff"}, "patch"),
        ({"repo": 3}, "repo"),
    ],
)
def test_a_malformed_swebench_row_says_which_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        swebench_task(bench_row(**changes), {"o/n": "/src/n"})
    assert caught.value.fields["field"] == field
