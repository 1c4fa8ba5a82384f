"""Advantages against a baseline of the own group: GRPO, Dr. GRPO, RLOO, and REINFORCE++ with a baseline."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Sequence

from worldfork.core.errors import ConfigError
from worldfork.reward.advantages.rewards import centred, checked, choose, deviation_of, members_of, missing


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """Centre the rewards of one group on their mean: `dr_grpo` with None where the reward is None.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed.

    Returns:
        As long as `rewards`, float64; None where the reward is None. A None is left out of the mean.
        Exactly 0.0 everywhere else if all scored rewards are equal, or if there is only one.

    Raises:
        ConfigError: a reward is NaN or infinite.

    Source: as of `dr_grpo`.
    """
    return [None if math.isnan(advantage) else advantage for advantage in dr_grpo(rewards)]


def grpo(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable] | None = None,
    *,
    std: str = "sample",
    scale: str = "group",
    epsilon: float = 1e-6,
) -> array[float]:
    """Centre rewards on their group's mean and divide by a standard deviation.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed.
        groups: the group of each; without it all are one.
        std: "sample" divides by n - 1 under the root, as TRL and verl do; "population" by n.
        scale: whose deviation divides: the "group"'s, or the whole "batch"'s.
        epsilon: added to the deviation; verl has 1e-6, TRL 1e-4, the paper none.

    Returns:
        As long as `rewards`, float64, unitless; NaN where the reward is None. Exactly 0.0 in a group whose rewards
        are all equal, one of a single reward among them (verl gives that one its bare reward instead).

    Raises:
        ConfigError: a reward or `epsilon` is not finite, a word is unknown, or there are not as many groups.

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2. Batch deviation: Liu et al. 2025,
    "Part I: Tricks or Traps?", arXiv:2508.08221, as TRL's `scale_rewards="batch"`.
    """
    choose(std, "std", ("sample", "population"))
    choose(scale, "scale", ("group", "batch"))
    if checked(epsilon, "epsilon") < 0:
        raise ConfigError(f"epsilon is {epsilon}", remedy="use 0 or more")
    values, members = members_of(rewards, groups)
    advantages = missing(len(values))
    scored = [values[place] for places in members.values() for place in places]
    whole = deviation_of(scored, std) if scored and scale == "batch" else 0.0
    for places in filter(None, members.values()):
        own = [values[place] for place in places]
        divisor = (whole if scale == "batch" else deviation_of(own, std)) + epsilon
        for place, difference in zip(places, centred(own), strict=True):
            advantages[place] = difference / divisor if difference else 0.0
    return advantages


def dr_grpo(rewards: Sequence[float | None], groups: Sequence[Hashable] | None = None) -> array[float]:
    """Centre rewards on their group's mean, and divide by nothing.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed.
        groups: the group of each; without it all are one.

    Returns:
        As long as `rewards`, float64, in the unit of the rewards; NaN where the reward is None. Exactly 0.0 in a group
        whose rewards are all equal, one of a single reward among them.

    Raises:
        ConfigError: a reward is not finite, or there are not as many groups as rewards.

    Source: Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783. Its other
    half, a loss summed over tokens and divided by a constant, is the trainer's.
    """
    values, members = members_of(rewards, groups)
    advantages = missing(len(values))
    for places in filter(None, members.values()):
        for place, difference in zip(places, centred([values[place] for place in places]), strict=True):
            advantages[place] = difference
    return advantages


def rloo(rewards: Sequence[float | None], groups: Sequence[Hashable] | None = None) -> array[float]:
    """Subtract from each reward the mean of the others of its group.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed.
        groups: the group of each; without it all are one.

    Returns:
        As long as `rewards`, float64, in the unit of the rewards; NaN where the reward is None. Exactly 0.0 in a group
        whose rewards are all equal, and for a reward that has no others to compare with.

    Raises:
        ConfigError: a reward is not finite, or there are not as many groups as rewards.

    Source: Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740; Kool et al. 2019, "Buy 4 REINFORCE Samples".
    """
    advantages = dr_grpo(rewards, groups)
    _, members = members_of(rewards, groups)
    for places in members.values():
        for place in places:
            # Leaving oneself out of the mean stretches the distance from it by n / (n - 1).
            advantages[place] *= len(places) / max(1, len(places) - 1)
    return advantages


def reinforce_baseline(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    shift: bool = False,
    epsilon: float = 1e-8,
) -> array[float]:
    """Centre rewards on their group's mean and divide by the deviation of these differences over the whole batch.

    Args:
        rewards: one per rollout of the batch, unitless; None where the rollout failed.
        groups: the group of each; without it all are one.
        lengths: tokens of each rollout. With them a difference counts once for each token, as in verl; without them
            once for each rollout.
        shift: subtract the batch's mean of the differences too, as verl does. It is 0 but for the lengths; with it a
            group whose rewards are all equal is pushed away from 0 by what other groups' lengths are.
        epsilon: added to the variance; verl has 1e-8. With 0, differences whose variance is 0 are not divided.

    Returns:
        As long as `rewards`, float64, unitless; NaN where the reward is None. Without `shift` exactly 0.0 in a group
        whose rewards are all equal; exactly 0.0 everywhere if all groups are such.

    Raises:
        ConfigError: a reward or `epsilon` is not finite, or there are not as many groups or lengths as rewards.

    Source: Hu et al. 2025, "REINFORCE++", arXiv:2501.03262, its variant with a group baseline.
    """
    if checked(epsilon, "epsilon") < 0:
        raise ConfigError(f"epsilon is {epsilon}", remedy="use 0 or more")
    advantages = dr_grpo(rewards, groups)
    weights = _weights(lengths, len(advantages))
    counted = [place for place, value in enumerate(advantages) if not math.isnan(value) and weights[place]]
    total = sum(weights[place] for place in counted)
    if total < 2 or not any(advantages[place] for place in counted):
        return advantages
    mean = math.fsum(advantages[place] * weights[place] for place in counted) / total
    squares = math.fsum(weights[place] * (advantages[place] - mean) ** 2 for place in counted)
    # Where what is counted has no variance, and nothing is added to it, nothing is divided.
    divisor = math.sqrt(squares / (total - 1) + epsilon) or 1.0
    for place, value in enumerate(advantages):
        if shift or value:
            advantages[place] = (value - (mean if shift else 0.0)) / divisor
    return advantages


def _weights(lengths: Sequence[int] | None, count: int) -> list[int]:
    if lengths is None:
        return [1] * count
    if len(lengths) != count:
        raise ConfigError(f"{len(lengths)} lengths for {count} rewards", remedy="give the length of each rollout")
    for length in lengths:
        if length < 0:
            raise ConfigError(f"a rollout cannot have {length} tokens", remedy="use whole numbers from 0")
    return list(lengths)
