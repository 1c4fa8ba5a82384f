from __future__ import annotations

import math

import pytest

from worldfork.core.errors import ConfigError
from worldfork.reward.advantages import group_advantages


def test_rewards_are_centred_on_their_mean() -> None:
    assert group_advantages([0.0, 0.5, 1.0, 0.5]) == [-0.5, 0.0, 0.5, 0.0]


def test_failed_rollouts_stay_none_and_out_of_the_mean() -> None:
    assert group_advantages([None, 1.0, 0.0, None]) == [None, 0.5, -0.5, None]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 0.98, 1.0])
def test_a_constant_group_is_exactly_zero(reward: float, size: int) -> None:
    assert group_advantages([reward] * size) == [0.0] * size


def test_groups_without_any_reward() -> None:
    assert group_advantages([]) == []
    assert group_advantages([None, None]) == [None, None]


def test_whole_numbers_become_floats() -> None:
    assert all(isinstance(each, float) for each in group_advantages([1, 0, 1]))


def test_advantages_sum_to_nothing() -> None:
    advantages = [each for each in group_advantages([k / 7 for k in range(8)]) if each is not None]
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ConfigError):
        group_advantages([0.0, bad])
