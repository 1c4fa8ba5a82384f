"""Plain values as bytes, and back: the only thing that crosses between the candidate's fork and the tests'.

This text runs in three places: on the host, which scans every frame and builds nothing of it, and in both forks,
where it is sent as it stands. So it imports nothing but the standard library.

A value is a tag of one byte and what the tag asks for. Containers that can change are numbered in the order in
which they begin; `r` and a number is one that came before, so identity and cycles survive.
"""

import datetime
import struct
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_FRAME_BYTES = 4 << 20
MAX_VALUES = 100_000
"""In one frame, each element of a container counted."""
MAX_DEPTH = 100

_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")

SIZED = b"isbc"
"""Tags followed by a length and so many bytes: int (little-endian, two's complement), str, bytes, Decimal's text."""
FIXED_BYTES = {b"N"[0]: 0, b"T"[0]: 0, b"F"[0]: 0, b"U"[0]: 0, b"f"[0]: 8, b"x"[0]: 16, b"r"[0]: 4, b"k"[0]: 4}
FIXED_VALUES = {
    b"q"[0]: 2,
    b"j"[0]: 3,
    b"Y"[0]: 3,
    b"M"[0]: 9,
    b"H"[0]: 6,
    b"W"[0]: 3,
    b"Z"[0]: 2,
    b"p"[0]: 3,
    b"y"[0]: 2,
}
COUNTED = {b"l"[0]: 1, b"t"[0]: 1, b"e"[0]: 1, b"z"[0]: 1, b"I"[0]: 1, b"d"[0]: 2}
"""Tags followed by a count of elements, and how many values each element is."""
HANDLE = b"o"[0]
"""An object that stays with the candidate: a number, and a tuple of names of its classes."""
RECORD = b"n"[0]
"""An object of the tests' own, by its attributes: the class's name, a count, pairs of name and value."""
FROM_TESTS_ONLY = frozenset(b"kpyn")
"""Functions of the tests, names of modules' objects, and objects of the tests' own: no candidate may send one."""


class Malformed(Exception):
    """Bytes that are no value, or more than the limits allow."""


def scan(data: bytes, start: int, forbidden: frozenset[int] = frozenset()) -> None:
    """Look at the one value that `data` holds from `start` to its end, and build nothing.

    Raises:
        Malformed: it is none, holds a forbidden tag, or has too many values or levels.
    """
    position, size, values = start, len(data), 0
    open_counts = [1]
    while open_counts:
        if not open_counts[-1]:
            open_counts.pop()
            continue
        open_counts[-1] -= 1
        values += 1
        if position >= size or values > MAX_VALUES:
            raise Malformed("more values than allowed" if values > MAX_VALUES else "cut short")
        tag = data[position]
        position += 1
        if tag in forbidden:
            raise Malformed(f"a candidate cannot send {bytes([tag])!r}")
        if tag in FIXED_BYTES:
            position += FIXED_BYTES[tag]
            continue
        if tag in FIXED_VALUES:
            children = FIXED_VALUES[tag]
        else:
            if position + 4 > size:
                raise Malformed("cut short")
            (count,) = _U32.unpack_from(data, position)
            position += 4
            if tag in SIZED:
                position += count
                continue
            if tag in COUNTED:
                children = count * COUNTED[tag]
            elif tag == HANDLE:
                children = 1
            elif tag == RECORD:
                # The count is of attributes; the class's name comes on top.
                children = 1 + 2 * count
            else:
                raise Malformed(f"there is no tag {bytes([tag])!r}")
        if children > size - position:
            raise Malformed("cut short")
        open_counts.append(children)
        if len(open_counts) > MAX_DEPTH:
            raise Malformed("more levels than allowed")
    if position != size:
        raise Malformed("something follows the value" if position < size else "cut short")


