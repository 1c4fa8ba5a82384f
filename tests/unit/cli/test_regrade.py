from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import Invoke

from worldfork.cli import regrade as verb
from worldfork.records.episode import Episode, Failure, FailureKind
from worldfork.rollout.journal import Journal
from worldfork.rollout.regrading import Regraded
from worldfork.rollout.stored import StoredRun


def an_episode(index: int, reward: float | None) -> Episode:
    failure = Failure(FailureKind.GRADING, "verifier", "odd") if reward is None else None
    return Episode("demo/one", "0" * 64, "p", index, reward, failure)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What grading again was asked, and `after` for what it gives."""
    found: dict[str, Any] = {"after": [1.0, 0.5]}

    async def grade_again(run: StoredRun, **options: Any) -> list[Regraded]:
        found.update(options)
        return [
            Regraded(before, an_episode(before.index, after))
            for before, after in zip(run.episodes, found["after"], strict=False)
        ]

    monkeypatch.setattr(verb, "grade_again", grade_again)
    return found


@pytest.fixture
def run(tmp_path: Path) -> str:
    with Journal.open(tmp_path / "episodes.jsonl") as journal:
        journal.append([an_episode(0, 0.5), an_episode(1, 0.5)])
    return str(tmp_path)


def test_what_changed_is_shown(asked: dict[str, Any], run: str, invoke: Invoke) -> None:
    result = invoke("regrade", run, "--verifier", "pytest", "--concurrency", "3")
    assert result.exit_code == 0
    assert "2 of 2 episodes have a reward now; of 2: mean reward 0.5000 before, 0.7500 now, 1 changed" in result.stdout
    assert (asked["verifier"], asked["concurrency"]) == ({"kind": "pytest"}, 3)


def test_what_is_left_out_is_told(asked: dict[str, Any], run: str, invoke: Invoke) -> None:
    asked["after"] = [1.0]
    result = invoke("regrade", run, "--verifier", "final")
    assert result.exit_code == 0
    assert "1 left out: what they left, or the final state, was not kept" in result.stderr


def test_as_json_and_with_faults(asked: dict[str, Any], run: str, invoke: Invoke) -> None:
    asked["after"] = [1.0, None]
    result = invoke("regrade", run, "--verifier", '{"kind": "files", "checks": []}', "--json")
    assert result.exit_code == 3
    assert [each["reward"] for each in json.loads(result.stdout)] == [1.0, None]
    assert asked["verifier"] == {"kind": "files", "checks": []}


@pytest.mark.parametrize("text", ["{", "{1}"])
def test_a_verifier_that_is_none(text: str, asked: dict[str, Any], run: str, invoke: Invoke) -> None:
    assert invoke("regrade", run, "--verifier", text).exit_code == 2


def test_no_run(asked: dict[str, Any], tmp_path: Path, invoke: Invoke) -> None:
    assert invoke("regrade", str(tmp_path / "none")).exit_code == 2


def test_where_nothing_can_be_graded_that_is_said(asked: dict[str, Any], run: str, invoke: Invoke) -> None:
    asked["after"] = []
    result = invoke("regrade", run)
    assert result.exit_code == 3
    assert "2 left out" in result.stderr
    assert "kept below" not in result.stdout
