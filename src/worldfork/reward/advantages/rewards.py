"""Rewards with their groups, checked, and the sums that every method needs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from worldfork.core.errors import ConfigError

LARGEST = 1e150
"""Magnitude of a reward or log-probability; the square of a larger one is no float64."""


def aligned(rewards: Sequence[float | None]) -> array[float]:
    """Return rewards as float64, NaN where the rollout failed.

    Args:
        rewards: one per rollout, unitless; None where the rollout failed.
    Returns:
        As long as `rewards`, in their order.
    Raises:
        ConfigError: a reward is no number, or not finite; NaN comes from None alone.
    """
    return array("d", [math.nan if reward is None else checked(reward, "reward") for reward in rewards])


def validity(rewards: Sequence[float | None]) -> list[bool]:
    """Return which rollouts have a reward, as a mask of the same length and order."""
    return [reward is not None for reward in rewards]


def checked(value: Any, what: str) -> float:
    """Return a number as a float64.

    Raises:
        ConfigError: it is none, or not finite, or too large to be squared; the field `reward` has it.
    """
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError("text")
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{what} {str(value)[:80]!r} is no number", reward=value) from None
    if not abs(number) <= LARGEST:
        raise ConfigError(
            f"{what} {number!r} is not finite, or above {LARGEST:g}",
            remedy="a rollout without a reward is None",
            reward=value,
        )
    return number


def members_of(
    rewards: Sequence[float | None], groups: Sequence[Hashable] | None
) -> tuple[array[float], dict[Hashable, list[int]]]:
    """Return the aligned rewards, and for each group the places of those in it that have one.

    Groups come in the order in which they first appear; one in which all failed has no places.

    Raises:
        ConfigError: a reward is not finite, or there are not as many groups as rewards.
    """
    values = aligned(rewards)
    names: Sequence[Hashable] = [None] * len(values) if groups is None else groups
    if len(names) != len(values):
        raise ConfigError(f"{len(names)} groups for {len(values)} rewards", remedy="name the group of each reward")
    members: dict[Hashable, list[int]] = {}
    for place, name in enumerate(names):
        found = members.setdefault(name, [])
        if not math.isnan(values[place]):
            found.append(place)
    return values, members


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of at least one value, rounded once."""
    return math.fsum(values) / len(values)


def deviation_of(values: Sequence[float], std: str) -> float:
    """Return the standard deviation of at least one value.

    Args:
        std: "sample" divides by one less than there are, "population" by as many.
    """
    if len(values) == 1 or max(values) == min(values):
        return 0.0
    mean = mean_of(values)
    differences = [value - mean for value in values]
    count = len(values) - (1 if std == "sample" else 0)
    # The square of a tiny difference is no float64 but 0, and a group that is not constant would have no deviation.
    largest = max(map(abs, differences))
    return largest * math.sqrt(math.fsum((each / largest) ** 2 for each in differences) / count)


def centred(values: Sequence[float]) -> list[float]:
    """Return values less their mean; exactly 0.0 each where all are equal.

    The mean of equal numbers need not round to that number, and a constant group must teach nothing.
    """
    if max(values) == min(values):
        return [0.0] * len(values)
    mean = mean_of(values)
    return [value - mean for value in values]


def missing(count: int) -> array[float]:
    """Return as many NaN."""
    return array("d", [math.nan]) * count


def choose(word: str, what: str, among: Iterable[str]) -> None:
    """Refuse a word that is none of those known.

    Raises:
        ConfigError: it is none of them.
    """
    known = tuple(among)
    if word not in known:
        raise ConfigError(f"{what} cannot be {word!r}", remedy=f"use one of {', '.join(known)}")
