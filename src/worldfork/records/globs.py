"""Which paths of a task a pattern means.

`?`, `*` and `[...]` stay within one name, and `**` as a whole name stands for any number of directories, none among
them: `src/**/*.py` means `src/a.py` and `src/b/c/d.py`, and `src/**` all that lies below `src`. A pattern also means
the path that is spelled exactly like it. One that begins with `!` takes out what the rest of it means, and the last
pattern that means a path decides: `**/*.py`, `!**/tests/**` is all code but what lies in directories of tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def is_editable(path: str, patterns: Iterable[str]) -> bool:
    """Tell whether the patterns mean the path, which is relative and in normal form."""
    names = path.split("/")
    for pattern in reversed(tuple(patterns)):
        meant = pattern.removeprefix(_OUT)
        if path == meant or _matches(names, meant.split("/")):
            return meant == pattern
    return False


def is_literal(pattern: str) -> bool:
    """Tell whether a pattern means one path alone."""
    return not pattern.startswith(_OUT) and not any(each in pattern for each in "*?[")


def taking_in(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns without those that take something out."""
    return tuple(pattern for pattern in patterns if not pattern.startswith(_OUT))


_OUT = "!"


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if patterns[-1] == "**":
        # What lies below, not the directory itself.
        patterns = [*patterns, "*"]
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
    return len(patterns) in alive


def _skipping(places: set[int], patterns: Sequence[str]) -> set[int]:
    """Add the places that can be reached without a name."""
    found = set(places)
    for place in sorted(places):
        while place < len(patterns) and patterns[place] == "**":
            place += 1
            found.add(place)
    return found
