"""What a check is, how one is made, and in which three ways it ends."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worldfork.testing.trial import Trial

Body = Callable[["Trial"], Awaitable[None]]


class Outcome(str, Enum):
    """How a check ended."""

    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


class Wrong(Exception):
    """A fork is not what it should be; the text is the evidence."""


class NotApplicable(Exception):
    """The check says nothing of this system; the text is why."""


@dataclass(frozen=True)
class Check:
    """One hazard and the way to see it."""

    number: int
    title: str
    source: str
    """Where users reported it: the public issue, or the page that admits it."""
    needs: tuple[str, ...]
    """Names of `Abilities` without which it does not apply."""
    body: Body
    limit_s: float
    """Wall time for each kind of snapshot."""


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    number: int
    title: str
    source: str
    outcome: Outcome
    detail: str
    """The evidence of a failure, the reason why it does not apply, or empty."""
    took_s: float


CHECKS: dict[int, Check] = {}
"""By number; filled as the modules of checks are imported."""


def check(
    number: int, title: str, source: str, *, needs: Sequence[str] = (), limit_s: float = 60
) -> Callable[[Body], Body]:
    """Make a check of a coroutine function, which raises `Wrong` with the evidence where the hazard is met.

    Where the system has memory snapshots it runs twice, once with each kind, unless it needs `memory`.
    """
    if not (limit_s > 0 and math.isfinite(limit_s)):
        raise ValueError(f"check {number} needs a time limit")

    def keep(body: Body) -> Body:
        if number in CHECKS:
            raise ValueError(f"two checks have the number {number}")
        CHECKS[number] = Check(number, title, source, tuple(needs), body, limit_s)
        return body

    return keep


def expect(held: bool, evidence: str) -> None:
    """Raise `Wrong` with the evidence unless it held."""
    if not held:
        raise Wrong(evidence)
