"""Rewards of groups, turned into what a policy gradient multiplies by, or into what is kept to learn from.

All of it is float64. A reward is a finite number, or None where a rollout failed: None becomes NaN at the same place
of the result and is left out of every mean, deviation and count. Results are `array("d")`, which numpy and torch take
without a copy. `groups` names the group of each reward, in any order; without it all are one group.
"""

from worldfork.reward.advantages.grouped import dr_grpo, group_advantages, grpo, reinforce_baseline, rloo
from worldfork.reward.advantages.ratios import (
    GSPO_CLIP,
    Surrogate,
    clipped_surrogate,
    gspo,
    sequence_ratios,
)
from worldfork.reward.advantages.rewards import aligned, validity
from worldfork.reward.advantages.selecting import (
    best_of_n,
    dynamic_sampling,
    pass_at_k,
    pass_at_k_of_groups,
    raft,
    rft,
)

__all__ = [
    "GSPO_CLIP", "Surrogate", "aligned", "best_of_n", "clipped_surrogate", "dr_grpo", "dynamic_sampling",
    "group_advantages", "grpo", "gspo", "pass_at_k", "pass_at_k_of_groups", "raft", "reinforce_baseline", "rft", "rloo",
    "sequence_ratios", "validity",
]  # fmt: skip
