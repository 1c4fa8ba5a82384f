from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from worldfork.cli import demo_world
from worldfork.cli.demo_rollouts import PLAIN_RUNNER
from worldfork.cli.demo_world import FIRST_CONFIG, MAKE_STATE, READ_STATE, WorldFacts, survivors
from worldfork.rollout.demo_task import DEMO_REWARDS, demo_candidates, demo_task


def state(**changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "packages": {"pytest": "9.0"},
        "data": "aa",
        "embeddings": {"shape": [1000, 128], "digest": "bb"},
        "checkpoint": {"step-0100/optimizer.json": "c", "step-0100/state.json": "d", "step-0100/weights.bin": "e"},
        "config": {**FIRST_CONFIG, "learning_rate": 0.0003},
    }
    return {**facts, **changes}


def broken(restored: dict[str, Any], built: dict[str, Any] | None = None) -> list[str]:
    facts = WorldFacts(("pytest",), from_registry=True, state=built or state())
    found = survivors(facts, restored)
    assert len(found) == 5
    return [thing.name for thing in found if not thing.ok]


def test_all_five_come_back() -> None:
    assert broken(state()) == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"packages": {"pytest": None}}, "installed packages"),
        ({"data": None}, "fetched file"),
        ({"embeddings": {"shape": [1000, 128], "digest": "zz"}}, "generated embeddings"),
        ({"checkpoint": {}}, "checkpoint directory"),
        ({"config": FIRST_CONFIG}, "changed configuration"),
        ({"config": None}, "changed configuration"),
    ],
)
def test_each_loss_is_seen(changes: dict[str, Any], name: str) -> None:
    assert broken(state(**changes)) == [name]


def test_what_was_never_built_does_not_count_as_come_back() -> None:
    empty = state(data=None, embeddings={"shape": None, "digest": None}, checkpoint={}, config=FIRST_CONFIG)
    assert len(broken(empty, empty)) == 4


def run_inside(directory: Path, program: str, *arguments: str) -> str:
    """Run a sandbox's program here, with the directory in the place of /workspace and no third-party package."""
    text = program.replace('"/workspace"', repr(str(directory)))
    line = [sys.executable, "-S", "-c", text, *arguments]
    return subprocess.run(line, cwd=directory, check=True, capture_output=True, text=True, timeout=60).stdout


def test_the_standard_library_alone_makes_the_whole_state(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIRST_CONFIG))
    run_inside(tmp_path, MAKE_STATE)
    made = json.loads(run_inside(tmp_path, READ_STATE))
    assert made["embeddings"]["shape"] == [1000, 128]
    assert broken(made | {"packages": {"pytest": "9.0"}}, made | {"packages": {"pytest": "9.0"}}) == []
    (tmp_path / "config.json").write_text(json.dumps(FIRST_CONFIG))
    run_inside(tmp_path, MAKE_STATE)
    assert json.loads(run_inside(tmp_path, READ_STATE)) == made


def test_what_pytest_needs_is_named() -> None:
    assert {"pytest", "pluggy", "iniconfig", "packaging"} <= set(demo_world.PYTEST_PARTS)


def test_the_plain_loop_gives_the_known_rewards(tmp_path: Path) -> None:
    task = demo_task()
    rewards = []
    for name, files in demo_candidates().items():
        place = tmp_path / name
        place.mkdir()
        for path, text in {**task.files, **files, **task.hidden_tests}.items():
            (place / path).write_text(text)
        ended = json.loads(run_inside(place, PLAIN_RUNNER, *task.hidden_tests))
        rewards.append(sum(ended.values()) / 3)
    assert rewards == pytest.approx(list(DEMO_REWARDS))