def _long(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class Encoder:
    """Writes values.

    `other` writes what is no plain value: it is called with the encoder, the value and the depth, and returns False
    where it cannot.
    """

    def __init__(
        self,
        other: Callable[["Encoder", Any, int], bool],
        known: Iterable[Any] = (),
        *,
        max_bytes: int = MAX_FRAME_BYTES,
        max_values: int = MAX_VALUES,
    ) -> None:
        self.out = bytearray()
        self.kept = list(known)
        """The containers that can change, by their numbers."""
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
        writer = _WRITERS.get(type(value))
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
        """Number a container; True if it was written before and now as a reference."""
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
        """Write what a container holds now, as a tuple; of a mapping and an object key and value in turn."""
        if type(value) is list or type(value) is set:
            self.elements(b"t", value, 1)
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
    Decimal: lambda encoder, value, _depth: encoder.sized(b"c", str(value).encode("ascii")),
    list: _write_list,
    set: _write_set,
    dict: _write_dict,
    tuple: lambda encoder, value, depth: encoder.elements(b"t", value, depth),
    frozenset: lambda encoder, value, depth: encoder.elements(b"z", value, depth),
    Fraction: lambda encoder, value, depth: encoder.fixed(b"q", (value.numerator, value.denominator), depth),
    range: lambda encoder, value, depth: encoder.fixed(b"j", (value.start, value.stop, value.step), depth),
    datetime.date: lambda encoder, value, depth: encoder.fixed(b"Y", (value.year, value.month, value.day), depth),
    datetime.datetime: _write_datetime,
    datetime.time: _write_time,
    datetime.timedelta: lambda encoder, v, depth: encoder.fixed(b"W", (v.days, v.seconds, v.microseconds), depth),
    datetime.timezone: _write_timezone,
}


class Decoder:
    """Reads values from a frame that `scan` has found well formed.

    `special` makes what is no plain value, by the tag: `k`, `p`, `y`, `o` and `n`.
    """

    def __init__(self, data: bytes, start: int, special: Any, known: Iterable[Any] = ()) -> None:
        self.data = data
        self.position = start
        self.kept = list(known)
        self._special = special

    def read(self) -> Any:
        """Read one value.

        Raises:
            Malformed: the bytes are none after all: a month 13, a list as the key of a mapping.
        """
        try:
            return self._read()
        except (ValueError, TypeError, ArithmeticError, IndexError, KeyError, struct.error) as error:
            raise Malformed(f"no value: {type(error).__name__}") from None

    def number(self) -> int:
        """Read the number that follows a tag."""
        (number,) = _U32.unpack_from(self.data, self.position)
        self.position += 4
        return int(number)

    def _read(self) -> Any:
        tag = self.data[self.position]
        self.position += 1
        return _READERS[tag](self)

    def sized(self) -> bytes:
        """Read a length and so many bytes."""
        size = self.number()
        self.position += size
        return self.data[self.position - size : self.position]

    def several(self, count: int) -> list[Any]:
        """Read so many values."""
        return [self._read() for _ in range(count)]

    def exact(self, count: int, *kinds: type) -> list[Any]:
        """Read so many values of exactly these types, the last of which stands for the rest."""
        parts = self.several(count)
        for place, part in enumerate(parts):
            if type(part) is not kinds[min(place, len(kinds) - 1)]:
                raise TypeError("a part of another type")
        return parts

    def special(self, tag: str) -> Any:
        """Let the owner make what stands here."""
        return self._special(tag, self)

    def new_list(self) -> list[Any]:
        """Read a list; it is numbered before its elements, which may hold it."""
        made: list[Any] = []
        self.kept.append(made)
        made.extend(self.several(self.number()))
        return made

    def new_set(self) -> set[Any]:
        """Read a set."""
        made: set[Any] = set()
        self.kept.append(made)
        made.update(self.several(self.number()))
        return made

    def new_dict(self) -> dict[Any, Any]:
        """Read a dict."""
        made: dict[Any, Any] = {}
        self.kept.append(made)
        for _ in range(self.number()):
            key = self._read()
            made[key] = self._read()
        return made

    def fixed_float(self) -> float:
        """Read eight bytes."""
        self.position += 8
        return float(_F64.unpack_from(self.data, self.position - 8)[0])

    def fixed_complex(self) -> complex:
        """Read sixteen bytes."""
        self.position += 16
        return complex(*_C128.unpack_from(self.data, self.position - 16))

    def moment(self) -> datetime.datetime:
        """Read a date with a time."""
        parts: list[Any] = self.several(9)
        _check_clock(parts[:8], parts[8])
        return datetime.datetime(*parts[:7], parts[8], fold=parts[7])

    def clock_time(self) -> datetime.time:
        """Read a time of day."""
        parts = self.several(6)
        _check_clock(parts[:5], parts[5])
        return datetime.time(*parts[:4], parts[5], fold=parts[4])

    def zone(self) -> datetime.timezone:
        """Read a fixed offset."""
        offset, name = self.exact(2, datetime.timedelta, str)
        return datetime.timezone(offset, name)


