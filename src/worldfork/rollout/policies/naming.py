"""Policies by the names that a command line gives them."""

from __future__ import annotations

from worldfork.core.errors import ConfigError
from worldfork.rollout.policies.candidates import load_candidates
from worldfork.rollout.policies.command import CommandPolicy
from worldfork.rollout.policies.ends import NopPolicy, ReferencePolicy
from worldfork.rollout.policies.mutating import MutatePolicy
from worldfork.rollout.turn import Agent as Policy

POLICY_NAMES = "nop, reference, mutate, mutate:SEED, candidates:DIR, command:LINE or host:LINE"


def policy_named(text: str) -> Policy:
    """Return the policy that a command line names.

    `nop`, `reference`; `mutate` and `mutate:SEED`; `candidates:DIRECTORY`; `command:LINE` for an agent program inside
    the sandbox, `host:LINE` for one on the host.

    Raises:
        ConfigError: none of these, or the directory holds no candidates.
    """
    kind, colon, rest = text.partition(":")
    if not colon and kind == "nop":
        return NopPolicy()
    if not colon and kind == "reference":
        return ReferencePolicy()
    if kind == "mutate" and (rest or not colon):
        return MutatePolicy(_seed(rest, text) if colon else 0)
    if kind == "candidates" and rest:
        return load_candidates(rest)
    if kind in ("command", "host") and rest:
        return CommandPolicy(rest, where="inside" if kind == "command" else "host")
    raise ConfigError(f"there is no policy {text!r}", remedy=f"use {POLICY_NAMES}", policy=text)


def _seed(text: str, whole: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{whole!r}: the seed is no whole number", remedy="use mutate:7", policy=whole) from None
