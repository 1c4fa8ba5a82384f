from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Callable

import pytest

from worldfork.core.errors import ConfigError
from worldfork.reward.advantages import aligned, dr_grpo, group_advantages, grpo, reinforce_baseline, rloo, validity

METHODS = [grpo, dr_grpo, rloo, reinforce_baseline]
Method = Callable[..., "array[float]"]
EACH = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)


def same(found: object, wanted: list[float]) -> bool:
    return list(found) == pytest.approx(wanted, abs=1e-12, nan_ok=True)  # type: ignore[call-overload]


def test_rewards_are_centred_on_their_mean() -> None:
    assert group_advantages([0.0, 0.5, 1.0, 0.5]) == [-0.5, 0.0, 0.5, 0.0]
    assert list(dr_grpo([0.0, 0.5, 1.0, 0.5])) == [-0.5, 0.0, 0.5, 0.0]


def test_failed_rollouts_stay_none_and_out_of_the_mean() -> None:
    assert group_advantages([None, 1.0, 0.0, None]) == [None, 0.5, -0.5, None]
    assert group_advantages([]) == []
    assert group_advantages([None, None]) == [None, None]


def test_rewards_and_their_mask_are_aligned() -> None:
    values = aligned([1, None, 0.25])
    assert (values.typecode, values.itemsize) == ("d", 8)
    assert same(values, [1.0, math.nan, 0.25])
    assert validity([1, None, 0.25]) == [True, False, True]


@EACH
@pytest.mark.parametrize("size", [1, 2, 3, 7, 32])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 0.98, 1.0])
def test_a_constant_group_is_exactly_zero(method: Method, reward: float, size: int) -> None:
    assert list(method([reward] * size)) == [0.0] * size
    # Beside a group that teaches something, in another order, and with a failure in it.
    rewards = [0.0, *[reward] * size, 1.0, None]
    groups = ["other", *["constant"] * size, "other", "constant"]
    found = list(method(rewards, groups))
    assert found[1 : size + 1] == [0.0] * size
    assert math.isnan(found[-1])
    assert found[0] == -found[size + 1] < 0


@EACH
def test_none_changes_nothing_but_its_own_place(method: Method) -> None:
    rewards = [0.2, 0.9, 0.4, 0.7]
    without = list(method(rewards))
    found = list(method([0.2, None, 0.9, 0.4, 0.7, None]))
    assert [found[0], *found[2:5]] == without
    assert math.isnan(found[1])
    assert math.isnan(found[5])
    assert [math.isnan(each) for each in method([None, None])] == [True, True]
    assert list(method([])) == []


@EACH
def test_groups_are_apart_in_any_order(method: Method) -> None:
    left, right = [0.0, 0.5, 1.0], [0.3, 0.1, 0.1]
    mixed = method([0.0, 0.3, 0.1, 0.5, 1.0, 0.1], ["l", "r", "r", "l", "l", "r"])
    if method is reinforce_baseline:  # of which only the centring is within a group
        assert same([mixed[0] + mixed[3] + mixed[4], mixed[1] + mixed[2] + mixed[5]], [0.0, 0.0])
        return
    assert [mixed[0], mixed[3], mixed[4]] == list(method(left))
    assert [mixed[1], mixed[2], mixed[5]] == list(method(right))


@EACH
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200, "0.5x", [1.0]])
def test_what_is_no_reward_is_refused(method: Method, bad: object) -> None:
    with pytest.raises(ConfigError):
        method([0.0, bad])


@EACH
def test_as_many_groups_as_rewards(method: Method) -> None:
    with pytest.raises(ConfigError):
        method([0.0, 1.0], ["one"])


def test_grpo_is_the_formula_of_its_paper() -> None:
    rewards = [0.1, 0.4, 0.4, 0.9, 1.0]
    mean = statistics.fmean(rewards)
    sample, population = statistics.stdev(rewards), statistics.pstdev(rewards)
    assert same(grpo(rewards, epsilon=0), [(each - mean) / sample for each in rewards])
    assert same(grpo(rewards, std="population", epsilon=0), [(each - mean) / population for each in rewards])
    assert same(grpo(rewards, epsilon=0.5), [(each - mean) / (sample + 0.5) for each in rewards])


