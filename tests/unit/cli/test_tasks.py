from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.unit.cli.conftest import Invoke

from worldfork.cli import tasks as module
from worldfork.records.task import Task
from worldfork.rollout.checking import TaskCheck
from worldfork.rollout.demo_task import demo_task


class PlayedStates:
    @classmethod
    async def open(cls, world: object) -> PlayedStates:
        return cls()

    async def get(self, task: Task) -> object:
        raise AssertionError


class PlayedChecker:
    """Stands where `Checker` does."""

    fit: Sequence[bool] = (True,)
    asked: dict[str, Any]
    proof: ClassVar[dict[str, Any]] = {"split": True}

    def __init__(self, start_of: object, calibrations: object, spec: dict[str, str] | None) -> None:
        type(self).asked = {"spec": spec}

    async def check_all(
        self, tasks: Sequence[Task], times: int, on_check: Callable[[TaskCheck], None]
    ) -> list[TaskCheck]:
        type(self).asked |= {"tasks": [task.task_id for task in tasks], "times": times}
        found = [
            TaskCheck(
                task.task_id,
                task.task_hash,
                fit,
                "" if fit else "it is worth 1 without any change",
                "auto:12",
                **self.proof,
                reference=(1.0, 1.0),
                nop=(0.0, 0.5),
                expected=("a", "b"),
                nop_passes=("a",),
                unmet=("z",),
                tight={"grade_wall_s": 120.5},
                cpu_s=0.5,
            )
            for task, fit in zip(tasks, self.fit, strict=True)
        ]
        for each in found:
            on_check(each)
        return found


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Checker", PlayedChecker)
    monkeypatch.setattr(module, "StartingStates", PlayedStates)
    monkeypatch.setattr(module, "home_calibrations", object)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    whole = demo_task().to_json()
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({**whole, "task_id": name}) + "\n" for name in ("one", "two")))
    return path


@pytest.mark.parametrize(("fit", "code"), [((True, True), 0), ((True, False), 3), ((False, False), 1)])
def test_the_exit_code_says_how_many_are_fit(
    invoke: Invoke, two: Path, monkeypatch: pytest.MonkeyPatch, fit: tuple[bool, ...], code: int
) -> None:
    monkeypatch.setattr(PlayedChecker, "fit", fit)
    result = invoke("tasks", "check", str(two))
    assert result.exit_code == code
    assert f"2 tasks: {sum(fit)} are fit" in result.stdout
    assert ("without any change" in result.stdout) is (not all(fit))
    assert "auto: split" in result.stdout
    assert "one: its reference takes 120.5 s, more than a third of grade_wall_s: raise it\n" in result.stdout
    assert "cannot be split" not in result.stdout
    assert PlayedChecker.asked == {"spec": None, "tasks": ["one", "two"], "times": 3}


def test_a_task_that_is_judged_by_less_says_so_and_why(
    invoke: Invoke, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlayedChecker, "fit", (True, True))
    monkeypatch.setattr(PlayedChecker, "proof", {"split": False, "split_why": "they see more"})
    result = invoke("tasks", "check", str(two))
    assert "auto: pytest" in result.stdout
    assert "one: judged by pytest, in one process with the code under test" in result.stdout
    assert "cannot be split: they see more" in result.stdout


def test_one_task_by_one_verifier_as_json(invoke: Invoke, two: Path) -> None:
    result = invoke("tasks", "check", str(two), "--task", "two", "-k", "5", "--verifier", "split", "--json")
    (found,) = json.loads(result.stdout)
    assert (found["task_id"], found["nop"], found["unmet"], found["fit"]) == ("two", [0.0, 0.5], ["z"], True)
    assert PlayedChecker.asked == {"spec": {"kind": "split"}, "tasks": ["two"], "times": 5}


def test_a_task_that_is_not_there(invoke: Invoke, two: Path) -> None:
    assert invoke("tasks", "check", str(two), "--task", "three").exit_code == 2


@pytest.mark.parametrize(
    ("text", "spec"),
    [("pytest", {"kind": "pytest"}), ('{"kind": "files", "checks": []}', {"kind": "files", "checks": []})],
)
def test_a_verifier_may_be_named_whole(
    invoke: Invoke, two: Path, monkeypatch: pytest.MonkeyPatch, text: str, spec: dict[str, Any]
) -> None:
    monkeypatch.setattr(PlayedChecker, "fit", (True, True))
    assert invoke("tasks", "check", str(two), "--verifier", text).exit_code == 0
    assert PlayedChecker.asked["spec"] == spec


class Look:
    """What looking for leaks found."""

    def __init__(self, certain: bool, complete: bool) -> None:
        self.certain, self.complete = certain, complete


@pytest.mark.parametrize(
    ("found", "code"), [([(False, True)], 0), ([(False, True), (False, False)], 3), ([(True, False)], 1)]
)
def test_worlds_that_were_not_looked_through_are_no_clean_ones(
    invoke: Invoke, two: Path, monkeypatch: pytest.MonkeyPatch, found: list[tuple[bool, bool]], code: int
) -> None:
    async def look(*_: object) -> list[Look]:
        return [Look(*each) for each in found]

    # Behind the verb of the same name.
    module = importlib.import_module("worldfork.cli.leaks")
    monkeypatch.setattr(module, "_look", look)
    monkeypatch.setattr(module, "to_json", lambda report: report.complete)
    assert invoke("tasks", "leaks", str(two), "--json").exit_code == code
