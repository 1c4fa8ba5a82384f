"""What an object of the candidate is like: which plain values it equals, and what can be done with it.

This runs in the candidate's fork and is told to the tests' side, which believes no more of it than any candidate may
say.
"""

from __future__ import annotations

import sys

from worldfork.reward.split.values import loaded_type

TYPE_CHECKING = False
if TYPE_CHECKING:  # loading these takes longer than most candidates run
    from collections.abc import Callable
    from typing import Any

_BASES = (int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, memoryview)
_SETS: tuple[type, ...] = (type({}.keys()), type({}.items()))
_VIEWS: tuple[type, ...] = (*_SETS, type({}.values()))
_LIBRARIES = frozenset(getattr(sys, "stdlib_module_names", ("builtins", "collections", "itertools")))
_EXACT: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    memoryview: memoryview.tobytes,
}
_LATE: dict[tuple[str, str], Callable[[Any, Any], Any]] = {
    ("datetime", "datetime"): lambda kind, v: kind(
        v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo, fold=v.fold
    ),
    ("datetime", "date"): lambda kind, v: kind(v.year, v.month, v.day),
    ("datetime", "time"): lambda kind, v: kind(v.hour, v.minute, v.second, v.microsecond, v.tzinfo, fold=v.fold),
    ("datetime", "timedelta"): lambda kind, v: kind(v.days, v.seconds, v.microseconds),
    ("collections", "UserList"): lambda _, v: list(v),
    ("collections", "UserDict"): lambda _, v: dict(v),
    ("collections", "UserString"): lambda _, v: str(v),
    ("decimal", "Decimal"): lambda kind, v: kind(v),
    ("fractions", "Fraction"): lambda kind, v: kind(v),
}
"""Types of modules that take long to load, which are loaded where there are such values."""


def _base(kind: type) -> Any:
    """Return the plain type that a class derives from, or whose values its objects equal."""
    return next((each for each in (*_BASES, *_late_bases()) if issubclass(kind, each)), None)


def _late_bases() -> list[type]:
    found = (loaded_type(module, name) for module, name in _LATE)
    return [each for each in found if isinstance(each, type)]


def marks(kind: type, value: Any) -> list[str]:
    """Return in brackets what could be made of an object beside its classes."""
    found = {
        "<own>": kind.__module__.partition(".")[0] not in _LIBRARIES,
        "<plain>": _base(kind) is not None,
        "<iterator>": hasattr(kind, "__next__"),
        "<function>": callable(value),
        "<view>": kind in _VIEWS,
        "<set>": kind in _SETS,
        "<elements>": kind is loaded_type("collections", "deque")
        or (kind.__module__, kind.__name__) == ("array", "array"),
        "<iterable>": hasattr(kind, "__iter__"),
    }
    return [mark for mark, is_so in found.items() if is_so]


def plain_part(value: Any) -> Any:
    """Return the plain value that an object is at its base, or that it equals."""
    base = _base(type(value)) or list
    if base in _EXACT:
        return _EXACT[base](value)
    late = _LATE.get((base.__module__, base.__name__))
    return late(base, value) if late else base(value)
