"""Which snapshots stay and which may go, by rules alone: nothing here looks at a disk, a clock or a sandbox."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from worldfork.core.errors import ConfigError

OWN_NAMES = ("base:*", "world:*")
"""Names that Worldfork itself gives; without them bases and worlds would have to be built again."""


class Prunable(Protocol):
    """What the rules look at; a `SnapshotRecord` has it."""

    @property
    def snapshot_id(self) -> str:
        """Its id."""

    @property
    def parent_id(self) -> str | None:
        """The snapshot that its sandbox started from."""

    @property
    def created_s(self) -> float:
        """Seconds since the epoch, as the clock then said."""

    @property
    def label(self) -> str | None:
        """The note that was kept with it."""


@dataclass(frozen=True)
class KeepRules:
    """What is to stay: whatever any of the rules keeps. Without a rule everything stays.

    Raises:
        ConfigError: a number is negative or not a number.
    """

    last: int | None = None
    """So many of those published last. 0 is a rule too, and keeps none."""
    within_s: float | None = None
    """Those not older than so many seconds."""
    labels: tuple[str, ...] = ()
    """Those whose label matches one of these patterns (`*`, `?`, `[...]`; upper and lower case differ)."""
    names: tuple[str, ...] | None = None
    """Those with a name that matches one of these patterns, and of Worldfork's own `OWN_NAMES`. With None every named
    one stays, which is not a rule by itself."""
    ancestors: bool = False
    """What the kept ones came from stays too. Not a rule by itself."""

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 0:
            raise ConfigError(f"{self.last} snapshots cannot be kept", remedy="give 0 or more", last=self.last)
        if self.within_s is not None and not (self.within_s >= 0 and math.isfinite(self.within_s)):
            raise ConfigError(
                f"{self.within_s} is not an age in seconds", remedy="give 0 or more", within_s=self.within_s
            )

    @property
    def any(self) -> bool:
        """Whether there is a rule at all. If not, nothing may be deleted."""
        return self.last is not None or self.within_s is not None or bool(self.labels) or self.names is not None

    def keeping_name(self, names: Iterable[str]) -> str | None:
        """Return the first of a snapshot's names that keeps it, or None."""
        patterns = ("*",) if self.names is None else (*self.names, *OWN_NAMES)
        return next((name for name in names if _matches(name, patterns)), None)


class Choice(NamedTuple):
    """The outcome of the rules."""

    kept: dict[str, tuple[str, ...]]
    """Ids of those that stay, in order of publication, and why."""
    dropped: list[str]
    """Ids of those that may go, in order of publication."""


def choose(records: Sequence[Prunable], names: Mapping[str, str], rules: KeepRules, now_s: float) -> Choice:
    """Apply the rules.

    What was published later counts as no older than what was published before it, whatever the clock said when it was
    created; so a clock that was set back, then or now, keeps more and never less.

    Args:
        records: all snapshots, in order of publication.
        names: each name and the id that it stands for.
        now_s: seconds since the epoch.
    """
    if not rules.any:
        return Choice({record.snapshot_id: ("there is no rule",) for record in records}, [])
    reasons: dict[str, list[str]] = {record.snapshot_id: [] for record in records}
    for snapshot_id, given in by_snapshot(names).items():
        name = rules.keeping_name(given)
        if name is not None and snapshot_id in reasons:
            reasons[snapshot_id].append(f"named {name}")
    newest_s = -math.inf
    for left, record in zip(range(len(records), 0, -1), records, strict=True):
        newest_s = max(newest_s, record.created_s)
        why = reasons[record.snapshot_id]
        if rules.last is not None and left <= rules.last:
            why.append(f"one of the last {rules.last}")
        if rules.within_s is not None and now_s - newest_s <= rules.within_s:
            why.append(f"not older than {rules.within_s:g} s")
        if record.label is not None and _matches(record.label, rules.labels):
            why.append(f"labelled {record.label}")
    if rules.ancestors:
        parents = {record.snapshot_id: record.parent_id for record in records}
        kept = [snapshot_id for snapshot_id, why in reasons.items() if why]
        for ancestor, of in ancestors_of(kept, parents).items():
            if ancestor in reasons:
                reasons[ancestor].append(f"ancestor of {of}")
    kept_why = {snapshot_id: tuple(why) for snapshot_id, why in reasons.items() if why}
    return Choice(kept_why, [snapshot_id for snapshot_id, why in reasons.items() if not why])


def ancestors_of(snapshot_ids: Iterable[str], parents: Mapping[str, str | None]) -> dict[str, str]:
    """Return the ancestors of snapshots, each with the one that led to it first. A lineage ends where a parent is gone.

    Args:
        parents: the parent of each snapshot that is known.
    """
    found: dict[str, str] = {}
    for snapshot_id in snapshot_ids:
        ancestor = parents.get(snapshot_id)
        while ancestor is not None and ancestor not in found:
            found[ancestor] = snapshot_id
            ancestor = parents.get(ancestor)
    return found


def by_snapshot(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Turn names round: the sorted names of each snapshot that has any."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        found.setdefault(names[name], []).append(name)
    return found


def _matches(text: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(text, pattern) for pattern in patterns)
