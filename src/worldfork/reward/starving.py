"""How long something in a sandbox wanted a CPU and had none, from what the kernel counts of it outside.

Three things bound that time from below, whatever runs inside. While nothing of a sandbox runs, its count of CPU seconds
stands still: so of the time in which something of it wanted a CPU, at least that is left which is more than the count
has grown. A thread that waited did so for others, but for what the rest of its own sandbox ran meanwhile. And it did so
for others whenever no more threads of its sandbox wanted a CPU than there are. Code that sleeps wants nothing; code
that takes the CPU from itself runs, and what has run is counted though it be gone. What all others ran is a bound from
above: who gives the kernel so much to do that nobody runs has starved for nobody.

A fourth bound holds while no fewer threads want a CPU than there are: the time, less what those CPUs can have run of
it. It is taken only of a sandbox that has used less CPU seconds than its work is known to need, since it would excuse
code that makes threads for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from worldfork.records.cpu import CpuUse

_SURE = 3.0
"""Standard deviations that a share found by looking must be off by before it is taken for more than it is."""
_MOST_THREADS = 32
"""Of a look that are kept: those that waited longest."""
_TICK_S = 0.02
"""The machine's count goes by ticks."""
_MOST_ENDS = 30
"""How many ends of a window are tried for each beginning."""
_ROUNDING = 1.05
"""A window between two looks may be so much longer than asked for."""


@dataclass(frozen=True)
class _Look:
    at_s: float
    used_s: float
    """On a CPU, or held back by a limit of its own."""
    aside_s: float
    """Of that what no thread of these ran: its PID 1, and what its limit held back."""
    others_s: float
    """What all other processes of the machine ran."""
    wanting: int
    """In how many of the looks until here something wanted a CPU."""
    roomy: int
    """In how many of them no more wanted one than there are."""
    full: int
    """In how many of them no fewer did."""
    cpus: int
    threads: dict[int, tuple[float, float]]
    """id -> seconds on a CPU, seconds waited; not those that stand back."""
    whole: bool
    """Whether these are all threads."""


class Counts:
    """Looks at one sandbox, or at several that take turns."""

    def __init__(self) -> None:
        self._looks: list[_Look] = []
        self._lowered: set[int] = set()

    def take(self, at_s: float, uses: Iterable[CpuUse], machine_s: float = math.inf) -> int:
        """Add a look; return how many threads want a CPU.

        Args:
            at_s: when, on a monotonic clock.
            uses: of each sandbox, always the same ones.
            machine_s: the CPU seconds of all processes of the machine; infinite where nobody knows.
        """
        uses = tuple(uses)
        threads = {number: thread for use in uses for number, thread in use.threads.items()}
        # What left the CPU to others once may have waited by its own wish before, too.
        self._lowered.update(number for number, thread in threads.items() if thread.stands_back)
        counted = {number: thread for number, thread in threads.items() if number not in self._lowered}
        wanting = sum(thread.wants for thread in counted.values())
        # What leaves the CPU to others does not do so always.
        cpus = min(use.cpus for use in uses)
        roomy = sum(thread.wants for thread in threads.values()) <= cpus
        whole = all(use.whole for use in uses)
        kept = sorted(counted, key=lambda number: -counted[number].waited_s)[:_MOST_THREADS]
        last = self._looks[-1] if self._looks else None
        before = (last.wanting, last.roomy, last.full) if last else (0, 0, 0)
        self._looks.append(
            _Look(
                at_s,
                sum(use.used_s + use.throttled_s for use in uses),
                sum(use.init_s + use.throttled_s for use in uses),
                machine_s - sum(use.used_s for use in uses),
                before[0] + (wanting > 0),
                before[1] + (roomy and whole),
                before[2] + (wanting >= cpus),
                cpus,
                {number: (counted[number].ran_s, counted[number].waited_s) for number in kept},
                whole and len(kept) == len(counted),
            )
        )
        return wanting

    def missed_s(self, over_s: float, since_s: float = -math.inf, needed_cpu_s: float = 0.0) -> float:
        """Return for how long, at least, there was no CPU for what wanted one: the most of any time of some length.

        May be asked in another thread than the one that looks.

        Args:
            over_s: that length, in seconds.
            since_s: what was before does not count.
            needed_cpu_s: CPU seconds that all work since the first look may need; 0 where nobody knows.
        """
        looks, lowered, most_s = list(self._looks), frozenset(self._lowered), 0.0
        # By all that was used: of a part of the time anything uses less.
        excused = bool(looks) and looks[-1].used_s - looks[0].used_s < needed_cpu_s
        longest_s = _ROUNDING * over_s
        span_s = looks[-1].at_s - looks[0].at_s if looks else 0.0
        step = max(1, int(len(looks) * min(1.0, longest_s / span_s) / _MOST_ENDS)) if span_s else 1
        for first in range(0, len(looks), step):
            if looks[first].at_s < since_s:
                continue
            for last in range(first + step, len(looks) + step, step):
                last = min(last, len(looks) - 1)
                if looks[last].at_s - looks[first].at_s > longest_s:
                    break
                if first < last:
                    most_s = max(most_s, _between(looks[first], looks[last], last - first, lowered, excused))
        return most_s


def _between(begin: _Look, end: _Look, looks: int, lowered: frozenset[int], excused: bool) -> float:
    span_s, used_s = end.at_s - begin.at_s, end.used_s - begin.used_s
    wanted_s = _surely(end.wanting - begin.wanting, looks) * span_s
    # For so long at most more of its own wanted a CPU than there are.
    crowded_s = (1 - _surely(end.roomy - begin.roomy, looks)) * span_s + end.aside_s - begin.aside_s
    missed_s = max(wanted_s - used_s, _longest_wait(begin, end, used_s, crowded_s, lowered))
    if excused:
        missed_s = max(missed_s, _kept_from_many(begin, end, used_s, _surely(end.full - begin.full, looks) * span_s))
    # Somebody must have had it.
    return missed_s if math.isinf(end.others_s) else min(missed_s, end.others_s - begin.others_s + _TICK_S)


def _longest_wait(begin: _Look, end: _Look, used_s: float, crowded_s: float, lowered: frozenset[int]) -> float:
    longest_s = 0.0
    for number, (ran_s, waited_s) in end.threads.items():
        if number in lowered or (number not in begin.threads and not begin.whole):
            continue
        ran_before_s, waited_before_s = begin.threads.get(number, (0.0, 0.0))
        if waited_s - waited_before_s > longest_s:
            own_s = max(0.0, min(used_s - (ran_s - ran_before_s), crowded_s))
            longest_s = max(longest_s, waited_s - waited_before_s - own_s)
    return longest_s


def _kept_from_many(begin: _Look, end: _Look, used_s: float, full_s: float) -> float:
    aside_s = end.aside_s - begin.aside_s
    return full_s - aside_s - (used_s - aside_s) / end.cpus


def _surely(hits: int, looks: int) -> float:
    """Return the share that `hits` of `looks` at random instants show at least (Wilson's bound)."""
    share, odd = hits / looks, _SURE**2 / looks
    spread = _SURE * math.sqrt(share * (1 - share) / looks + odd / (4 * looks))
    return max(0.0, (share + odd / 2 - spread) / (1 + odd))
