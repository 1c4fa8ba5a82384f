"""When a group has shown enough, so that its other rollouts need not be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worldfork.core.errors import ConfigError

ENOUGH = "enough"
"""The code of rollouts that were not needed any more."""


@dataclass(frozen=True)
class StopRule:
    """Ends a group early. What is not set decides nothing; the first rule that holds ends it.

    A rule is asked of the first rollouts of the group, by index and without a gap, never of those that happened to end
    first: so where a group is cut does not depend on how fast each of its rollouts was.
    """

    successes: int | None = None
    """So many rewards of at least `success_reward`."""
    target_reward: float | None = None
    """A reward of at least so much."""
    no_variance: int | None = None
    """So many rewards, at least 2, that are all the same: nothing to be learned here."""
    success_reward: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("successes", 1), ("no_variance", 2)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"{name} {value!r} is not a whole number of at least {least}", field=name)
        for name in ("target_reward", "success_reward"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"{name} {value!r} is not in [0, 1]", field=name)

    def cut(self, rewards: Sequence[float | None]) -> int | None:
        """Return how many of the first rollouts are enough; None where they are not.

        Args:
            rewards: of the first rollouts, by index; None where one failed.
        """
        scored: list[float] = []
        for count, reward in enumerate(rewards, start=1):
            if reward is not None:
                scored.append(reward)
                if self._holds(scored):
                    return count
        return None

    def _holds(self, scored: Sequence[float]) -> bool:
        if self.target_reward is not None and scored[-1] >= self.target_reward:
            return True
        if self.successes is not None and sum(each >= self.success_reward for each in scored) >= self.successes:
            return True
        return self.no_variance is not None and len(scored) == self.no_variance and min(scored) == max(scored)


class Prefix:
    """The rewards of one group, as they come, and where it is cut."""

    def __init__(self, rule: StopRule | None) -> None:
        self.cut: int | None = None
        """How many of the first rollouts count; None while all do."""
        self._rule = rule
        self._rewards: dict[int, float | None] = {}
        self._first: list[float | None] = []

    def add(self, index: int, reward: float | None) -> bool:
        """Take the reward of a rollout that ended; return whether the group is cut by that."""
        if self._rule is None or self.cut is not None:
            return False
        self._rewards[index] = reward
        while len(self._first) in self._rewards:
            self._first.append(self._rewards.pop(len(self._first)))
            self.cut = self._rule.cut(self._first)
            if self.cut is not None:
                return True
        return False

    def counts(self, index: int) -> bool:
        """Whether it is certain that a rollout is not left out, whatever the others before it bring."""
        known = len(self._first) if self.cut is None else self.cut
        return self._rule is None or index < known

    def leaves_out(self, index: int) -> bool:
        """Whether a rollout lies behind the cut."""
        return self.cut is not None and index >= self.cut
