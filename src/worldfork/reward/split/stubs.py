"""The tests' side: modules under test as stubs whose every call goes to the candidate's fork.

This text runs in the tests' fork, where no code of a candidate ever runs. What comes back is plain values of exact
types. An object that stays with the candidate appears as a stub of its class, but only where the reference's object
stood in calibration; anywhere else it is an object without any behaviour, so that it equals nothing but itself.
"""

import builtins
import functools
import importlib
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from worldfork.reward.split.classes import PLAIN_BASES, declared_class, places, stand_in
from worldfork.reward.split.decoding import Decoder, apply_contents
from worldfork.reward.split.encoding import Encoder
from worldfork.reward.split.remotes import (
    LINK,
    Elements,
    Endless,
    Function,
    Opaque,
    Remote,
    SetView,
    StubType,
    View,
    iterate,
)
from worldfork.reward.split.stream import Stream
from worldfork.reward.split.values import Malformed

_MAX_ITERATED = 10_000
_MAX_NOTES = 20
_MAX_PLAIN_LEVELS = 50
_MAX_ARGUMENT_BYTES = 64 << 20
_MAX_ARGUMENT_VALUES = 4_000_000
"""More than in answers: arguments are the tests' own."""


class Stubs:
    """The one stream to the host, and what is known of the modules under test."""

    def __init__(self) -> None:
        self.spoiled = ""
        """Why the present test has failed, whatever it makes of it."""
        self.seen: dict[str, set[str]] = {}
        """Classes of objects by the place where they stood."""
        self.notes: list[str] = []
        """Why tests failed for what a candidate did apart from its answers; the first few."""
        self.turn = 0
        """Raised whenever the candidate's process is another one; objects of an earlier one are gone."""
        self._classes: dict[str, Any] = {}
        self._plain_based: set[str] = set()
        self._stand_ins: dict[frozenset[str], tuple[set[Any], Any]] = {}
        self._exceptions: dict[str, Any] = {}
        self._functions: dict[Any, tuple[str, str, str]] = {}
        self._objects: dict[int, Any] = {}
        self._callbacks: list[Any] = []
        self._callback_numbers: dict[int, int] = {}
        self._plain_levels = 0
        self._owner_pid = os.getpid()
        # Tests may call from several threads; one call at a time is under way.
        self._turns = threading.RLock()

    def open(self, stream: Stream, plan: dict[str, Any], failed: Any) -> None:
        """Take over the stream.

        Args:
            plan: `directory`, `modules` by path, `shapes` by place, and `learning`: whether any shape will do.
            failed: the exception that fails a test.
        """
        self._stream, self._plan, self._failed = stream, plan, failed
        LINK.ask, LINK.exception = self.ask, self._exception
        self._shapes = {place: frozenset(names) for place, names in plan["shapes"].items()}

    def fill(self, names: dict[str, Any], path: str) -> None:
        """Make a stub module's names: those that the reference declares and the candidate has."""
        told = self._plan["modules"][path]
        module = names["__name__"]
        base = self._base(module, path)
        # An import that fails over there fails here.
        present = frozenset(self.ask("", "import", module, base))
        for name in told["functions"]:
            if name in present:
                names[name] = self._function(module, base, name)
        for name, bases in told["exceptions"].items():
            if name in present:
                found: Any = tuple(names.get(each) or getattr(builtins, each, Exception) for each in bases)
                names[name] = self._exceptions[name] = type(name, found, {"__module__": module, "__str__": _text})
        known = dict(names)
        for name, one in told["classes"].items():
            known[name] = made = declared_class((module, base, name), one, known)
            if name in present:
                names[name] = self._classes[name] = made
            else:
                # A candidate may call its own otherwise, or have it elsewhere.
                self._classes.setdefault(name, made)
            if PLAIN_BASES & set(one["bases"]):
                self._plain_based.add(name)
        values_ = present & frozenset(told["values"])
        names["__all__"] = [
            name
            for name in (*told["functions"], *told["exceptions"], *told["classes"], *sorted(values_))
            if name in present and not name.startswith("_")
        ]

        def value(name: str) -> Any:
            if name not in values_:
                raise AttributeError(f"module {module!r} has no attribute {name!r}")
            return self.ask(f"{module}.{name}", "get", Module(module, base, ""), name)

        names["__getattr__"] = value

    def _base(self, module: str, path: str) -> str:
        """Return the directory from which the candidate's side has to import, as this side did."""
        parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
        above = parts[: len(parts) - len(module.split("."))]
        return "/".join((self._plan["directory"], *above))

    def _function(self, module: str, base: str, name: str) -> Any:
        def stub(*args: Any, **kwargs: Any) -> Any:
            return self.ask(f"{module}.{name}()", "call", stub, args, kwargs)

        stub.__name__ = stub.__qualname__ = name
        stub.__module__ = module
        self._functions[stub] = (module, base, name)
        return stub

    def ask(self, place: str, *operation: Any) -> Any:
        """Have something done over there.

        Args:
            place: what is asked, for the objects that may stand in the answer.
        """
        if os.getpid() != self._owner_pid:
            raise self._failed("a process that the tests started cannot reach the candidate")
        with self._turns:
            return self._ask(place, operation)

    def _ask(self, place: str, operation: tuple[Any, ...]) -> Any:
        encoder = self._encoder()
        try:
            encoder.write(operation)
            request = encoder.finished()
        except (TypeError, Malformed) as error:
            self._fail(f"{place or operation[1]}: {error}")
        kind, body = self._exchange(b"C", request)
        while kind == b"K":
            kind, body = self._exchange(*self._called_back(body))
        if kind == b"X":
            self._forget()
            self._fail(body.decode("utf-8", "replace"))
        decoder = Decoder(body, 0, lambda tag, reader: self._special(tag, reader, place), encoder.kept)
        try:
            result, changes = decoder.read()
            if changes is not None:
                for mutable, change in zip(encoder.kept, changes, strict=True):
                    apply_contents(mutable, change)
            if kind == b"E":
                result = self._exception(result)
        except (Malformed, ValueError, TypeError, AttributeError) as error:
            self._abandon()
            self._fail(f"{place or operation[1]}: the candidate answered what is no value: {error}")
        if kind == b"E":
            raise result
        return result

    def _encoder(self) -> Encoder:
        return Encoder(self._write_other, max_bytes=_MAX_ARGUMENT_BYTES, max_values=_MAX_ARGUMENT_VALUES)

    def _fail(self, why: str) -> Any:
        """Fail the present test, whatever it catches."""
        self.spoiled = why
        self.note(why)
        raise self._failed(why)

    def note(self, why: str) -> None:
        """Keep why something failed, for people."""
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(why[:500])

    def _forget(self) -> None:
        """The candidate's process is another one now."""
        self.turn += 1
        self._objects.clear()

    def _called_back(self, body: bytes) -> tuple[bytes, bytes]:
        place = "callback()"
        try:
            number, args, kwargs = Decoder(body, 0, lambda tag, reader: self._special(tag, reader, place)).read()
            if type(args) is not tuple or type(kwargs) is not dict:
                raise Malformed("arguments of other types")
        except (Malformed, ValueError, TypeError) as error:
            self._abandon()
            self._fail(f"the candidate called a function in no way that there is: {error}")
        try:
            if type(number) is not int or not 0 <= number < len(self._callbacks):
                raise Malformed("no such function")
            encoder = Encoder(self._write_other)
            encoder.write(self._callbacks[number](*args, **kwargs))
            return b"V", encoder.finished()
        except Exception as error:
            encoder = Encoder(self._write_other)
            encoder.write((tuple(each.__name__ for each in type(error).__mro__), (str(error)[:10_000],)))
            return b"W", encoder.finished()
        except BaseException:
            self._abandon()
            raise

    def _exception(self, told: Any) -> BaseException:
        names, args, text, attributes = told
        kind: Any = next(filter(None, map(self._exception_kind, names)), None)
        if kind is None:
            self._fail(f"the candidate raised {str(names[:1])[:100]}")
        if kind.__module__ == "builtins":
            try:
                made: BaseException = kind(*args)
            except Exception:
                made = Exception(*args)
            return made
        made = kind.__new__(kind, *args)
        made.args = args
        apply_contents(made, tuple(part for pair in attributes.items() for part in pair))
        vars(made)["_worldfork_text"] = str(text)
        return made

    def _exception_kind(self, name: str) -> Any:
        kind = self._exceptions.get(name) or getattr(builtins, name, None)
        return kind if isinstance(kind, type) and issubclass(kind, Exception | SystemExit) else None

    def _write_other(self, encoder: Encoder, value: Any, depth: int) -> bool:
        kind = type(value)
        if isinstance(value, Opaque):
            if value._worldfork_turn != self.turn:
                self._fail("an object of the candidate is gone with its process")
            encoder.counted(b"o", value._worldfork_number)
            encoder.write((), depth)
        elif isinstance(value, Module):
            encoder.fixed(b"p", value.parts, depth)
        elif kind is StubType and value is not Remote:
            encoder.fixed(b"p", value._worldfork_name, depth)
        elif kind is types.FunctionType and value in self._functions:
            encoder.fixed(b"p", self._functions[value], depth)
        elif self._is_callback(value):
            encoder.counted(b"k", self._callback_numbers.setdefault(id(value), len(self._callbacks)))
            if self._callback_numbers[id(value)] == len(self._callbacks):
                # Kept, so that no other function gets its identity.
                self._callbacks.append(value)
        elif name := _library_name(value):
            encoder.fixed(b"y", name, depth)
        elif hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
            found = [each for each, _ in zip(value, range(_MAX_ITERATED), strict=False)]
            encoder.elements(b"I", found, depth)
        else:
            return self._write_record(encoder, value, depth)
        return True

    def _write_record(self, encoder: Encoder, value: Any, depth: int) -> bool:
        """Write an object of the tests' own by its attributes, if there is no more to it than attributes."""
        kind = type(value)
        module = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        if kind.__mro__[1:] != (object,) or not self._is_of_the_task(module) or not hasattr(value, "__dict__"):
            return False
        if not encoder.keep(value):
            encoder.counted(b"n", len(vars(value)))
            encoder.write(kind.__name__, depth)
            encoder.pairs(vars(value), depth)
        return True

    def _is_callback(self, value: Any) -> bool:
        """Whether it is a function of the tests' own. Only such are called with what a candidate chose."""
        while type(value) is functools.partial:
            value = value.func
        if type(value) is types.MethodType:
            value = value.__func__
        return type(value) is types.FunctionType and self._is_of_the_task(value.__code__.co_filename)

    def _is_of_the_task(self, file: str) -> bool:
        return file.startswith(self._plan["directory"] + "/")

    def _special(self, tag: str, decoder: Decoder, place: str) -> Any:
        if tag != "o":
            raise Malformed("a candidate cannot send this")
        number, names = decoder.number(), decoder.read()
        if type(names) is not tuple or any(type(name) is not str for name in names):
            raise Malformed("classes are called by names")
        kind = self._kind(names, place)
        known = self._objects.get(number)
        if known is not None and type(known) is kind:
            return known
        made = object.__new__(Opaque if kind in (None, Iterator) else kind)
        object.__setattr__(made, "_worldfork_number", number)
        object.__setattr__(made, "_worldfork_turn", self.turn)
        object.__setattr__(made, "_worldfork_path", place)
        if kind is None:
            return self._plain_part(made, place)
        if kind is Iterator:
            return iterate(made, place)
        self._objects[number] = made
        return made

    def _plain_part(self, made: Any, place: str) -> Any:
        """Ask for the plain value that an object is at its base; in it may stand others of the kind."""
        if self._plain_levels >= _MAX_PLAIN_LEVELS:
            raise Malformed("a plain value that is never plain")
        self._plain_levels += 1
        try:
            return self.ask(place, "plain", made)
        finally:
            self._plain_levels -= 1

    def _kind(self, names: tuple[str, ...], place: str) -> Any:
        """Return the class that stands here for an object of the candidate; None for its plain part."""
        allowed = frozenset[str]().union(*(self._shapes.get(each, ()) for each in places(place)))
        known = next(
            (each for each in names if each in self._classes and (self._plan["learning"] or each in allowed)), ""
        )
        if known:
            self.seen.setdefault(place, set()).add(known)
            return self._classes[known]
        if allowed and "<own>" in names and ("<plain>" not in names or allowed & self._plain_based):
            # A class that the candidate calls otherwise, in the place of one of the reference.
            made = self._stand_in(allowed)
            # Or what brings such objects one by one.
            return made if "<iterator>" not in names or hasattr(made, "__next__") else Iterator
        if "<plain>" in names:
            return None
        if "<iterator>" in names:
            return Iterator
        return next((kind for mark, kind in _MARKS.items() if mark in names), Opaque)

    def _stand_in(self, allowed: frozenset[str]) -> Any:
        kinds = {self._classes[name] for name in allowed if name in self._classes}
        if not kinds:
            return Opaque
        if allowed not in self._stand_ins or len(self._stand_ins[allowed][0]) != len(kinds):
            self._stand_ins[allowed] = kinds, stand_in(kinds)
        return self._stand_ins[allowed][1]

    def _exchange(self, kind: bytes, body: bytes) -> tuple[bytes, bytes]:
        try:
            return self._stream.exchange(kind, body)
        except BaseException:
            # A time limit has struck.
            self._abandon()
            raise

    def _abandon(self) -> None:
        self._forget()
        self._stream.abandon()


class Module:
    """A module under test itself."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts


def _text(error: Any) -> str:
    return error.__dict__["_worldfork_text"] if "_worldfork_text" in error.__dict__ else Exception.__str__(error)


def _library_name(value: Any) -> tuple[str, str] | None:
    """Return module and name of a function or class of Python's own library, for the candidate to find there."""
    if not isinstance(value, _LIBRARY_KINDS):
        return None
    owner = getattr(value, "__objclass__", None)
    module = getattr(owner or value, "__module__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in _LIBRARIES:
        return None
    name = value.__qualname__
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is value else None


_LIBRARY_KINDS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.FunctionType,
    type,
)
_MARKS = {"<function>": Function, "<set>": SetView, "<elements>": Elements, "<view>": View, "<iterable>": Endless}
_LIBRARIES = sys.stdlib_module_names
STUBS = Stubs()
