from __future__ import annotations

import math

import pytest

from worldfork.core.errors import ConfigError
from worldfork.reward.advantages import GSPO_CLIP, clipped_surrogate, grpo, gspo, sequence_ratios


def test_a_ratio_is_the_geometric_mean_over_tokens() -> None:
    # Twice and half as likely, then twice and twice: 1 and 2, whatever the length.
    old = [[-1.0, -2.0], [-1.0, -2.0], [-3.0] * 4]
    step = math.log(2)
    new = [[-1.0 + step, -2.0 - step], [-1.0 + step, -2.0 + step], [-3.0 + step] * 4]
    assert list(sequence_ratios(new, old)) == pytest.approx([1.0, 2.0, 2.0], abs=1e-12)


def test_a_missing_or_empty_sequence() -> None:
    ratios = sequence_ratios([None, [-1.0], []], [[-1.0], None, []])
    assert math.isnan(ratios[0])
    assert math.isnan(ratios[1])
    assert ratios[2] == 1.0


def test_ratios_that_no_float_holds() -> None:
    assert list(sequence_ratios([[0.0], [-1e9]], [[-1e9], [0.0]])) == [math.inf, 0.0]


@pytest.mark.parametrize(
    ("new", "old"),
    [([[-1.0]], []), ([[-1.0]], [[-1.0, -2.0]]), ([[math.nan]], [[-1.0]]), ([[-1.0]], [[-math.inf]])],
)
def test_log_probabilities_that_do_not_match_are_refused(new: list[list[float]], old: list[list[float]]) -> None:
    with pytest.raises(ConfigError):
        sequence_ratios(new, old)


def test_the_smaller_of_free_and_clipped_counts() -> None:
    found = clipped_surrogate([1.0, 1.0, -1.0, -1.0, 0.0], [1.5, 0.5, 1.5, 0.5, math.inf], (0.2, 0.25))
    assert list(found.objectives) == pytest.approx([1.25, 0.5, -1.5, -0.8, 0.0])
    assert found.clipped == (True, False, False, True, False)


def test_what_has_no_reward_or_no_ratio_has_no_objective() -> None:
    found = clipped_surrogate([math.nan, 1.0, 0.0, 1.0], [1.0, math.nan, math.nan, 1.0])
    assert [math.isnan(each) for each in found.objectives] == [True, True, True, False]
    assert found.clipped == (False,) * 4


@pytest.mark.parametrize("clip", [(-0.1, 0.2), (1.0, 0.2), (0.2, -0.1), (0.2, math.inf), (math.nan, 0.2)])
def test_a_clip_that_makes_no_sense_is_refused(clip: tuple[float, float]) -> None:
    with pytest.raises(ConfigError):
        clipped_surrogate([1.0], [1.0], clip)


def test_as_many_ratios_as_advantages() -> None:
    with pytest.raises(ConfigError):
        clipped_surrogate([1.0], [1.0, 1.0])
    with pytest.raises(ConfigError):
        gspo([1.0], [[-1.0], [-1.0]], [[-1.0], [-1.0]])


def test_gspo_is_the_clipped_ratio_times_the_advantage_of_grpo() -> None:
    rewards, groups = [1.0, 0.0, None, 0.5, 0.5], ["a", "a", "a", "b", "b"]
    old = [[-1.0, -1.0], [-2.0], [-1.0], [-1.0], None]
    new = [[-0.9, -0.9], [-1.9], [-1.0], [-1.0], [-1.0]]
    found = gspo(rewards, new, old, groups)
    advantages = grpo(rewards, groups)
    assert list(found.advantages) == pytest.approx(list(advantages), nan_ok=True)
    low, high = GSPO_CLIP
    assert low < high
    assert found.objectives[0] == (1 + high) * advantages[0]
    assert found.objectives[1] == pytest.approx(math.exp(0.1) * advantages[1])
    assert found.clipped == (True, False, False, False, False)
    assert math.isnan(found.objectives[2])
    assert found.objectives[3] == 0.0
    assert math.isnan(found.objectives[4])
