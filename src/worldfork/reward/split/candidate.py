"""The program of the candidate's fork: loads the modules under test and calls what it is told to call.

Its text is sent to the fork's Python; the library never runs it in its own process. Nothing here is trusted by
anybody: code under test shares this process and may write what it likes. It is told the arguments of calls, and
nothing of tests, their names or what they expect.

A frame is a length, a kind, the eight bytes that the answer must repeat, and one value.
"""

from __future__ import annotations

import importlib
import os
import struct
import sys

from worldfork.reward.split.decoding import Decoder
from worldfork.reward.split.encoding import Encoder
from worldfork.reward.split.likeness import marks, plain_part
from worldfork.reward.split.values import Malformed

TYPE_CHECKING = False
if TYPE_CHECKING:  # loading it takes longer than most candidates run
    from typing import Any, NoReturn

_MAX_HANDLES = 100_000
_MAX_NAMES = 16


class Callback:
    """A function of the tests, called over there."""

    def __init__(self, server: Server, number: int) -> None:
        self._server = server
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the tests' side to call it."""
        return self._server.call_back(self._number, args, kwargs)


class Server:
    """Answers frames until they end."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._token = bytes(8)
        self._handles: dict[int, Any] = {}
        self._numbers: dict[int, int] = {}
        self._records: dict[str, type] = {}
        self._callbacks: dict[int, Callback] = {}

    def serve(self) -> NoReturn:
        """Answer until the other side ends."""
        while True:
            kind, body = self._receive()
            self._answer(kind, body)

    def call_back(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have a function of the tests called; calls that it makes meanwhile are answered here."""
        encoder = Encoder(self._write_other)
        encoder.write((number, args, kwargs))
        self._send(b"K", encoder.finished())
        while True:
            kind, body = self._receive()
            if kind == b"V":
                return Decoder(body, 0, self._special).read()
            if kind == b"W":
                names, args_ = Decoder(body, 0, self._special).read()
                raise _builtin_exception(names)(*args_)
            self._answer(kind, body)

    def _answer(self, kind: bytes, body: bytes) -> None:
        decoder = Decoder(body, 0, self._special)
        given: list[Any] = []
        before = b""
        try:
            operation, *parts = decoder.read()
            given = list(decoder.kept)
            before = self._shallow(given)
            answer, first = b"R", getattr(self, "_do_" + operation)(*parts)
        except BaseException as error:
            answer, first = b"E", _told(error)
        try:
            frame = self._encoded(first, given, before)
        except BaseException as error:
            answer, frame = b"E", self._encoded(_told(error), [], b"")
        self._send(answer, frame)

    def _encoded(self, result: Any, given: list[Any], before: bytes) -> bytes:
        """Return the result, then what the arguments' mutables hold now, or nothing where all is as it was."""
        encoder = Encoder(self._write_other, given)
        encoder.counted(b"t", 2)
        encoder.write(result, 1)
        if not given or self._shallow(given) == before:
            encoder.write(None, 1)
        else:
            encoder.counted(b"t", len(given))
            for mutable in given:
                encoder.contents(mutable)
        return encoder.finished()

    def _do_import(self, name: str, base: str) -> Any:
        if base not in sys.path:
            sys.path.insert(0, base)
        found = vars(importlib.import_module(name))
        return tuple(sorted(each for each in found if type(each) is str))

    def _do_call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return target(*args, **kwargs)

    def _do_method(self, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name.startswith("__") and name.endswith("__"):
            # As operators look it up: at the type.
            special = getattr(type(target), name, None)
            if special is None or name == "__bool__":
                return _without(name, target, *args)
            return special(target, *args, **kwargs)
        return getattr(target, name)(*args, **kwargs)

    def _do_get(self, target: Any, name: str) -> Any:
        return getattr(target, name)

    def _do_set(self, target: Any, name: str, value: Any) -> None:
        setattr(target, name, value)

    def _do_delete(self, target: Any, name: str) -> None:
        delattr(target, name)

    def _do_next(self, target: Any, count: int) -> Any:
        """Return (elements, whether it ended, the exception that ended it)."""
        found: list[Any] = []
        try:
            for _ in range(count):
                found.append(next(target))
        except StopIteration:
            return found, True, None
        except BaseException as error:
            return found, True, _told(error)
        return found, False, None

    def _special(self, tag: str, decoder: Decoder) -> Any:
        if tag == "k":
            number = decoder.number()
            return self._callbacks.setdefault(number, Callback(self, number))
        if tag == "o":
            number, _ = decoder.number(), decoder.read()
            return self._handles[number]
        if tag == "p":
            name, base, path = decoder.several(3)
            self._do_import(name, base)
            return _walk(sys.modules[name], path)
        if tag == "y":
            name, path = decoder.several(2)
            return _walk(importlib.import_module(name), path)
        return self._record(decoder)

    def _record(self, decoder: Decoder) -> Any:
        count, name = decoder.number(), decoder.read()
        kind = self._records.setdefault(name, type(name, (), {}))
        made = kind()
        decoder.kept.append(made)
        for _ in range(count):
            attribute = decoder.read()
            vars(made)[attribute] = decoder.read()
        return made

    def _write_other(self, encoder: Encoder, value: Any, depth: int) -> bool:
        """Write what is no plain value: the plain part of the library's own collections, else a handle.

        A handle names the object's classes, and in brackets what else could be made of it.
        """
        if encoder.was_kept(value):
            return True
        kind = type(value)
        if kind.__module__ == "collections" and kind.__base__ is dict:
            encoder.write(dict(value), depth)
            return True
        names = [each.__name__ for each in kind.__mro__[:_MAX_NAMES]]
        names += marks(kind, value)
        encoder.counted(b"o", self._number(value))
        encoder.elements(b"t", tuple(names), depth)
        return True

    def _do_plain(self, target: Any) -> Any:
        """Return the plain value that an object of a derived class is at its base."""
        return plain_part(target)

    def _number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = len(self._handles)
            if number >= _MAX_HANDLES:
                raise MemoryError("more objects than tests can hold")
            self._numbers[id(value)] = number
            # Kept, so that no other object gets its identity.
            self._handles[number] = value
        return number

    def _shallow(self, mutables: list[Any]) -> bytes:
        """Return what the mutables hold as bytes, to see later whether anything changed."""
        if not mutables:
            return b""
        encoder = Encoder(self._write_other, mutables, max_bytes=1 << 30, max_values=1 << 30)
        try:
            for mutable in mutables:
                encoder.contents(mutable)
        except (Malformed, TypeError):
            return b"too large to compare"
        return bytes(encoder.out)

    def _receive(self) -> tuple[bytes, bytes]:
        (size,) = struct.unpack("<I", self._read(4))
        frame = self._read(size)
        self._token = frame[1:9]
        return frame[:1], frame[9:]

    def _send(self, kind: bytes, body: bytes) -> None:
        data = struct.pack("<I", 9 + len(body)) + kind + self._token + body
        while data:
            data = data[os.write(self._sink, data) :]

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._source, min(size, 1 << 16))
            if not part:
                os._exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def _without(name: str, target: Any, *args: Any) -> Any:
    """Do what Python does with an object whose class lacks a special method that the reference's class has."""
    if name in _OTHER_WAYS:
        return _OTHER_WAYS[name](target, *args)
    if name in _PLAIN_OPERATORS:
        # The other operand is asked, or the operator that does not work in place.
        return NotImplemented
    raise TypeError(f"{type(target).__name__!r} object has no {name}")


