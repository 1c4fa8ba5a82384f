"""Stub classes: what an object of the candidate is taken for."""

from collections.abc import Iterable
from typing import Any

from worldfork.reward.split.remotes import COMPARISONS, FORWARDED, Remote, StubType, method

EITHER = "|"
"""Between the names of several classes in a place."""

PLAIN_BASES = frozenset({
    "int", "float", "str", "bytes", "tuple", "list", "dict", "set", "frozenset", "NamedTuple", "date", "datetime",
    "UserList", "UserDict", "UserString", "IntEnum", "StrEnum", "OrderedDict", "defaultdict", "Counter",
})  # fmt: skip
"""Bases of classes whose objects are plain values too."""

_NOT_INHERITED = frozenset({"__module__", "__qualname__", "__slots__", "__doc__"})


def declared_class(where: tuple[str, str, str], told: dict[str, Any], names: dict[str, Any]) -> StubType:
    """Make the stub of a class that the reference declares.

    Args:
        where: the module, the directory it is imported from, the class's name.
        told: its `bases` and `methods`.
        names: the module's, for the bases.
    """
    module, _, name = where
    inside: dict[str, Any] = {"__slots__": (), "__module__": module, "__qualname__": name}
    for each in told["methods"]:
        if each in FORWARDED or not each.startswith("__"):
            inside[each] = method(f"{name}.{each}", each)
    if "__len__" in inside:
        # A candidate's need not have a length to be true.
        inside.setdefault("__bool__", method(f"{name}.__bool__", "__bool__"))
    if "__eq__" in inside and "__hash__" not in inside:
        inside["__hash__"] = None
    bases = tuple(found for each in told["bases"] if isinstance(found := names.get(each), StubType))
    made = StubType(name, bases or (Remote,), inside)
    made._worldfork_name = where
    return made


def stand_in(kinds: Iterable[StubType]) -> StubType:
    """Make the stub of a class of the candidate's own, where the reference has one of some classes.

    It is none of them, as the candidate's is none. It answers whatever one of them answers, by asking the candidate,
    and is compared only if all of them are.
    """
    every = sorted(kinds, key=lambda kind: kind.__qualname__)
    told = [_told(kind) for kind in every]
    name = EITHER.join(kind.__qualname__ for kind in every)
    inside: dict[str, Any] = {"__slots__": (), "__module__": every[0].__module__, "__qualname__": name}
    # One may bring what the reference's other answers at that place bring; what is in it is compared here.
    inside["__iter__"] = method(f"{name}.__iter__", "__iter__")
    for each in dict.fromkeys(name for names in told for name in names):
        having = [names[each] for names in told if each in names]
        if each in (*COMPARISONS, "__hash__") and len(having) < len(every):
            continue
        owners = dict.fromkeys(owner for owner in having if owner is not None)
        inside[each] = None if None in having else method(f"{EITHER.join(owners)}.{each}", each)
    return StubType(name, (Remote,), inside)


def places(place: str) -> list[str]:
    """Return the places of the reference that one may mean."""
    owners, dot, rest = place.partition(".")
    return [f"{owner}{dot}{rest}" for owner in owners.split(EITHER)]


def _told(kind: StubType) -> dict[str, str | None]:
    """Return, by a method's name, the class that has it; None where it is said to have none."""
    found: dict[str, str | None] = {}
    for owner in kind.__mro__[: kind.__mro__.index(Remote)]:
        for name, value in vars(owner).items():
            if name not in _NOT_INHERITED and (value is None or callable(value)):
                found.setdefault(name, None if value is None else owner.__qualname__)
    return found
