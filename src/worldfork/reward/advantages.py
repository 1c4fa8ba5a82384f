"""Rewards of one group, turned into what a policy gradient multiplies by."""

from __future__ import annotations

import math
from collections.abc import Sequence

from worldfork.core.errors import ConfigError


def group_advantages(rewards: Sequence[float | None]) -> list[float | None]:
    """Centre the rewards of one group on their mean.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed.

    Returns:
        As long as `rewards`, float64; None where the reward is None. A None is left out of the mean.
        Exactly 0.0 everywhere else if all scored rewards are equal, or if there is only one.

    Raises:
        ConfigError: a reward is NaN or infinite.

    Source: the advantage of Dr. GRPO, without the division by the deviation (Liu et al. 2025,
    "Understanding R1-Zero-Like Training", arXiv:2503.20783); the numerator of GRPO's (Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2).
    """
    scored = [reward for reward in rewards if reward is not None]
    for reward in scored:
        if not math.isfinite(reward):
            raise ConfigError(f"reward {reward!r} is not finite", reward=reward)
    if not scored:
        return [None] * len(rewards)
    if max(scored) == min(scored):
        # A mean of equal numbers need not round to that number; a constant group must not learn from the rest.
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(scored) / len(scored)
    return [None if reward is None else float(reward) - mean for reward in rewards]
