from __future__ import annotations

import json
from pathlib import Path

from tests.unit.cli.conftest import Invoke
from tests.unit.rollout.runs import a_run


def test_rows_go_to_standard_output_or_to_a_file(invoke: Invoke, tmp_path: Path) -> None:
    directory = str(a_run(tmp_path / "run")[0])
    result = invoke("export-episodes", directory, "--select", "correct")
    assert result.exit_code == 0
    assert [json.loads(line)["index"] for line in result.stdout.splitlines()] == [1]
    target = tmp_path / "rows.jsonl"
    result = invoke("export-episodes", directory, "--chat", "--dedupe", "-o", str(target))
    assert (result.exit_code, result.stdout) == (0, "")
    assert "messages" in json.loads(target.read_text().splitlines()[0])


def test_pairs(invoke: Invoke, tmp_path: Path) -> None:
    directory = str(a_run(tmp_path / "run")[0])
    result = invoke("export-episodes", directory, "--pairs", "1")
    assert [json.loads(line)["score_chosen"] for line in result.stdout.splitlines()] == [1.0]
    assert invoke("export-episodes", directory, "--pairs", "1", "--chat").exit_code == 2


def test_what_cannot_be_written_is_told(invoke: Invoke, tmp_path: Path) -> None:
    assert invoke("export-episodes", str(tmp_path)).exit_code == 2
    directory = str(a_run(tmp_path / "run")[0])
    assert invoke("export-episodes", directory, "--format", "parquet").exit_code == 2
    assert invoke("export-episodes", directory, "-o", str(tmp_path / "absent" / "x")).exit_code == 2
