"""Which paths of a task a pattern means.

`?`, `*` and `[...]` stay within one name, and `**` as a whole name stands for any number of directories, none among
them: `src/**/*.py` means `src/a.py` and `src/b/c/d.py`, and `src/**` all that lies below `src`. A pattern also means
the path that is spelled exactly like it. One that begins with `!` takes out what the rest of it means, and the last
pattern that means a path decides: `**/*.py`, `!**/tests/**` is all code but what lies in directories of tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from fnmatch import fnmatchcase
from typing import NamedTuple


def is_editable(path: str, patterns: Iterable[str]) -> bool:
    """Tell whether the patterns mean the path, which is relative and in normal form."""
    names = path.split("/")
    for pattern in reversed(tuple(patterns)):
        meant = pattern.removeprefix(_OUT)
        if path == meant or _matches(names, _names(meant)):
            return meant == pattern
    return False


def is_literal(pattern: str) -> bool:
    """Tell whether a pattern means one path alone."""
    return not pattern.startswith(_OUT) and not any(each in pattern for each in "*?[")


def taking_in(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns without those that take something out."""
    return tuple(pattern for pattern in patterns if not pattern.startswith(_OUT))


_OUT = "!"

CLUTTER = frozenset(
    (
        ".venv",
        "venv",
        "node_modules",
        "__pycache__",
        ".git",
        ".hg",
        ".tox",
        ".nox",
        ".eggs",
        ".cache",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".hypothesis",
        "site-packages",
        "build",
        "dist",
    )
)
"""Names of directories that tools fill. What is new in them is carried last: a repository may have its own `build`."""

NO_CLUTTER = tuple(f"!**/{name}/**" for name in sorted(CLUTTER - {"build", "dist", "venv"}))
"""Patterns that take out what is no source of anybody's."""


class Reach(NamedTuple):
    """What patterns may still mean below one directory: asked on the way down a tree, one step a name, however deep."""

    spelled: tuple[str, ...]
    names: tuple[tuple[str, ...], ...]
    """Of each pattern."""
    alive: tuple[Set[int], ...]
    """Which of them may come next, for each pattern."""

    @classmethod
    def of(cls, patterns: Iterable[str]) -> Reach:
        """Return the reach of the top directory."""
        spelled = tuple(patterns)
        names = tuple(_names(pattern.removeprefix(_OUT)) for pattern in spelled)
        return cls(spelled, names, tuple(_skipping({0}, each) for each in names))

    def below(self, name: str) -> Reach:
        """Return the reach of a directory in this one."""
        pairs = zip(self.alive, self.names, strict=True)
        return self._replace(alive=tuple(_step(alive, name, names) if alive else alive for alive, names in pairs))

    def means(self, name: str, path: str) -> bool:
        """Tell whether a file of this directory is meant.

        Args:
            name: in the directory.
            path: the whole of it.
        """
        for spelled, names, alive in zip(*map(reversed, self), strict=True):
            meant = spelled.removeprefix(_OUT)
            if path == meant or (alive and len(names) in _step(alive, name, names)):
                return bool(meant == spelled)
        return False

    def leads_on(self, path: str) -> bool:
        """Tell whether anything below this directory, whose whole path is given, can be meant."""
        for spelled, names, alive in zip(*map(reversed, self), strict=True):
            if spelled.startswith(_OUT):
                # It takes out all that lies below, and what comes before it decides nothing there.
                if names[-2:] == ("**", "*") and len(names) - 2 in alive:
                    return False
            elif min(alive, default=len(names)) < len(names) or spelled.startswith(f"{path}/"):
                return True
        return False


def _names(pattern: str) -> tuple[str, ...]:
    names = tuple(pattern.split("/"))
    # What lies below, not the directory itself.
    return (*names, "*") if names[-1] == "**" else names


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    # The patterns that may come next, after each name: any number of `**` costs no more than one.
    alive: Set[int] = _skipping({0}, patterns)
    for name in names:
        alive = _step(alive, name, patterns)
        if not alive:
            return False
    return len(patterns) in alive


def _step(alive: Set[int], name: str, patterns: Sequence[str]) -> Set[int]:
    return _skipping(
        {
            place if patterns[place] == "**" else place + 1
            for place in alive
            if place < len(patterns) and (patterns[place] == "**" or fnmatchcase(name, patterns[place]))
        },
        patterns,
    )


def _skipping(places: Set[int], patterns: Sequence[str]) -> set[int]:
    """Add the places that can be reached without a name."""
    found = set(places)
    for place in sorted(places):
        while place < len(patterns) and patterns[place] == "**":
            place += 1
            found.add(place)
    return found