def test_grpo_with_the_deviation_of_the_batch() -> None:
    rewards, groups = [0.0, 1.0, 0.5, 0.75], ["a", "a", "b", "b"]
    whole = statistics.stdev(rewards)
    wanted = [-0.5 / whole, 0.5 / whole, -0.125 / whole, 0.125 / whole]
    assert same(grpo(rewards, groups, scale="batch", epsilon=0), wanted)
    assert list(grpo([0.5, 0.5, 0.75, 0.75], groups, scale="batch", epsilon=0)) == [0.0] * 4


def test_words_and_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError):
        grpo([0.0, 1.0], std="bessel")
    with pytest.raises(ConfigError):
        grpo([0.0, 1.0], scale="all")
    for epsilon in (-1e-9, math.nan):
        with pytest.raises(ConfigError):
            grpo([0.0, 1.0], epsilon=epsilon)
        with pytest.raises(ConfigError):
            reinforce_baseline([0.0, 1.0], epsilon=epsilon)


def test_rloo_leaves_oneself_out() -> None:
    rewards = [0.1, 0.4, 0.4, 0.9]
    others = [statistics.fmean(rewards[:place] + rewards[place + 1 :]) for place in range(4)]
    assert same(rloo(rewards), [each - other for each, other in zip(rewards, others, strict=True)])
    assert list(rloo([0.25, 1.0])) == [-0.75, 0.75]


def test_reinforce_divides_by_the_deviation_of_the_whole_batch() -> None:
    rewards, groups = [0.0, 1.0, 0.5, 0.75], ["a", "a", "b", "b"]
    differences = [-0.5, 0.5, -0.125, 0.125]
    deviation = statistics.stdev(differences)
    assert same(reinforce_baseline(rewards, groups, epsilon=0), [each / deviation for each in differences])


def test_reinforce_by_tokens_counts_a_difference_once_for_each() -> None:
    differences = [-0.5] * 1 + [0.5] * 3
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    found = reinforce_baseline([0.0, 1.0], lengths=[1, 3], shift=True, epsilon=0)
    assert same(found, [(-0.5 - mean) / deviation, (0.5 - mean) / deviation])
    # A constant group beside it is pushed away from 0 by the shift, and by nothing else.
    rewards, groups = [0.0, 1.0, 0.5, 0.5], ["a", "a", "b", "b"]
    assert reinforce_baseline(rewards, groups, lengths=[1, 3, 2, 2], shift=True)[2] < 0
    assert reinforce_baseline(rewards, groups, lengths=[1, 3, 2, 2])[2] == 0.0
    for lengths in ([1], [1, -1]):
        with pytest.raises(ConfigError):
            reinforce_baseline([0.0, 1.0], lengths=lengths)


@EACH
def test_equal_tenths_do_not_become_noise(method: Method) -> None:
    # The mean of these is not the number itself, by one bit: an advantage of about 1 if divided by its deviation.
    assert list(method([0.7] * 10)) == [0.0] * 10
    assert all(abs(each) < 1e-9 for each in method([0.1 + 0.2, 0.3, 0.3]) if method is not reinforce_baseline)


@pytest.mark.parametrize("std", ["sample", "population"])
def test_rewards_that_differ_by_next_to_nothing_have_a_deviation(std: str) -> None:
    wide = list(grpo([1.0, 2.0, 0.0], std=std, epsilon=0))
    assert same(grpo([1e-200, 2e-200, 0.0], std=std, epsilon=0), wide)
    assert same(grpo([1e149, 2e149, 0.0], std=std, epsilon=0), wide)


def test_what_has_no_variance_by_tokens_is_not_divided() -> None:
    assert list(reinforce_baseline([0.0, 1.0], lengths=[5, 0], epsilon=0)) == [-0.5, 0.5]


@EACH
def test_text_is_no_reward(method: Method) -> None:
    with pytest.raises(ConfigError, match="is no number"):
        method(["1.0", 0.0])
