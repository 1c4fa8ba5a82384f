from __future__ import annotations

import itertools
import math

import pytest

from worldfork.core.errors import ConfigError
from worldfork.reward.advantages import (
    best_of_n,
    dynamic_sampling,
    pass_at_k,
    pass_at_k_of_groups,
    raft,
    rft,
)


def test_groups_that_are_all_right_or_all_wrong_are_dropped() -> None:
    rewards = [1.0, 0.0, None, 1.0, 1.0, 0.0, 0.0]
    groups = ["mixed", "mixed", "mixed", "right", "right", "wrong", "wrong"]
    assert dynamic_sampling(rewards, groups) == [True, True, False, False, False, False, False]


def test_one_reward_and_a_failure_teach_nothing() -> None:
    assert dynamic_sampling([1.0, None]) == [False, False]
    assert dynamic_sampling([None, None]) == [False, False]
    assert dynamic_sampling([]) == []


def test_what_counts_as_right_decides() -> None:
    assert dynamic_sampling([0.2, 0.4]) == [True, True]
    assert dynamic_sampling([0.2, 0.4], correct=1.0) == [False, False]
    assert dynamic_sampling([0.2, 1.0], correct=1.0) == [True, True]
    assert dynamic_sampling([1.0, 1.0], correct=1.0) == [False, False]


def test_the_best_of_each_group_is_the_first_of_equals() -> None:
    rewards = [0.5, None, 0.9, 0.9, None, 0.1]
    groups = ["a", "a", "a", "a", "none", "b"]
    assert best_of_n(rewards, groups) == [2, 5]
    assert best_of_n(rewards, groups, at_least=0.5) == [2]
    assert best_of_n([]) == []


def test_raft_keeps_some_of_each_group() -> None:
    rewards = [0.1, 0.8, None, 0.8, 0.3]
    assert raft(rewards, keep=2) == [1, 3]
    assert raft(rewards, keep=9) == [1, 3, 4, 0]
    assert raft(rewards, keep=9, at_least=0.3) == [1, 3, 4]
    with pytest.raises(ConfigError):
        raft(rewards, keep=0)


def test_rft_keeps_all_that_are_right_and_equal_answers_once() -> None:
    rewards = [1.0, 0.99, 1.0, 1.0, None, 1.0]
    groups = ["a", "a", "a", "a", "a", "b"]
    assert rft(rewards, groups) == [0, 2, 3, 5]
    assert rft(rewards, groups, answers=["x", "x", "y", "x", "z", "x"]) == [0, 2, 5]
    assert rft(rewards, groups, keep=1) == [0, 5]
    assert rft(rewards, groups, correct=0.9) == [0, 1, 2, 3, 5]
    for wrong in ({"answers": ["x"]}, {"keep": 0}, {"correct": math.nan}):
        with pytest.raises(ConfigError):
            rft(rewards, groups, **wrong)  # type: ignore[arg-type]


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    for samples in range(1, 7):
        for correct in range(samples + 1):
            for k in range(1, samples + 1):
                draws = list(itertools.combinations(range(samples), k))
                share = sum(any(one < correct for one in draw) for draw in draws) / len(draws)
                assert pass_at_k(samples, correct, k) == pytest.approx(share, abs=1e-15)


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    assert pass_at_k(100_000, 1, 50_000) == 0.5
    assert pass_at_k(100_000, 0, 50_000) == 0.0
    assert pass_at_k(100_000, 100_000, 1) == 1.0


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_pass_at_k_of_too_few_samples_is_refused(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ConfigError):
        pass_at_k(samples, correct, k)


def test_failed_rollouts_are_no_samples() -> None:
    rewards = [1.0, None, 0.0, 1.0, None]
    groups = ["a", "a", "a", "b", "b"]
    found = pass_at_k_of_groups(rewards, groups, k=2)
    assert found["a"] == 1.0
    assert math.isnan(found["b"])
    assert pass_at_k_of_groups(rewards, groups, k=1) == {"a": 0.5, "b": 1.0}
    assert pass_at_k_of_groups([0.5, 1.0], k=1, correct=0.5) == {None: 1.0}
    with pytest.raises(ConfigError):
        pass_at_k_of_groups(rewards, groups, k=0)
