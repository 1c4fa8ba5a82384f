from __future__ import annotations

import itertools
from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.rollout.stopping import Prefix, StopRule


@pytest.mark.parametrize(
    ("rule", "rewards", "cut"),
    [
        (StopRule(), [1.0, 1.0, 1.0], None),
        (StopRule(successes=2), [1.0, 0.0, 1.0, 1.0], 3),
        (StopRule(successes=2), [1.0, 0.0, None, 0.9], None),
        (StopRule(successes=1, success_reward=0.5), [0.4, 0.5], 2),
        (StopRule(target_reward=0.7), [0.6, None, 0.7, 1.0], 3),
        (StopRule(no_variance=3), [0.2, None, 0.2, 0.2, 1.0], 4),
        (StopRule(no_variance=3), [0.2, 0.3, 0.3, 0.3, 0.3], None),
        (StopRule(successes=3, target_reward=1.0), [0.0, 1.0], 2),
    ],
)
def test_where_a_group_is_cut(rule: StopRule, rewards: list[float | None], cut: int | None) -> None:
    assert rule.cut(rewards) == cut
    prefix = Prefix(rule)
    for index, reward in enumerate(rewards):
        prefix.add(index, reward)
    assert prefix.cut == cut


def test_the_order_in_which_rollouts_end_changes_nothing() -> None:
    rewards: list[float | None] = [0.0, 1.0, None, 1.0, 1.0]
    for order in itertools.permutations(range(5)):
        prefix = Prefix(StopRule(successes=2))
        cuts = [prefix.add(index, rewards[index]) for index in order]
        assert prefix.cut == 4
        assert cuts.count(True) == 1
        assert [prefix.leaves_out(index) for index in range(5)] == [False, False, False, False, True]


class Reward(float):
    """Counts how often rewards are looked at."""

    looks = 0

    def __ge__(self, other: float) -> bool:
        Reward.looks += 1
        return float(self) >= other

    def __ne__(self, other: object) -> bool:
        Reward.looks += 1
        return float(self) != other

    __hash__ = float.__hash__


def test_a_long_group_looks_at_each_reward_a_few_times() -> None:
    """All of a resumed run's come at once, on the event loop."""
    prefix = Prefix(StopRule(successes=1, target_reward=1.0, no_variance=5_000))
    Reward.looks = 0
    for index in range(2_000):
        prefix.add(1_999 - index, Reward(0.25))
    assert prefix.cut is None
    assert prefix.counts(1_999)
    assert Reward.looks <= 5 * 2_000


@pytest.mark.parametrize(
    "options",
    [{"successes": 0}, {"successes": True}, {"no_variance": 1}, {"target_reward": 1.5}, {"success_reward": -1.0}],
)
def test_rules_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        StopRule(**options)
