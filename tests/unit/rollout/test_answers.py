"""Tasks whose tests a policy could rewrite."""

from __future__ import annotations

from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.records.task import Task
from worldfork.rollout.answers import check_tests

THERE = ("lib/a.py", "lib/test_inner.py", "tests/b_test.py", "tests/checks.py", "tests/test_a.py")


def task(**changes: Any) -> Task:
    return Task(**{"task_id": "t", "prompt": "", "hidden_tests": {"tests/test_new.py": ""}, **changes})


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, "lib/test_inner.py"),
        ({"test_args": ("-q", "tests")}, "tests/b_test.py"),
        ({"test_args": ("./tests/",)}, "tests/b_test.py"),
        ({"test_args": ("tests/test_a.py::test_x[a::b]",)}, "tests/test_a.py"),
        ({"test_args": ("tests/checks.py",)}, "tests/checks.py"),
        ({"test_args": ("tests/test_new.py",), "pass_to_pass": ("tests/test_a.py::test_x",)}, "tests/test_a.py"),
        ({"test_roots": ("tests",)}, "lib/test_inner.py"),
    ],
)
def test_a_test_that_is_editable_and_not_hidden_is_refused(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match="one of the tests and editable") as caught:
        check_tests(task(**changes), THERE, ["tests/test_new.py"])
    assert caught.value.fields["path"] == path


@pytest.mark.parametrize(
    ("changes", "tests"),
    [
        ({"test_args": ("-q", "tests/test_new.py")}, ["tests/test_new.py"]),
        ({"test_args": ("tests",), "test_roots": ("tests",)}, ["tests/test_new.py"]),
        ({"test_args": ("tests/test_a.py",)}, ["tests/test_a.py", "tests/test_new.py"]),
        ({"test_command": ("make", "test"), "reader": "tap"}, ["tests/test_new.py"]),
        ({"hidden_tests": {}, "verifier": {"kind": "files", "checks": []}}, []),
    ],
)
def test_tests_that_are_laid_down_or_not_run_are_none_of_them(changes: dict[str, Any], tests: list[str]) -> None:
    check_tests(task(**changes), THERE, tests)
