from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.reward.played import a_task

from worldfork.core.errors import ConfigError
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.choosing import KINDS, verifier_for

CHECKS = [{"path": "a"}]
SPECS: dict[str, dict[str, Any]] = {
    "auto": {},
    "pytest": {},
    "split": {},
    "command": {"command": ["true"]},
    "files": {"checks": CHECKS},
    "final": {"services": [["serve"]], "ready": ["ask"], "ready_wall_s": 5, "command": ["judge"], "answer": "stdout"},
    "score": {"function": "math:fsum"},
    "weighted": {"parts": {"a": {"weight": 2, "verifier": {"kind": "files", "checks": CHECKS}}}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_made(tmp_path: Path, kind: str) -> None:
    spec = {"kind": kind, **SPECS[kind]}
    store = CalibrationStore(tmp_path)
    made = verifier_for(a_task(verifier=spec), store)
    assert made.verifier_id.partition(":")[0] == kind
    assert made.verifier_id == verifier_for(spec, store).verifier_id
    assert made.needs_end is (made.trust == "final") is (kind in ("files", "final", "weighted"))


def test_a_task_that_names_none_has_the_strongest_that_fits(tmp_path: Path) -> None:
    assert verifier_for(a_task(), CalibrationStore(tmp_path)).verifier_id.startswith("auto:")


def test_a_callable_grades_in_the_place_of_any(tmp_path: Path) -> None:
    made = verifier_for(a_task(), CalibrationStore(tmp_path), score=lambda case: 1.0)
    assert made.verifier_id.startswith("score:")


def test_another_question_is_another_verifier(tmp_path: Path) -> None:
    store = CalibrationStore(tmp_path)
    ids = [
        verifier_for(spec, store).verifier_id
        for spec in (
            {"kind": "command", "command": ["true"]},
            {"kind": "command", "command": ["false"]},
            {"kind": "command", "command": ["true"], "answer": "stdout"},
            {"kind": "files", "checks": [{"path": "a"}]},
            {"kind": "files", "checks": [{"path": "a", "equals": "x"}]},
            {"kind": "final"},
            {"kind": "final", "services": [["a"]]},
        )
    ]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": "magic"},
        {"kind": ["pytest"]},
        {"kind": "pytest", "speed": 1},
        {"kind": "command"},
        {"kind": "command", "command": []},
        {"kind": "command", "command": "true"},
        {"kind": "command", "command": ["true"], "answer": "file:"},
        {"kind": "command", "command": ["true"], "answer": 3},
        {"kind": "files"},
        {"kind": "files", "checks": []},
        {"kind": "files", "checks": {"path": "a"}},
        {"kind": "files", "checks": ["a"]},
        {"kind": "files", "checks": [{"equals": "x"}]},
        {"kind": "files", "checks": [{"path": "a", "size": 1}]},
        {"kind": "files", "checks": [{"path": "a", "matches": "("}]},
        {"kind": "files", "checks": [{"path": "a", "mode": "999"}]},
        {"kind": "files", "checks": [{"path": "a", "kind": "door"}]},
        {"kind": "files", "checks": [{"path": "a", "weight": 0}]},
        {"kind": "files", "checks": [{"path": "a", "sha256": "x"}]},
        {"kind": "files", "checks": [{"path": "a", "json": {"x": 1}}]},
        {"kind": "files", "checks": [{"path": "a", "json": [1]}]},
        {"kind": "final", "services": "serve"},
        {"kind": "final", "services": [[]]},
        {"kind": "final", "ready_wall_s": 0},
        {"kind": "score"},
        {"kind": "score", "function": "math"},
        {"kind": "weighted"},
        {"kind": "weighted", "parts": {}},
        {"kind": "weighted", "parts": {"a": {}}},
        {"kind": "weighted", "parts": {"a": {"verifier": {"kind": "magic"}}}},
    ],
)
def test_what_is_malformed_is_refused(tmp_path: Path, spec: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        verifier_for(spec, CalibrationStore(tmp_path))
