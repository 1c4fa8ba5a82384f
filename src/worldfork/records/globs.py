"""Which paths of a task a pattern means.

`?`, `*` and `[...]` stay within one name, and `**` as a whole name stands for any number of directories, none among
them: `src/**/*.py` means `src/a.py` and `src/b/c/d.py`, and `src/**` all that lies below `src`. A pattern also means
the path that is spelled exactly like it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def is_editable(path: str, patterns: Iterable[str]) -> bool:
    """Tell whether one of the patterns means the path, which is relative and in normal form."""
    names = path.split("/")
    return any(path == pattern or _matches(names, pattern.split("/")) for pattern in patterns)


def is_literal(pattern: str) -> bool:
    """Tell whether a pattern means one path alone."""
    return not any(each in pattern for each in "*?[")


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    # The patterns that may come next, after each name: any number of `**` costs no more than one.
    alive = _skipping({0}, patterns)
    for name in names:
        alive = _skipping(
            {
                place if patterns[place] == "**" else place + 1
                for place in alive
                if place < len(patterns) and (patterns[place] == "**" or fnmatchcase(name, patterns[place]))
            },
            patterns,
        )
        if not alive:
            return False
    # A `**` at the end means what lies below, not the directory itself.
    return len(patterns) in alive and not (patterns[-1] == "**" and len(names) < len(patterns))


def _skipping(places: set[int], patterns: Sequence[str]) -> set[int]:
    """Add the places that can be reached without a name."""
    found = set(places)
    for place in sorted(places):
        while place < len(patterns) and patterns[place] == "**":
            place += 1
            found.add(place)
    return found
