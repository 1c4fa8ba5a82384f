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
        prefix = Prefix(self)
        for index, reward in enumerate(rewards):
            if prefix.add(index, reward):
                return prefix.cut
        return None


class Prefix:
    """The rewards of one group, as they come, and where it is cut."""

    def __init__(self, rule: StopRule | None) -> None:
        self.cut: int | None = None
        """How many of the first rollouts count; None while all do."""
        self._rule = rule
        self._rewards: dict[int, float | None] = {}
        self._known = 0
        """How many of the first are known. Of those, as far as they are scored:"""
        self._scored = 0
        self._successes = 0
        self._first: float | None = None
        self._varies = False

    def add(self, index: int, reward: float | None) -> bool:
        """Take the reward of a rollout that ended; return whether the group is cut by that."""
        if self._rule is None or self.cut is not None:
            return False
        self._rewards[index] = reward
        while self._known in self._rewards:
            reward = self._rewards.pop(self._known)
            self._known += 1
            if reward is not None and self._holds(self._rule, reward):
                self.cut = self._known
                return True
        return False

    def _holds(self, rule: StopRule, reward: float) -> bool:
        """Count the next reward in; return whether the rule holds with it. Groups may be long: in constant time."""
        self._first = reward if self._first is None else self._first
        self._scored += 1
        self._successes += reward >= rule.success_reward
        self._varies = self._varies or reward != self._first
        if rule.target_reward is not None and reward >= rule.target_reward:
            return True
        if rule.successes is not None and self._successes >= rule.successes:
            return True
        return rule.no_variance == self._scored and not self._varies

    def counts(self, index: int) -> bool:
        """Whether it is certain that a rollout is not left out, whatever the others before it bring."""
        known = self._known if self.cut is None else self.cut
        return self._rule is None or index < known

    def leaves_out(self, index: int) -> bool:
        """Whether a rollout lies behind the cut."""
        return self.cut is not None and index >= self.cut
