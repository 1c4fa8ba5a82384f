"""Reading plain values from bytes."""

from __future__ import annotations

import struct

from worldfork.reward.split.values import Malformed

TYPE_CHECKING = False
if TYPE_CHECKING:  # loading these takes longer than most candidates run
    import datetime
    from collections.abc import Callable, Iterable
    from typing import Any

_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")
_C128 = struct.Struct("<dd")


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

    def new_bytearray(self) -> bytearray:
        """Read a bytearray."""
        made = bytearray(self.sized())
        self.kept.append(made)
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

    def exact_decimal(self) -> Any:
        """Read the text of a Decimal. Its module takes long to load, and few values need it."""
        from decimal import Decimal

        return Decimal(self.sized().decode("ascii"))

    def fraction(self) -> Any:
        """Read two integers, as a Fraction."""
        from fractions import Fraction

        return Fraction(*self.exact(2, int))

    def date(self) -> datetime.date:
        """Read a day."""
        import datetime

        return datetime.date(*self.exact(3, int))

    def span(self) -> datetime.timedelta:
        """Read a difference of times."""
        import datetime

        return datetime.timedelta(*self.exact(3, int))

    def moment(self) -> datetime.datetime:
        """Read a date with a time."""
        import datetime

        year, month, day, hour, minute, second, microsecond, fold, zone = parts = self.several(9)
        _check_clock(parts)
        return datetime.datetime(year, month, day, hour, minute, second, microsecond, zone, fold=fold)

    def clock_time(self) -> datetime.time:
        """Read a time of day."""
        import datetime

        hour, minute, second, microsecond, fold, zone = parts = self.several(6)
        _check_clock(parts)
        return datetime.time(hour, minute, second, microsecond, zone, fold=fold)

    def zone(self) -> datetime.timezone:
        """Read a fixed offset."""
        import datetime

        offset, name = self.exact(2, datetime.timedelta, str)
        return datetime.timezone(offset, name)


def _check_clock(parts: list[Any]) -> None:
    import datetime

    *numbers, zone = parts
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
    b"c"[0]: Decoder.exact_decimal,
    b"r"[0]: lambda decoder: decoder.kept[decoder.number()],
    b"l"[0]: Decoder.new_list,
    b"e"[0]: Decoder.new_set,
    b"a"[0]: Decoder.new_bytearray,
    b"d"[0]: Decoder.new_dict,
    b"t"[0]: lambda decoder: tuple(decoder.several(decoder.number())),
    b"z"[0]: lambda decoder: frozenset(decoder.several(decoder.number())),
    b"I"[0]: lambda decoder: iter(decoder.several(decoder.number())),
    b"q"[0]: Decoder.fraction,
    b"j"[0]: lambda decoder: range(*decoder.exact(3, int)),
    b"Y"[0]: Decoder.date,
    b"M"[0]: Decoder.moment,
    b"H"[0]: Decoder.clock_time,
    b"W"[0]: Decoder.span,
    b"Z"[0]: Decoder.zone,
    b"k"[0]: lambda decoder: decoder.special("k"),
    b"p"[0]: lambda decoder: decoder.special("p"),
    b"y"[0]: lambda decoder: decoder.special("y"),
    b"o"[0]: lambda decoder: decoder.special("o"),
    b"n"[0]: lambda decoder: decoder.special("n"),
}


def apply_contents(mutable: Any, told: Any) -> None:
    """Make a mutable hold what its twin on the other side holds, as `Encoder.contents` wrote it.

    Raises:
        Malformed: it cannot.
    """
    try:
        if type(mutable) is list:
            mutable[:] = told
        elif type(mutable) is set:
            mutable.clear()
            mutable.update(told)
        elif type(mutable) is bytearray:
            (mutable[:],) = told
        else:
            pairs = dict(zip(told[::2], told[1::2], strict=True))
            if type(mutable) is not dict:
                if not all(type(name) is str and name.isidentifier() and name[:2] != "__" for name in pairs):
                    raise Malformed("an attribute cannot be called so")
                mutable = vars(mutable)
            mutable.clear()
            mutable.update(pairs)
    except (TypeError, ValueError):
        raise Malformed("what an argument holds now is malformed") from None
