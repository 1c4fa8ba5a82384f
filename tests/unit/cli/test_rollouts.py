from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli import played
from tests.unit.cli.conftest import Invoke

from worldfork.cli import rollouts
from worldfork.records.episode import Episode, Failure, FailureKind
from worldfork.records.task import Task
from worldfork.rollout.demo_task import demo_task
from worldfork.rollout.journal import Journal
from worldfork.rollout.policies import Policy
from worldfork.rollout.stopping import ENOUGH


class PlayedRuns:
    """Stands where `run_rollouts` does: the reward of rollout i is the i-th of `rewards`."""

    def __init__(self) -> None:
        self.rewards: list[float | None] = [1.0]
        self.asked: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.error: OSError | None = None
        self.failure = Failure(FailureKind.FORK, "launch_failed", "no room")

    async def run(
        self,
        tasks: Sequence[Task],
        policy: Policy,
        *,
        n: int,
        world: object,
        concurrency: int | None,
        journal: Journal | None,
        on_episode: Callable[[Episode], None],
        **options: Any,
    ) -> list[Episode]:
        self.asked = {"tasks": [task.task_id for task in tasks], "policy": policy.policy_id, "n": n, "world": world}
        self.asked["concurrency"] = concurrency
        self.options = options
        if self.error is not None:
            raise self.error
        episodes = [
            Episode(
                task_id=task.task_id,
                task_hash=task.task_hash,
                policy_id=policy.policy_id,
                index=index,
                reward=reward,
                failure=self.failure if reward is None else None,
                expected=("t::a", "t::b"),
                passed=() if not reward else ("t::a", "t::b"),
            )
            for task in tasks
            for index, reward in enumerate(self.rewards[:n])
        ]
        for episode in episodes:
            on_episode(episode)
        if journal is not None:
            journal.append(episodes)
        return episodes


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, library: type[played.PlayedSandbox]) -> PlayedRuns:
    found = PlayedRuns()
    monkeypatch.setattr(rollouts, "run_rollouts", found.run)
    return found


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    other = {**demo_task().to_json(), "task_id": "demo/other", "prompt": "Another."}
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(data) for data in (demo_task().to_json(), other)))
    return str(path)


def test_episodes_as_json(runs: PlayedRuns, invoke: Invoke, tasks: str) -> None:
    result = invoke("rollout", tasks, "--policy", "nop", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert [(each["task_id"], each["reward"]) for each in found] == [("demo/median", 1.0), ("demo/other", 1.0)]
    assert runs.asked["n"] == 1


def test_options_are_passed_on(runs: PlayedRuns, invoke: Invoke, tasks: str) -> None:
    line = ["--policy", "reference", "--n", "4", "--concurrency", "2", "--task", "demo/other"]
    assert invoke("rollout", tasks, *line).exit_code == 0
    assert runs.asked == {
        "tasks": ["demo/other"],
        "policy": "reference",
        "n": 4,
        "world": None,
        "concurrency": 2,
    }


def test_a_table_of_groups(runs: PlayedRuns, invoke: Invoke, tasks: str) -> None:
    runs.rewards = [0.0, 1.0]
    result = invoke("rollout", tasks, "--policy", "nop", "-n", "2")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[1] == ["demo/median", "2", "0.500", "0.00", "to", "1.00", "2/2", "0", "0"]
    assert "4 rollouts" in result.stdout
    assert "mean reward 0.5000, 2 with 1.0, 0 failed" in result.stdout


def test_a_failed_rollout_is_told_and_ends_with_3(runs: PlayedRuns, invoke: Invoke, tasks: str) -> None:
    runs.rewards = [None]
    result = invoke("rollout", tasks, "--policy", "nop", "--task", "demo/median")
    assert result.exit_code == 3
    assert result.stderr == "worldfork: demo/median rollout 0 failed (fork): no room\n"
    assert "no reward, 1 failed" in result.stdout


def test_what_a_stop_rule_cut_off_is_stopped_and_did_not_fail(runs: PlayedRuns, invoke: Invoke, tasks: str) -> None:
    runs.rewards, runs.failure = [1.0, None, None], Failure(FailureKind.STOPPED, ENOUGH, "the group's stop rule held")
    line = ["rollout", tasks, "--policy", "nop", "-n", "3", "--task", "demo/median", "--successes", "1"]
    result = invoke(*line)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [row.split() for row in result.stdout.splitlines()]
    assert (rows[0][-2:], rows[1][-2:]) == (["failed", "stopped"], ["0", "2"])
    assert "mean reward 1.0000, 1 with 1.0, 0 failed, 2 stopped\n" in result.stdout
    found = json.loads(invoke(*line, "--json").stdout)
    assert [each["failure"] and each["failure"]["kind"] for each in found] == [None, "stopped", "stopped"]


def test_what_a_deadline_cut_off_is_stopped_and_ends_with_3(runs: PlayedRuns, invoke: Invoke, tasks: str) -> None:
    runs.rewards, runs.failure = [None], Failure(FailureKind.STOPPED, "deadline", "the time of the run is over")
    result = invoke("rollout", tasks, "--policy", "nop", "--task", "demo/median", "--deadline", "1")
    assert result.exit_code == 3
    assert result.stderr == "worldfork: demo/median rollout 0 was stopped (deadline): the time of the run is over\n"
    assert "no reward, 0 failed, 1 stopped\n" in result.stdout


def test_a_run_is_not_written_over(runs: PlayedRuns, invoke: Invoke, tasks: str, tmp_path: Path) -> None:
    line = ["rollout", tasks, "--policy", "nop", "--run", str(tmp_path / "run")]
    assert invoke(*line).exit_code == 0
    assert (tmp_path / "run" / "episodes.jsonl").is_file()
    again = invoke(*line)
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    assert invoke(*line, "--resume").exit_code == 0


def test_a_disk_that_is_full_is_an_error_of_the_store(
    runs: PlayedRuns, invoke: Invoke, tasks: str, tmp_path: Path
) -> None:
    runs.error = OSError(28, "No space left on device")
    result = invoke("rollout", tasks, "--policy", "nop", "--run", str(tmp_path / "run"))
    assert result.exit_code == 10
    assert "No space left on device" in result.stderr


@pytest.mark.parametrize(
    "more",
    [
        ["--policy", "none-such"],
        ["--policy", "candidates:/no/such/directory"],
        ["--policy", "nop", "--resume"],
        ["--policy", "nop", "--task", "demo/none-such"],
        [],
    ],
)
def test_what_cannot_be_meant_ends_with_2(runs: PlayedRuns, invoke: Invoke, tasks: str, more: list[str]) -> None:
    assert invoke("rollout", tasks, *more).exit_code == 2
    assert runs.asked == {}


def test_a_missing_file_is_named(runs: PlayedRuns, invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("rollout", str(tmp_path / "none.jsonl"), "--policy", "nop", "--json")
    assert result.exit_code == 2
    assert "none.jsonl" in json.loads(result.stderr)["error"]["message"]


@pytest.mark.parametrize("more", [["--concurrency", "5000"], ["--verifier", "none-such"], ["--seeds", "odd"]])
def test_what_cannot_be_meant_makes_no_run(
    runs: PlayedRuns, invoke: Invoke, tasks: str, tmp_path: Path, more: list[str]
) -> None:
    assert invoke("rollout", tasks, "--policy", "nop", "--run", str(tmp_path / "run"), *more).exit_code == 2
    assert not (tmp_path / "run").exists()
