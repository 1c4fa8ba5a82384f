"""Writing plain values as bytes."""

from __future__ import annotations

import struct

from worldfork.reward.split.values import MAX_DEPTH, MAX_FRAME_BYTES, MAX_VALUES, Malformed, loaded_type

TYPE_CHECKING = False
if TYPE_CHECKING:  # loading these takes longer than most candidates run
    import datetime
    from collections.abc import Callable, Iterable
    from typing import Any

_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")


def _long(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class Encoder:
    """Writes values.

    `other` writes what is no plain value: it is called with the encoder, the value and the depth, and returns False
    where it cannot.
    """

    def __init__(
        self,
        other: Callable[[Encoder, Any, int], bool],
        known: Iterable[Any] = (),
        *,
        max_bytes: int = MAX_FRAME_BYTES,
        max_values: int = MAX_VALUES,
    ) -> None:
        self.out = bytearray()
        self.kept = list(known)
        """The mutables, by their numbers."""
        self.numbers = {id(value): number for number, value in enumerate(self.kept)}
        self.values = 0
        self._other = other
        self._max_bytes = max_bytes - 64
        self._max_values = max_values

    def write(self, value: Any, depth: int = 0) -> None:
        """Write one value.

        Raises:
            Malformed: it is larger or deeper than the limits. TypeError: there is no way to write it.
        """
        self.values += 1
        if depth >= MAX_DEPTH - 2 or self.values > self._max_values or len(self.out) > self._max_bytes:
            raise Malformed("a value too deep or too large to be sent")
        writer = _WRITERS.get(type(value)) or _late_writer(type(value))
        if writer is not None:
            writer(self, value, depth)
        elif not self._other(self, value, depth):
            raise TypeError(f"a value of type {type(value).__name__} cannot be sent")

    def sized(self, tag: bytes, data: bytes) -> None:
        """Write a tag, a length and bytes."""
        self.out += tag + _U32.pack(len(data)) + data

    def counted(self, tag: bytes, count: int) -> None:
        """Write a tag and a number."""
        self.out += tag + _U32.pack(count)

    def keep(self, value: Any) -> bool:
        """Number a mutable; True if it was written before and now as a reference."""
        if self.was_kept(value):
            return True
        self.numbers[id(value)] = len(self.kept)
        self.kept.append(value)
        return False

    def was_kept(self, value: Any) -> bool:
        """Write a reference if this very object has a number."""
        number = self.numbers.get(id(value))
        if number is not None:
            self.counted(b"r", number)
        return number is not None

    def finished(self) -> bytes:
        """Return what was written.

        Raises:
            Malformed: it is larger than a frame may be.
        """
        if len(self.out) > self._max_bytes:
            raise Malformed("a value too large to be sent")
        return bytes(self.out)

    def fixed(self, tag: bytes, parts: Iterable[Any], depth: int) -> None:
        """Write a tag and its parts."""
        self.out += tag
        for part in parts:
            self.write(part, depth + 1)

    def elements(self, tag: bytes, values: Any, depth: int) -> None:
        """Write a tag, a count and elements."""
        self.counted(tag, len(values))
        for value in values:
            self.write(value, depth + 1)

    def pairs(self, values: Any, depth: int) -> None:
        """Write the keys and values of a mapping."""
        for key, value in values.items():
            self.write(key, depth + 1)
            self.write(value, depth + 1)

    def contents(self, value: Any) -> None:
        """Write what a mutable holds now, as a tuple; of a mapping and an object key and value in turn."""
        if type(value) is list or type(value) is set:
            self.elements(b"t", value, 1)
        elif type(value) is bytearray:
            self.elements(b"t", (bytes(value),), 1)
        else:
            inside = value if type(value) is dict else vars(value)
            self.counted(b"t", 2 * len(inside))
            self.pairs(inside, 1)


def _write_int(encoder: Encoder, value: int, _depth: int) -> None:
    encoder.sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _write_list(encoder: Encoder, value: list[Any], depth: int) -> None:
    if not encoder.keep(value):
        encoder.elements(b"l", value, depth)


def _write_set(encoder: Encoder, value: set[Any], depth: int) -> None:
    if not encoder.keep(value):
        encoder.elements(b"e", value, depth)


def _write_bytearray(encoder: Encoder, value: bytearray, _depth: int) -> None:
    if not encoder.keep(value):
        encoder.sized(b"a", bytes(value))


def _write_dict(encoder: Encoder, value: dict[Any, Any], depth: int) -> None:
    if not encoder.keep(value):
        encoder.counted(b"d", len(value))
        encoder.pairs(value, depth)


def _write_float(encoder: Encoder, value: float, _depth: int) -> None:
    encoder.out += b"f" + _F64.pack(value)


def _write_complex(encoder: Encoder, value: complex, _depth: int) -> None:
    encoder.out += b"x" + _C128.pack(value.real, value.imag)


def _write_datetime(encoder: Encoder, v: datetime.datetime, depth: int) -> None:
    parts = (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.fold, v.tzinfo)
    encoder.fixed(b"M", parts, depth)


def _write_time(encoder: Encoder, v: datetime.time, depth: int) -> None:
    encoder.fixed(b"H", (v.hour, v.minute, v.second, v.microsecond, v.fold, v.tzinfo), depth)


def _write_span(encoder: Encoder, v: datetime.timedelta, depth: int) -> None:
    encoder.fixed(b"W", (v.days, v.seconds, v.microseconds), depth)


def _write_timezone(encoder: Encoder, v: datetime.timezone, depth: int) -> None:
    encoder.fixed(b"Z", (v.utcoffset(None), v.tzname(None)), depth)


_WRITERS: dict[type, Callable[[Encoder, Any, int], None]] = {
    type(None): lambda encoder, _value, _depth: encoder.out.extend(b"N"),
    bool: lambda encoder, value, _depth: encoder.out.extend(b"T" if value else b"F"),
    type(NotImplemented): lambda encoder, _value, _depth: encoder.out.extend(b"U"),
    int: _write_int,
    float: _write_float,
    complex: _write_complex,
    str: lambda encoder, value, _depth: encoder.sized(b"s", _long(value)),
    bytes: lambda encoder, value, _depth: encoder.sized(b"b", value),
    bytearray: _write_bytearray,
    list: _write_list,
    set: _write_set,
    dict: _write_dict,
    tuple: lambda encoder, value, depth: encoder.elements(b"t", value, depth),
    frozenset: lambda encoder, value, depth: encoder.elements(b"z", value, depth),
    range: lambda encoder, value, depth: encoder.fixed(b"j", (value.start, value.stop, value.step), depth),
}


def _late_writer(kind: type) -> Callable[[Encoder, Any, int], None] | None:
    """Return what writes a type of a module that takes long to load, and that is loaded where there is such a value."""
    for module, name, writer in _LATE:
        if kind.__module__ == module and kind is loaded_type(module, name):
            _WRITERS[kind] = writer
            return writer
    return None


_LATE: tuple[tuple[str, str, Callable[[Encoder, Any, int], None]], ...] = (
    ("decimal", "Decimal", lambda encoder, value, _depth: encoder.sized(b"c", str(value).encode("ascii"))),
    ("fractions", "Fraction", lambda encoder, v, depth: encoder.fixed(b"q", (v.numerator, v.denominator), depth)),
    ("datetime", "date", lambda encoder, v, depth: encoder.fixed(b"Y", (v.year, v.month, v.day), depth)),
    ("datetime", "datetime", _write_datetime),
    ("datetime", "time", _write_time),
    ("datetime", "timedelta", _write_span),
    ("datetime", "timezone", _write_timezone),
)
