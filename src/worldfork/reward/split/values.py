"""Plain values as bytes, and back: the only thing that crosses between the candidate's fork and the tests'.

This text, with that of `encoding` and `decoding`, runs in three places: on the host, which scans every frame and
builds nothing of it, and in both forks, where it is sent as it stands. So it imports nothing but the standard library.

A value is a tag of one byte and what the tag asks for. Mutables (what can change) are numbered in the order in
which they begin; `r` and a number is one that came before, so identity and cycles survive.
"""

import struct
import sys

MAX_FRAME_BYTES = 4 << 20
MAX_VALUES = 100_000
"""In one frame, each element of a collection counted."""
MAX_DEPTH = 100

_U32 = struct.Struct("<I")

SIZED = b"isbca"
"""Tags followed by a length and so many bytes: int (little-endian, two's complement), str, bytes, Decimal's text,
bytearray."""
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


def loaded_type(module: str, name: str) -> object:
    """Return a type of a module that takes long to load; None where nothing has loaded it, so nothing is of it."""
    return getattr(sys.modules.get(module), name, None)


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
