"""Which lines of two texts correspond, in time that neither text can drive up."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

STEPS = 2_000_000
"""Of the search, for all texts of a patch; what is not compared by then is told as replaced whole."""
_EDITS = 1000
"""Lines that differ, up to which one stretch is compared exactly; its memory grows with their square."""

Stretch = tuple[int, int, int, int]
"""Lines [a, b) of the old text, for which there are lines [c, d) of the new."""


class Budget:
    """How many steps of the search are left; one for all that belongs together."""

    def __init__(self, steps: int = STEPS) -> None:
        self.steps = steps


def differing(old: Sequence[bytes], new: Sequence[bytes], budget: Budget | None = None) -> list[Stretch]:
    """Return the stretches that differ, in order; the lines between them are the same, and as many.

    Source: E. W. Myers, "An O(ND) Difference Algorithm and Its Variations" (1986); where the texts differ too much
    for it, they are first cut at lines that each has once, as in B. Cohen's patience diff.
    """
    return _Search(old, new, budget or Budget()).run()


class _Search:
    def __init__(self, old: Sequence[bytes], new: Sequence[bytes], budget: Budget) -> None:
        numbers: dict[bytes, int] = {}
        self._old = [numbers.setdefault(line, len(numbers)) for line in old]
        self._new = [numbers.setdefault(line, len(numbers)) for line in new]
        self._budget = budget
        self._same: list[tuple[int, int]] = []

    def run(self) -> list[Stretch]:
        waiting: list[Stretch] = [(0, len(self._old), 0, len(self._new))]
        while waiting:
            a, b, c, d = waiting.pop()
            while a < b and c < d and self._old[a] == self._new[c]:
                self._same.append((a, c))
                a, c = a + 1, c + 1
            while a < b and c < d and self._old[b - 1] == self._new[d - 1]:
                b, d = b - 1, d - 1
                self._same.append((b, d))
            if a == b or c == d:
                continue
            found = self._shortest(a, b, c, d)
            if found is not None:
                self._same += found
                continue
            anchors = self._anchors(a, b, c, d)
            if anchors:
                self._same += anchors
                before = (a, c)
                for place, other in [*anchors, (b, d)]:
                    waiting.append((before[0], place, before[1], other))
                    before = (place + 1, other + 1)
        return self._stretches()

    def _stretches(self) -> list[Stretch]:
        found: list[Stretch] = []
        a = c = 0
        for place, other in [*sorted(self._same), (len(self._old), len(self._new))]:
            if place > a or other > c:
                found.append((a, place, c, other))
            a, c = place + 1, other + 1
        return found

    def _shortest(self, a: int, b: int, c: int, d: int) -> list[tuple[int, int]] | None:
        """Return the pairs of equal lines of a shortest edit; None where that is too long to be looked for."""
        old, new = self._old, self._new
        width, height = b - a, d - c
        reach = {1: 0}
        trail: list[dict[int, int]] = []
        for edits in range(min(width + height, _EDITS) + 1):
            self._budget.steps -= edits + 1
            if self._budget.steps < 0:
                return None
            trail.append({})
            now = trail[-1]
            for k in range(-edits, edits + 1, 2):
                down = k == -edits or (k != edits and reach.get(k - 1, -1) < reach.get(k + 1, -1))
                x = reach[k + 1] if down else reach[k - 1] + 1
                y = x - k
                begin = x
                while x < width and y < height and old[a + x] == new[c + y]:
                    x, y = x + 1, y + 1
                self._budget.steps -= x - begin
                reach[k] = now[k] = x
                if x >= width and y >= height:
                    return self._back(trail, width, height, a, c)
        return None

    def _back(self, trail: Sequence[dict[int, int]], width: int, height: int, a: int, c: int) -> list[tuple[int, int]]:
        pairs: list[tuple[int, int]] = []
        x, y = width, height
        for edits in range(len(trail) - 1, -1, -1):
            k = x - y
            last = trail[edits - 1] if edits else {}
            if edits:
                down = k == -edits or (k != edits and last.get(k - 1, -1) < last.get(k + 1, -1))
                from_k = k + 1 if down else k - 1
                from_x = last[from_k]
                start = from_x if down else from_x + 1
            else:
                from_k, from_x, start = 0, 0, 0
            while x > start and y > 0 and x > 0:
                x, y = x - 1, y - 1
                pairs.append((a + x, c + y))
            x, y = from_x, from_x - from_k
        return pairs

    def _anchors(self, a: int, b: int, c: int, d: int) -> list[tuple[int, int]]:
        """Return pairs of lines that each side has once, in the order of both."""
        here, there = Counter(self._old[a:b]), Counter(self._new[c:d])
        places = {line: c + at for at, line in enumerate(self._new[c:d]) if there[line] == 1}
        pairs = [(a + at, places[line]) for at, line in enumerate(self._old[a:b]) if here[line] == 1 and line in places]
        tails: list[int] = []
        ends: list[int] = []
        before: list[int] = []
        for number, (_, other) in enumerate(pairs):
            at = bisect_left(tails, other)
            before.append(ends[at - 1] if at else -1)
            tails[at : at + 1] = [other]
            ends[at : at + 1] = [number]
        chosen: list[tuple[int, int]] = []
        number = ends[-1] if ends else -1
        while number >= 0:
            chosen.append(pairs[number])
            number = before[number]
        return chosen[::-1]
