"""Any Python callable as a verifier, and several verifiers as one.

A callable runs on the host, in this process, and sees what the policy left as plain data: it resists what its author
lets it resist. Never run code out of `case.edits` in it.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from worldfork.core.clock import Clock, SystemClock
from worldfork.core.errors import ConfigError, VerifierError, WorldforkError
from worldfork.core.ids import content_id
from worldfork.core.threads import in_thread
from worldfork.records.episode import FailureKind
from worldfork.reward.rewards_file import checked_parts
from worldfork.reward.scoring import checked_weight
from worldfork.reward.verifier import FINAL, FRESH, Case, Grade, Verifier, checked_reward, gradings_of

Score = float | Grade | Mapping[str, float]
ScoreFunction = Callable[[Case], Score | Awaitable[Score]]
"""Takes a case; gives a reward, a whole grade, or named rewards with `reward` among them. `case.key` is the same for
the same act of grading, for whoever is asked over a network and must not count it twice."""


class ScoreVerifier:
    """Grades by a callable: a coroutine function, or a plain one, which is called in a thread.

    Where it gives true or false, that is 1 or 0; a scalar of numpy or torch is a number.
    """

    def __init__(
        self, function: ScoreFunction, *, name: str = "", needs_end: bool = False, clock: Clock | None = None
    ) -> None:
        """Take a callable.

        Args:
            function: what grades.
            name: tells versions of it apart in episodes; its own name if not given.
            needs_end: whether `case.end_snapshot_id` must be there.
            clock: for `grade_s`.
        """
        if not callable(function):
            raise ConfigError(f"score is {type(function).__name__}, which cannot be called", field="score")
        self._function = function
        self._name = name or f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', 'score')}"
        self._needs_end = needs_end
        self._clock = clock or SystemClock()

    @property
    def verifier_id(self) -> str:
        """`score`, with the callable's name."""
        return f"score:{self._name}"

    @property
    def trust(self) -> str:
        """`final` where it looks at the end, else `fresh`."""
        return FINAL if self._needs_end else FRESH

    @property
    def needs_end(self) -> bool:
        """As it was made."""
        return self._needs_end

    async def grade(self, case: Case) -> Grade:
        """Ask the callable.

        Raises:
            VerifierError: it raised, took longer than the task's `grade_wall_s`, or gave no reward.
        """
        if self._needs_end and case.end_snapshot_id is None:
            return await self.grade_nothing(case)
        began_s = self._clock.monotonic_s()
        try:
            async with asyncio.timeout(case.task.limits.grade_wall_s) as limit:
                said = await self._ask(case)
        except WorldforkError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                raise self._broken(f"took longer than {case.task.limits.grade_wall_s:g} s") from None
            raise self._broken(f"raised {type(error).__name__}: {str(error)[:300]}") from error
        return replace(self._read(said), trust=self.trust, grade_s=self._clock.monotonic_s() - began_s)

    async def grade_nothing(self, case: Case) -> Grade:
        """Give 0 to the end of a policy that left nothing to be looked at."""
        return Grade(reward=0.0, trust=self.trust)

    async def _ask(self, case: Case) -> Any:
        if inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(type(self._function).__call__):
            said: Any = self._function(case)
        else:
            said = await in_thread(self._function, case)
        return await said if inspect.isawaitable(said) else said

    def _read(self, said: Any) -> Grade:
        what = f"score {self._name}"
        if isinstance(said, Grade):
            return replace(said, reward=checked_reward(said.reward, what), parts=checked_parts(said.parts, what))
        if isinstance(said, Mapping):
            if "reward" not in said:
                raise self._broken("gave named rewards without `reward`")
            parts = checked_parts({name: _number(value) for name, value in said.items()}, what)
            return Grade(reward=parts.pop("reward"), parts=parts)
        return Grade(reward=checked_reward(_number(said), what))

    def _broken(self, what: str) -> VerifierError:
        return VerifierError(
            f"score {self._name} {what}", remedy="it must give a number in [0, 1]", kind=FailureKind.GRADING
        )


def _number(value: Any) -> Any:
    """Return true and false as 1 and 0, and scalars of numpy or torch as numbers; anything else as it is."""
    if not isinstance(value, int | float) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            # Of more than one element, or on no device.
            return value
    return float(value) if isinstance(value, bool | Fraction) else value


