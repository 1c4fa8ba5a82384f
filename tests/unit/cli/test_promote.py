"""The verb promote."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.cli.conftest import Invoke
from tests.unit.rollout.runs import a_run


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