def _check_clock(numbers: list[Any], zone: Any) -> None:
    if any(type(number) is not int for number in numbers) or type(zone) not in (type(None), datetime.timezone):
        raise TypeError("a part of another type")


_READERS: dict[int, Callable[[Decoder], Any]] = {
    b"N"[0]: lambda _: None,
    b"T"[0]: lambda _: True,
    b"F"[0]: lambda _: False,
    b"U"[0]: lambda _: NotImplemented,
    b"i"[0]: lambda decoder: int.from_bytes(decoder.sized(), "little", signed=True),
    b"f"[0]: Decoder.fixed_float,
    b"x"[0]: Decoder.fixed_complex,
    b"s"[0]: lambda decoder: decoder.sized().decode("utf-8", "surrogatepass"),
    b"b"[0]: lambda decoder: decoder.sized(),
    b"c"[0]: lambda decoder: Decimal(decoder.sized().decode("ascii")),
    b"r"[0]: lambda decoder: decoder.kept[decoder.number()],
    b"l"[0]: Decoder.new_list,
    b"e"[0]: Decoder.new_set,
    b"d"[0]: Decoder.new_dict,
    b"t"[0]: lambda decoder: tuple(decoder.several(decoder.number())),
    b"z"[0]: lambda decoder: frozenset(decoder.several(decoder.number())),
    b"I"[0]: lambda decoder: iter(decoder.several(decoder.number())),
    b"q"[0]: lambda decoder: Fraction(*decoder.exact(2, int)),
    b"j"[0]: lambda decoder: range(*decoder.exact(3, int)),
    b"Y"[0]: lambda decoder: datetime.date(*decoder.exact(3, int)),
    b"M"[0]: Decoder.moment,
    b"H"[0]: Decoder.clock_time,
    b"W"[0]: lambda decoder: datetime.timedelta(*decoder.exact(3, int)),
    b"Z"[0]: Decoder.zone,
    b"k"[0]: lambda decoder: decoder.special("k"),
    b"p"[0]: lambda decoder: decoder.special("p"),
    b"y"[0]: lambda decoder: decoder.special("y"),
    b"o"[0]: lambda decoder: decoder.special("o"),
    b"n"[0]: lambda decoder: decoder.special("n"),
}


def apply_contents(container: Any, told: Any) -> None:
    """Make a container hold what its twin on the other side holds, as `Encoder.contents` wrote it.

    Raises:
        Malformed: it cannot.
    """
    try:
        if type(container) is list:
            container[:] = told
        elif type(container) is set:
            container.clear()
            container.update(told)
        else:
            pairs = dict(zip(told[::2], told[1::2], strict=True))
            if type(container) is not dict:
                if not all(type(name) is str and name.isidentifier() and name[:2] != "__" for name in pairs):
                    raise Malformed("an attribute cannot be called so")
                container = vars(container)
            container.clear()
            container.update(pairs)
    except (TypeError, ValueError):
        raise Malformed("what an argument holds now is malformed") from None
