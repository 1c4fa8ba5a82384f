"""What an object of the candidate is like: which plain values it equals, and what can be done with it.

This runs in the candidate's fork and is told to the tests' side, which believes no more of it than any candidate may
say.
"""

import collections
import datetime
import sys
from typing import Any

_BASES = (
    *(int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset, memoryview),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
    *(collections.UserList, collections.UserDict, collections.UserString),
)
_SETS: tuple[type, ...] = (type({}.keys()), type({}.items()))
_VIEWS: tuple[type, ...] = (*_SETS, type({}.values()))
_LIBRARIES = frozenset(getattr(sys, "stdlib_module_names", ("builtins", "collections", "itertools")))
_EXACT: dict[type, Any] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    memoryview: memoryview.tobytes,
    datetime.datetime: lambda v: datetime.datetime(
        v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo, fold=v.fold
    ),
    datetime.date: lambda v: datetime.date(v.year, v.month, v.day),
    datetime.time: lambda v: datetime.time(v.hour, v.minute, v.second, v.microsecond, v.tzinfo, fold=v.fold),
    datetime.timedelta: lambda v: datetime.timedelta(v.days, v.seconds, v.microseconds),
    collections.UserList: list,
    collections.UserDict: dict,
    collections.UserString: str,
}


def _base(kind: type) -> Any:
    """Return the plain type that a class derives from, or whose values its objects equal."""
    return next((each for each in (*_BASES, *_late_bases()) if issubclass(kind, each)), None)


def _late_bases() -> list[type]:
    """Return those of modules that take long to load, where there may be such values."""
    late = (("decimal", "Decimal"), ("fractions", "Fraction"))
    return [getattr(sys.modules[module], name) for module, name in late if module in sys.modules]


def marks(kind: type, value: Any) -> list[str]:
    """Return in brackets what could be made of an object beside its classes."""
    found = {
        "<own>": kind.__module__.partition(".")[0] not in _LIBRARIES,
        "<plain>": _base(kind) is not None,
        "<iterator>": hasattr(kind, "__next__"),
        "<function>": callable(value),
        "<view>": kind in _VIEWS,
        "<set>": kind in _SETS,
        "<elements>": kind is collections.deque or (kind.__module__, kind.__name__) == ("array", "array"),
        "<iterable>": hasattr(kind, "__iter__"),
    }
    return [mark for mark, is_so in found.items() if is_so]


def plain_part(value: Any) -> Any:
    """Return the plain value that an object is at its base, or that it equals."""
    base = _base(type(value)) or list
    exact = _EXACT.get(base)
    return exact(value) if exact else base(value)
