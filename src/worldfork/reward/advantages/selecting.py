"""What to learn from: groups that teach something, the best of a group, all that are right; and pass@k."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from worldfork.core.errors import ConfigError
from worldfork.reward.advantages.rewards import checked, members_of


def dynamic_sampling(
    rewards: Sequence[float | None], groups: Sequence[Hashable] | None = None, *, correct: float | None = None
) -> list[bool]:
    """Say which rollouts belong to a group that teaches something; the others are to be replaced by more sampling.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed.
        groups: the group of each; without it all are one.
        correct: a reward from here on counts as right, and a group stays that has some right and some wrong ones.
            Without it a group stays whose rewards are not all equal.

    Returns:
        A mask as long as `rewards`; False where the reward is None.

    Raises:
        ConfigError: a reward or `correct` is not finite, or there are not as many groups as rewards.

    Source: Yu et al. 2025, "DAPO", arXiv:2503.14476, section 3.2.
    """
    values, members = members_of(rewards, groups)
    least = None if correct is None else checked(correct, "correct")
    kept = [False] * len(values)
    for places in members.values():
        told = {values[place] if least is None else values[place] >= least for place in places}
        for place in places:
            kept[place] = len(told) > 1
    return kept


def best_of_n(
    rewards: Sequence[float | None], groups: Sequence[Hashable] | None = None, *, at_least: float | None = None
) -> list[int]:
    """Return the place of the best rollout of each group; of equally good ones the first.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed.
        groups: the group of each; without it all are one.
        at_least: a group whose best is below this has none.

    Returns:
        Places in `rewards`, one for each group that has a best, in the order in which the groups first appear.

    Raises:
        ConfigError: a reward or `at_least` is not finite, or there are not as many groups as rewards.

    Source: Nakano et al. 2021, "WebGPT", arXiv:2112.09332, as best-of-n.
    """
    return raft(rewards, groups, keep=1, at_least=at_least)


def raft(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable] | None = None,
    *,
    keep: int = 1,
    at_least: float | None = None,
) -> list[int]:
    """Return the places of the best rollouts of each group, to be learnt from as they are.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed.
        groups: the group of each; without it all are one.
        keep: how many of each group, at most; of equally good ones the first.
        at_least: none below this.

    Returns:
        Places in `rewards`, group by group in the order in which these first appear, the best first.

    Raises:
        ConfigError: a reward or `at_least` is not finite, `keep` is below 1, or there are not as many groups.

    Source: Dong et al. 2023, "RAFT: Reward rAnked FineTuning", arXiv:2304.06767.
    """
    if keep < 1:
        raise ConfigError(f"{keep} of each group cannot be kept", remedy="use 1 or more")
    values, members = members_of(rewards, groups)
    least = -math.inf if at_least is None else checked(at_least, "at_least")
    return [
        place
        for places in members.values()
        for place in sorted(places, key=lambda place: (-values[place], place))[:keep]
        if values[place] >= least
    ]


def rft(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable] | None = None,
    *,
    answers: Sequence[Hashable] | None = None,
    correct: float = 1.0,
    keep: int | None = None,
) -> list[int]:
    """Return the places of all right rollouts of each group, equal answers once.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed.
        groups: the group of each; without it all are one.
        answers: what each rollout did, such as its diff; of equal ones in one group the first stays. Without it all.
        correct: a reward from here on counts as right.
        keep: how many of each group, at most: the first ones.

    Returns:
        Places in `rewards`, group by group in the order in which these first appear.

    Raises:
        ConfigError: a reward or `correct` is not finite, `keep` is below 1, or there are not as many groups or answers.

    Source: Yuan et al. 2023, "Scaling Relationship on Learning Mathematical Reasoning with Large Language Models",
    arXiv:2308.01825, as rejection sampling fine-tuning.
    """
    if keep is not None and keep < 1:
        raise ConfigError(f"{keep} of each group cannot be kept", remedy="use 1 or more")
    values, members = members_of(rewards, groups)
    if answers is not None and len(answers) != len(values):
        raise ConfigError(f"{len(answers)} answers for {len(values)} rewards", remedy="give the answer of each rollout")
    least = checked(correct, "correct")
    kept = []
    for places in members.values():
        right = [place for place in places if values[place] >= least]
        if answers is not None:
            # Backwards, so that of equal answers the first one's place is the last to be written.
            right = sorted({answers[place]: place for place in reversed(right)}.values())
        kept += right[:keep]
    return kept


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the chance that at least one of `k` samples is right, without bias: 1 - C(n - c, k) / C(n, k).

    Args:
        samples: how many were drawn.
        correct: how many of them are right.
        k: how many one would draw.

    Returns:
        In [0, 1], exact up to one rounding.

    Raises:
        ConfigError: not 0 <= correct <= samples, or not 1 <= k <= samples.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1.
    """
    if not 0 <= correct <= samples:
        raise ConfigError(f"{correct} of {samples} samples cannot be right")
    if not 1 <= k <= samples:
        raise ConfigError(f"pass@{k} needs {k} samples and there are {samples}", remedy="use a k from 1 to the samples")
    whole = math.comb(samples, k)
    return (whole - math.comb(samples - correct, k)) / whole


def pass_at_k_of_groups(
    rewards: Sequence[float | None], groups: Sequence[Hashable] | None = None, *, k: int, correct: float = 1.0
) -> dict[Hashable, float]:
    """Return pass@k of each group.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed, which is then no sample.
        groups: the group of each; without it all are one, whose name is None.
        k: how many one would draw.
        correct: a reward from here on counts as right.

    Returns:
        For each group, in the order in which these first appear, its pass@k; NaN where fewer than `k` have a reward.

    Raises:
        ConfigError: a reward or `correct` is not finite, `k` is below 1, or there are not as many groups as rewards.

    Source: as of `pass_at_k`.
    """
    if k < 1:
        raise ConfigError(f"pass@{k} makes no sense", remedy="use 1 or more")
    values, members = members_of(rewards, groups)
    least = checked(correct, "correct")
    return {
        name: pass_at_k(len(places), sum(values[place] >= least for place in places), k)
        if len(places) >= k
        else math.nan
        for name, places in members.items()
    }