@functools.cache
def named_function(path: str) -> ScoreFunction:
    """Import `MODULE:NAME`.

    Raises:
        ConfigError: there is no such callable.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"there is no {path!r}: {error}", field="verifier.function") from None
    if not callable(found):
        raise ConfigError(f"{path!r} cannot be called", field="verifier.function")
    function: ScoreFunction = found
    return function


@dataclass(frozen=True)
class Part:
    """One verifier of several."""

    verifier: Verifier
    weight: float = 1.0


class WeightedVerifier:
    """Grades by several verifiers, one after the other: the mean of their rewards by weight, or their product.

    It resists what the weakest of its parts resists, in the measure of its weight.
    """

    def __init__(self, parts: Mapping[str, Part], *, combine: str = "mean") -> None:
        """Take named parts.

        Args:
            parts: name -> verifier and weight.
            combine: `mean`, `product` or `least` of their rewards; weights are of the mean.

        Raises:
            ConfigError: no part, or a weight that is not above 0.
        """
        if not parts:
            raise ConfigError("a weighted verifier needs parts", field="verifier.parts")
        for part in parts.values():
            checked_weight(part.weight, "verifier.parts")
        if combine not in ("mean", "product", "least"):
            raise ConfigError(f"combine {combine!r} is not mean, product or least", field="verifier.combine")
        self._parts = dict(sorted(parts.items()))
        self._combine = combine

    @property
    def verifier_id(self) -> str:
        """`weighted`, with a digest of its parts."""
        said = [f"{name} {part.weight!r} {part.verifier.verifier_id}" for name, part in self._parts.items()]
        return f"weighted:{content_id(self._combine.encode(), *(each.encode() for each in said))[:16]}"

    @property
    def trust(self) -> str:
        """The weakest of its parts."""
        return FINAL if any(part.verifier.trust == FINAL for part in self._parts.values()) else FRESH

    @property
    def needs_end(self) -> bool:
        """Whether one of its parts does."""
        return any(part.verifier.needs_end for part in self._parts.values())

    @property
    def gradings(self) -> int:
        """How many gradings it does for one case: the time of so many is its own."""
        return sum(gradings_of(part.verifier) for part in self._parts.values())

    async def grade(self, case: Case) -> Grade:
        """Ask every part.

        Raises:
            As the parts: where one has no grade, there is none.
        """
        return self._combined({name: await part.verifier.grade(case) for name, part in self._parts.items()})

    async def grade_nothing(self, case: Case) -> Grade:
        """Give 0 to the end of a policy that left nothing to be looked at."""
        grades = {name: await part.verifier.grade_nothing(case) for name, part in self._parts.items()}
        return replace(self._combined(grades), reward=0.0)

    def _combined(self, grades: Mapping[str, Grade]) -> Grade:
        rewards = [grade.reward for grade in grades.values()]
        weights = [self._parts[name].weight for name in grades]
        if self._combine == "mean":
            reward = math.fsum(map(_times, weights, rewards)) / math.fsum(weights)
        else:
            reward = math.prod(rewards) if self._combine == "product" else min(rewards)
        seconds = [grade.cpu_s for grade in grades.values() if grade.cpu_s is not None]
        ids = {
            name: tuple(sorted(f"{part}: {each}" for part, grade in grades.items() for each in getattr(grade, name)))
            for name in ("expected", "passed", "failed", "untouched")
        }
        return Grade(
            # Weights that are no sums of powers of two may carry it over 1.
            reward=min(max(reward, 0.0), 1.0),
            parts={name: grade.reward for name, grade in grades.items()},
            **ids,
            end=next((grade.end for grade in grades.values() if grade.end not in (None, "exited", "looked")), "exited"),
            cpu_s=math.fsum(seconds) if seconds else None,
            sandbox_id=next((grade.sandbox_id for grade in grades.values() if grade.sandbox_id), None),
            trust=self.trust,
            calibrate_s=math.fsum(grade.calibrate_s for grade in grades.values()),
            grade_s=math.fsum(grade.grade_s for grade in grades.values()),
            judged_by=", ".join(f"{name}: {grade.judged_by}" for name, grade in grades.items() if grade.judged_by),
            notes=tuple(f"{name}: {note}" for name, grade in grades.items() for note in grade.notes[:2]),
        )


def _times(weight: float, reward: float) -> float:
    return weight * reward
