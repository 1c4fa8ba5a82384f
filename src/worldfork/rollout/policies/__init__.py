"""Policies: what acts in a sandbox before the verifier judges what is left there."""

from worldfork.rollout.policies.candidates import CandidatesPolicy, load_candidates
from worldfork.rollout.policies.command import CommandPolicy
from worldfork.rollout.policies.ends import NopPolicy, ReferencePolicy
from worldfork.rollout.policies.mutating import MutatePolicy
from worldfork.rollout.policies.naming import policy_named
from worldfork.rollout.turn import Agent as Policy
from worldfork.rollout.turn import Turn

__all__ = [
    "CandidatesPolicy",
    "CommandPolicy",
    "MutatePolicy",
    "NopPolicy",
    "Policy",
    "ReferencePolicy",
    "Turn",
    "load_candidates",
    "policy_named",
]
