"""Rewards as a program leaves them, in a file or on its output: small, plain, and nobody's word is taken for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from worldfork.core.errors import VerifierError
from worldfork.records.episode import FailureKind
from worldfork.reward.verifier import checked_reward

MAX_REWARD_BYTES = 64 << 10
MAX_PARTS = 100


def read_reward(data: bytes, what: str) -> tuple[float, dict[str, float]]:
    """Read a reward: a number, or a JSON object with `reward` and, if there are any, other named rewards.

    Returns:
        (reward, every named reward).

    Raises:
        VerifierError: it is none: not in [0, 1], not finite, a key that comes twice, too long.
    """
    if len(data) > MAX_REWARD_BYTES:
        raise _no_reward(what, f"is longer than {MAX_REWARD_BYTES} bytes")
    try:
        found: Any = json.loads(data.decode("utf-8").strip(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _no_reward(what, f"is no number and no JSON object: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        return checked_reward(found, what), {}
    if "reward" not in found or len(found) > MAX_PARTS:
        raise _no_reward(what, f"has no `reward`, or more than {MAX_PARTS} rewards")
    named = {str(name)[:100]: checked_reward(value, what) for name, value in found.items()}
    return named.pop("reward"), named


def checked_parts(parts: Mapping[str, Any], what: str) -> dict[str, float]:
    """Return named rewards that came from outside, as floats.

    Raises:
        VerifierError: one is no number in [0, 1].
    """
    if len(parts) > MAX_PARTS:
        raise _no_reward(what, f"has more than {MAX_PARTS} parts")
    return {str(name)[:100]: checked_reward(value, what) for name, value in parts.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _no_reward(what: str, why: str) -> VerifierError:
    return VerifierError(
        f"the reward of {what} {why}", remedy="a reward is a finite number in [0, 1]", kind=FailureKind.GRADING
    )
