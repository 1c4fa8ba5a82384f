from __future__ import annotations

import json
import math
from typing import Any

import pytest

from worldfork.core.errors import ConfigError, FormatUnsupported
from worldfork.records.episode import Episode, Failure, FailureKind, Timings, ranked


def scored(**changes: Any) -> Episode:
    values: dict[str, Any] = {
        "task_id": "set/one",
        "task_hash": "ab" * 32,
        "policy_id": "nop",
        "index": 3,
        "reward": 0.5,
        "parts": {"fraction": 0.5},
        "expected": ("t::a", "t::b"),
        "passed": ("t::a",),
        "failed": ("t::b",),
        "notes": ("the tests ended as timed_out",),
        "timings": Timings(fork_s=0.004, total_s=0.3),
        "snapshot_id": "sn-aaaaaaaaaaaaaaaa",
    }
    return Episode(**{**values, **changes})


def test_a_scored_episode_survives_json() -> None:
    episode = scored()
    assert Episode.from_json(json.loads(json.dumps(episode.to_json()))) == episode
    assert episode.key == ("ab" * 32, "nop", 3, "")


def test_a_failed_episode_survives_json() -> None:
    episode = scored(reward=None, failure=Failure(FailureKind.FORK, "launch_failed", "no room"))
    data = json.loads(json.dumps(episode.to_json()))
    assert data["failure"] == {"kind": "fork", "code": "launch_failed", "message": "no room"}
    assert Episode.from_json(data) == episode


@pytest.mark.parametrize("reward", [-0.1, 1.1, math.nan, math.inf])
def test_a_reward_is_between_0_and_1(reward: float) -> None:
    with pytest.raises(ConfigError):
        scored(reward=reward)


def test_reward_or_failure_and_never_both() -> None:
    with pytest.raises(ConfigError):
        scored(reward=None)
    with pytest.raises(ConfigError):
        scored(failure=Failure(FailureKind.GRADING, "verifier", ""))


def test_fields_of_later_versions_are_left_out() -> None:
    assert Episode.from_json({**scored().to_json(), "colour": "red"}) == scored()


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(FormatUnsupported):
        Episode.from_json({**scored().to_json(), "format": 2})


@pytest.mark.parametrize(
    "changes",
    [
        {"format": None},
        {"format": "1"},
        {"timings": {"nap_s": 1}},
        {"timings": 3},
        {"passed": 3},
        {"reward": None},
        {"reward": None, "failure": {"kind": "weather", "code": "", "message": ""}},
        {"reward": None, "failure": {}},
        {"reward": "high"},
    ],
)
def test_what_is_no_episode(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Episode.from_json({**scored().to_json(), **changes})
    data = scored().to_json()
    del data["task_id"]
    with pytest.raises(ConfigError):
        Episode.from_json(data)


def test_the_best_is_the_first_of_equal_ones_and_no_reward_is_less_than_none() -> None:
    failure = Failure(FailureKind.FORK, "launch_failed", "no room")
    rewards = {4: 0.5, 0: None, 3: 0.0, 2: 1.0, 1: 1.0}
    episodes = [
        scored(index=index, reward=reward, failure=failure if reward is None else None)
        for index, reward in rewards.items()
    ]
    assert [each.index for each in ranked(episodes)] == [1, 2, 4, 3, 0]
