"""What the demo makes of its measurements: the price of 8,000 rollouts both ways, beside the article's."""

from __future__ import annotations

from dataclasses import dataclass

ROLLOUTS = 8_000
"""1,000 steps of a group of 8, as in the article."""
GROUP = 8
ARTICLE_BUILD_S = 7.2
ARTICLE_RESTORE_S = 2.0
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Economics:
    """The price of `rollouts` start states. Both ways pay every restore; they differ in how often they build."""

    build_s: float
    """Seconds to build the world once."""
    restore_s: float
    """Seconds from a snapshot to the first answer of a sandbox made from it."""
    rollouts: int = ROLLOUTS
    group: int = GROUP
    """How many run side by side."""

    @property
    def rebuild_h(self) -> float:
        """Sandbox-hours when every rollout builds its own world: (build + restore) x rollouts."""
        return (self.build_s + self.restore_s) * self.rollouts / _HOUR_S

    @property
    def fork_h(self) -> float:
        """Sandbox-hours when the world is built once: build + restore x rollouts."""
        return (self.build_s + self.restore_s * self.rollouts) / _HOUR_S

    @property
    def rebuild_wall_h(self) -> float:
        """Hours by the clock when `group` rollouts build side by side, as if they did not slow each other down."""
        return self.rebuild_h / self.group

    @property
    def fork_wall_h(self) -> float:
        """Hours by the clock of one build and then `group` restores side by side, counted the same way."""
        return (self.build_s + self.restore_s * self.rollouts / self.group) / _HOUR_S

    def to_json(self) -> dict[str, float | int]:
        """Return every figure under a name that carries its unit."""
        return {
            "build_s": self.build_s,
            "restore_s": self.restore_s,
            "rollouts": self.rollouts,
            "group": self.group,
            "rebuild_h": self.rebuild_h,
            "fork_h": self.fork_h,
            "rebuild_wall_h": self.rebuild_wall_h,
            "fork_wall_h": self.fork_wall_h,
        }


ARTICLE = Economics(ARTICLE_BUILD_S, ARTICLE_RESTORE_S)


def duration(hours: float) -> str:
    """Return hours in the unit a reader would use: `20.4 h`, `3.1 min`, `9.8 s`."""
    if hours >= 1:
        return f"{hours:.1f} h"
    if hours * 60 >= 1:
        return f"{hours * 60:.1f} min"
    return f"{hours * _HOUR_S:.1f} s"


def economics_rows(measured: Economics) -> list[tuple[str, str, str]]:
    """Return the table's rows: what it is, here, in the article."""
    here, there = measured, ARTICLE
    count, group = f"{here.rollouts:,}", here.group
    apart, shared = f"(build + restore) x {count}", f"build + restore x {count}"
    return [
        ("build the world once", _seconds(here.build_s), _seconds(there.build_s)),
        ("restore, to the first answer", _seconds(here.restore_s), f"~{_seconds(there.restore_s)}"),
        (f"{apart}: sandbox time", duration(here.rebuild_h), duration(there.rebuild_h)),
        (f"{shared}: sandbox time", duration(here.fork_h), duration(there.fork_h)),
        (f"{apart}: by the clock, {group} at once", duration(here.rebuild_wall_h), duration(there.rebuild_wall_h)),
        (f"{shared}: by the clock, {group} at once", duration(here.fork_wall_h), duration(there.fork_wall_h)),
    ]


def _seconds(value_s: float) -> str:
    return f"{value_s:.1f} s" if value_s >= 1 else f"{value_s * 1000:.1f} ms"


def reward_line(index: int, reward: float | None, passed: int, expected: int, failure: str = "") -> str:
    """Return the line of one rollout, such as `rollout[1] reward=0.33   (2 failed, 1 passed)`."""
    if reward is None:
        return f"rollout[{index}] reward=None   ({failure or 'the rollout failed'})"
    failed = expected - passed
    counts = [f"{failed} failed"] * (failed > 0) + [f"{passed} passed"] * (passed > 0)
    return f"rollout[{index}] reward={reward:.2f}   ({', '.join(counts) or 'nothing ran'})"
