"""What objects of a candidate look like to tests."""

from collections.abc import Callable, Iterator, Set
from typing import Any

COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
FORWARDED = frozenset({
    *COMPARISONS, "__hash__", "__len__", "__bool__", "__contains__", "__iter__", "__next__", "__reversed__",
    "__getitem__", "__setitem__", "__delitem__", "__call__", "__str__", "__repr__", "__enter__",
    "__int__", "__float__", "__index__", "__abs__", "__neg__", "__pos__", "__invert__", "__round__",
    *(f"__{side}{name}__" for side in ("", "r", "i") for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift", "rshift",
        "matmul")),
})  # fmt: skip
_MOST_AT_ONCE = 256


class Link:
    """How these objects reach their candidate; set once."""

    ask: Callable[..., Any]
    exception: Callable[[Any], BaseException]


LINK = Link()


class Opaque:
    """An object of the candidate that tests know nothing about."""

    __slots__ = ("__weakref__", "_worldfork_number", "_worldfork_path", "_worldfork_turn")
    _worldfork_number: int
    _worldfork_path: str
    _worldfork_turn: int


class Function(Opaque):
    """A function of the candidate."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it over there."""
        return LINK.ask(self._worldfork_path + "()", "call", self, args, kwargs)


class View(Opaque):
    """A collection of the candidate that can only be gone through."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(LINK.ask(self._worldfork_path, "plain", self))

    def __len__(self) -> int:
        return len(LINK.ask(self._worldfork_path, "plain", self))


class Elements(View):
    """One whose elements have numbers."""

    __slots__ = ()

    def __getitem__(self, place: Any) -> Any:
        return LINK.ask(self._worldfork_path, "plain", self)[place]


class SetView(View):
    """One that equals a set. Its elements are asked for once, and compared here."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SetView):
            other = other.found()
        return self.found() == set(other) if isinstance(other, Set) else NotImplemented

    def found(self) -> set[Any]:
        """Return its elements now."""
        return set(LINK.ask(self._worldfork_path, "plain", self))


class Endless(View):
    """One that is gone through a part at a time."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(LINK.ask(self._worldfork_path, "method", self, "__iter__", (), {}))

    def __len__(self) -> int:
        length = LINK.ask("", "method", self, "__len__", (), {})
        if type(length) is not int:
            raise TypeError("a length is a number")
        return length

    def __bool__(self) -> bool:
        return LINK.ask("", "method", self, "__bool__", (), {}) is True


class StubType(type):
    """The class of stub classes: making an instance is a call over there."""

    _worldfork_name: tuple[str, str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Have an instance made over there."""
        return LINK.ask(f"{cls.__qualname__}()", "call", cls, args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return LINK.ask(f"{cls.__qualname__}.{name}", "get", cls, name)


class Remote(Opaque, metaclass=StubType):
    """An object of a class that the reference declares."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name.startswith("_worldfork"):
            raise AttributeError(name)
        return LINK.ask(f"{type(self).__qualname__}.{name}", "get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        LINK.ask(f"{type(self).__qualname__}.{name}=", "set", self, name, value)

    def __delattr__(self, name: str) -> None:
        LINK.ask(f"{type(self).__qualname__}.{name}=", "delete", self, name)


def method(place: str, name: str) -> Callable[..., Any]:
    """Return a method that is called over there."""
    if name in COMPARISONS:

        def compare(self: Any, other: Any) -> Any:
            # What tests expect is no argument that a candidate may see.
            if not isinstance(other, Remote):
                return NotImplemented
            answer = LINK.ask(f"{place}()", "method", self, name, (other,), {})
            return answer if type(answer) is bool or answer is NotImplemented else False

        return compare

    def stub(self: Any, *args: Any, **kwargs: Any) -> Any:
        return LINK.ask(f"{place}()", "method", self, name, args, kwargs)

    stub.__name__ = name
    return stub


def iterate(remote: Any, place: str) -> Iterator[Any]:
    """Go through an iterator of the candidate, taking more and more at a time."""
    count = 1
    while True:
        found, ended, told = LINK.ask(place, "next", remote, count)
        yield from found
        if ended:
            if told is not None:
                raise LINK.exception(told)
            return
        count = min(2 * count, _MOST_AT_ONCE)
