"""The verb promote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.cli.conftest import Invoke
from tests.unit.reward.played import a_task
from tests.unit.rollout.runs import a_run, an_episode, left, write_run

from worldfork.core.errors import NotFound
from worldfork.lineage.asynchronous import AsyncSandbox


def test_the_best_diff_into_a_directory(invoke: Invoke, tmp_path: Path) -> None:
    directory, task, _ = a_run(tmp_path / "run")
    place = tmp_path / "repository"
    place.mkdir()
    (place / "a.py").write_text("old\n")
    told = invoke("promote", str(directory), "--to", str(place))
    assert told.exit_code == 2
    assert "choose one task" in told.stderr
    task_id = task.task_id
    result = invoke("promote", str(directory), "--to", str(place), "--task", task_id, "--dry-run", "--json")
    shape = json.loads(result.stdout)
    assert (shape["dry_run"], [each["path"] for each in shape["changes"]]) == (True, ["a.py"])
    assert (place / "a.py").read_text() == "old\n"
    result = invoke("promote", str(directory), "--to", str(place), "--task", task_id)
    assert result.exit_code == 0
    assert "a.py" in result.stdout
    assert (place / "a.py").read_text() != "old\n"
    again = invoke("promote", str(directory), "--to", str(place), "--task", task_id)
    assert (again.exit_code, "hunk 1" in again.stderr) == (2, True)


def test_one_place_and_a_rollout_that_is_there(invoke: Invoke, tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run")[0]
    assert "one place" in invoke("promote", str(directory)).stderr
    told = invoke("promote", str(directory), "--to", str(tmp_path), "--index", "77")
    assert (told.exit_code, "no such rollout" in told.stderr) == (2, True)


def test_one_policy_of_several_and_one_that_was_opened(invoke: Invoke, tmp_path: Path) -> None:
    task, place = a_task(), tmp_path / "repository"
    place.mkdir()
    (place / "a.py").write_text("old\n")
    run = write_run(
        tmp_path / "run",
        [
            an_episode(task, 0, 1.0, **left(tmp_path / "run", "best")),
            an_episode(task, 0, 0.5, policy_id="other", **left(tmp_path / "run", "worse")),
            an_episode(task, 0, 0.2, rollout_id="sb-aaaaaaaaaaaaaaaa", **left(tmp_path / "run", "opened")),
        ],
    )
    for chosen, content in ((["--policy", "other"], "worse"), (["--rollout", "sb-aaaaaaaaaaaaaaaa"], "opened")):
        assert invoke("promote", str(run), "--to", str(place), *chosen).exit_code == 0
        assert (place / "a.py").read_text() == f"{content}\n"
        (place / "a.py").write_text("old\n")


def test_a_dry_run_into_a_sandbox_looks_at_both(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"policy_id": "keeper", "final_snapshot_id": "sn-bbbbbbbbbbbbbbbb"}
    episodes = [an_episode(a_task(), 0, 1.0), an_episode(a_task(), 0, 1.0, **kept)]
    run = write_run(tmp_path / "run", episodes)
    asked: list[str] = []

    async def connect(sandbox: str) -> None:
        if sandbox != "there":
            raise NotFound("no such sandbox")

    async def get_snapshot(snapshot_id: str) -> None:
        asked.append(snapshot_id)

    monkeypatch.setattr(AsyncSandbox, "connect", connect)
    monkeypatch.setattr(AsyncSandbox, "get_snapshot", get_snapshot)
    line = ["promote", str(run), "--dry-run", "--sandbox"]
    assert invoke(*line, "there", "--policy", "keeper").exit_code == 0
    assert asked == ["sn-bbbbbbbbbbbbbbbb"]
    assert invoke(*line, "gone", "--policy", "keeper").exit_code != 0
    assert "was not kept" in invoke(*line, "there", "--policy", "played-1").stderr
