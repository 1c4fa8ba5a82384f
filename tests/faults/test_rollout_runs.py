"""Open rollouts that are added to a run on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.faults.rolling import RIGHT, Forked, a_task, states

from worldfork.core.errors import ConfigError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.lineage.door import through
from worldfork.rollout.run_directory import RunDirectory
from worldfork.rollout.starts import StartingStates
from worldfork.rollout.stored import StoredRun
from worldfork.rollout.synchronous import Rollout

pytestmark = pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning")

SOLVE = f"printf '{RIGHT.strip()}\\n' > answer.txt"


@pytest.fixture
def starts(home: Path) -> StartingStates:
    return through(states)


def opened(starts: StartingStates, run: Path) -> Rollout:
    return Rollout.open(a_task(), starts=starts, verifier=Forked(), ttl_s=120, run=run)


def test_a_run_that_takes_no_episode_of_a_task_refuses_it_before_anybody_acts(
    starts: StartingStates, tmp_path: Path
) -> None:
    RunDirectory(tmp_path / "run").put_tasks([replace(a_task(), prompt="another of the same name")])
    (tmp_path / "file").write_text("")
    for run in (tmp_path / "run", tmp_path / "file"):
        with pytest.raises(ConfigError):
            opened(starts, run)
    assert through(AsyncSandbox.list) == []


def test_epochs_of_one_task_stand_beside_each_other(starts: StartingStates, tmp_path: Path) -> None:
    for line in (SOLVE, "true", SOLVE):
        with opened(starts, tmp_path) as rollout:
            rollout.sh(line)
            assert rollout.grade().rollout_id == rollout.rollout_id
    assert [each.reward for each in StoredRun(tmp_path).episodes] == [1.0, 0.0, 1.0]