_OTHER_WAYS: dict[str, Any] = {
    "__bool__": bool,
    "__iter__": iter,
    "__reversed__": reversed,
    "__contains__": lambda target, value: value in target,
}
_PLAIN_OPERATORS = frozenset(
    f"__{side}{name}__"
    for side in ("", "r", "i")
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow"),
        *("and", "or", "xor", "lshift", "rshift", "matmul"),
    )
)


def _walk(found: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        found = getattr(found, name)
    return found


def _told(error: BaseException) -> Any:
    """Return (names of its classes, arguments, text, attributes) of an exception, all of them plain."""
    names = tuple(str(each.__name__) for each in type(error).__mro__[:_MAX_NAMES])
    try:
        text = str(error)[:10_000]
    except BaseException:
        text = ""
    try:
        args = tuple(error.args) if _is_plain(error.args) else (text,)
    except BaseException:
        args = (text,)
    try:
        attributes = {name: value for name, value in vars(error).items() if _is_plain(value)}
    except BaseException:
        attributes = {}
    return names, args, text, attributes


def _is_plain(value: Any) -> bool:
    try:
        encoder = Encoder(lambda _encoder, _value, _depth: False)
        encoder.write(value, 10)
    except (Malformed, TypeError):
        return False
    return len(encoder.out) < 1 << 16


def _builtin_exception(names: Any) -> type[Exception]:
    import builtins

    for name in names:
        found = getattr(builtins, name, None)
        if isinstance(found, type) and issubclass(found, Exception):
            return found
    return Exception


def main() -> NoReturn:
    """Take the private streams away from everybody else and answer."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    Server(source, sink).serve()
