from __future__ import annotations

import json
from pathlib import Path

from tests.unit.cli.conftest import Invoke
from tests.unit.rollout.runs import a_run


def test_the_short_form_and_the_page(invoke: Invoke, tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run")[0]
    result = invoke("report", str(directory))
    assert result.exit_code == 0
    assert "8 rollouts of 2 tasks" in result.stdout
    assert "failures: fork 1" in result.stdout
    assert (directory / "report.html").read_text().startswith("<!doctype html>")


def test_figures_as_json_and_no_page(invoke: Invoke, tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run")[0]
    result = invoke("report", str(directory), "--json", "--no-page")
    told = json.loads(result.stdout)
    assert (told["full_n"], told["failures"], len(told["groups"])) == (1, {"fork": 1}, 2)
    assert not (directory / "report.html").exists()


def test_no_run(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("report", str(tmp_path)).exit_code == 2
