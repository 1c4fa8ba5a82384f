"""How much more likely a whole sequence has become, and how far a step may follow that: GSPO."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from worldfork.core.errors import ConfigError
from worldfork.reward.advantages.grouped import grpo
from worldfork.reward.advantages.rewards import checked, missing

GSPO_CLIP = (3e-4, 4e-4)
"""How far below and above 1 a sequence's ratio counts, in the experiments of the paper."""
LogProbs = Sequence[Sequence[float] | None]
"""For each rollout the natural logarithms of its tokens' probabilities; None where its policy gives none."""


@dataclass(frozen=True)
class Surrogate:
    """What a step is to make larger, for each rollout; all float64, unitless, NaN where something is missing."""

    advantages: array[float]
    ratios: array[float]
    """Exactly 1.0 for a sequence without tokens."""
    objectives: array[float]
    """The smaller of ratio times advantage and clipped ratio times advantage; the loss is minus their mean."""
    clipped: tuple[bool, ...]
    """Where the clipped one is the smaller, so that no gradient flows."""


def sequence_ratios(new: LogProbs, old: LogProbs) -> array[float]:
    """Return for each sequence the geometric mean of its tokens' probability ratios: exp(mean(new - old)).

    Args:
        new, old: log-probabilities, natural logarithms, of the model's own tokens alone, under the policy that learns
            and the one that sampled. Shape: rollouts x its tokens.

    Returns:
        As long as `new`, float64; NaN where either is None, 1.0 where there are no tokens, infinite where it is more
        than a float64 holds.

    Raises:
        ConfigError: different numbers of rollouts or tokens, or a log-probability that is not finite.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, equation 7.
    """
    if len(new) != len(old):
        raise ConfigError(
            f"log-probabilities of {len(new)} and of {len(old)} rollouts", remedy="give the same rollouts"
        )
    ratios = missing(len(new))
    for place, (after, before) in enumerate(zip(new, old, strict=True)):
        if after is None or before is None:
            continue
        if len(after) != len(before):
            raise ConfigError(f"rollout {place} has {len(after)} and {len(before)} log-probabilities")
        steps = [
            checked(one, "log-probability") - checked(other, "log-probability")
            for one, other in zip(after, before, strict=True)
        ]
        ratios[place] = _exp(math.fsum(steps) / len(steps)) if steps else 1.0
    return ratios


def clipped_surrogate(
    advantages: Sequence[float], ratios: Sequence[float], clip: tuple[float, float] = GSPO_CLIP
) -> Surrogate:
    """Return the clipped objective of each rollout.

    Args:
        advantages: one per rollout; NaN where it has none.
        ratios: of the sequences, as many; NaN where there is none.
        clip: how far below and above 1 a ratio counts.

    Returns:
        Objectives with the advantages and ratios; NaN where either is.

    Raises:
        ConfigError: not as many ratios as advantages, or a clip that is not in [0, 1) and [0, infinite).

    Source: as of `gspo`, equation 5; the clip with two sides: Yu et al. 2025, "DAPO", arXiv:2503.14476.
    """
    low, high = clip
    if not (0 <= low < 1 and 0 <= high < math.inf):
        raise ConfigError(f"clip {clip} makes no sense", remedy="use (low, high) with 0 <= low < 1 and 0 <= high")
    if len(advantages) != len(ratios):
        raise ConfigError(f"{len(ratios)} ratios for {len(advantages)} advantages")
    objectives = missing(len(advantages))
    clipped = []
    for place, (advantage, ratio) in enumerate(zip(advantages, ratios, strict=True)):
        bounded = min(max(ratio, 1 - low), 1 + high)
        # An infinite ratio times no advantage is nothing to learn, not NaN.
        free, held = (ratio * advantage, bounded * advantage) if advantage else (0.0, 0.0)
        if not (math.isnan(advantage) or math.isnan(ratio)):
            objectives[place] = min(free, held)
        clipped.append(held < free)
    return Surrogate(array("d", advantages), array("d", ratios), objectives, tuple(clipped))


def gspo(
    rewards: Sequence[float | None],
    new: LogProbs,
    old: LogProbs,
    groups: Sequence[Hashable] | None = None,
    *,
    clip: tuple[float, float] = GSPO_CLIP,
    std: str = "sample",
    epsilon: float = 1e-6,
) -> Surrogate:
    """Return the objective of group sequence policy optimization for each rollout.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed.
        new, old: as of `sequence_ratios`.
        groups: the group of each; without it all are one.
        clip: how far below and above 1 a sequence's ratio counts.
        std, epsilon: as of `grpo`, whose advantages these are.

    Returns:
        NaN where a reward or log-probabilities are missing. A rollout with a reward counts in its group's mean and
        deviation, with log-probabilities or without.

    Raises:
        ConfigError: as of `grpo`, `sequence_ratios` and `clipped_surrogate`.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, equations 5 to 7.
    """
    if len(new) != len(rewards):
        raise ConfigError(f"log-probabilities of {len(new)} rollouts for {len(rewards)} rewards")
    return clipped_surrogate(grpo(rewards, groups, std=std, epsilon=epsilon), sequence_ratios(new, old), clip)


def _exp(exponent: float) -> float:
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf
