"""The binary pieces of git's patches: base 85 over zlib, of a whole content or of a delta in the form of packs."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable

from worldfork.content.patches.model import MAX_FILE_BYTES, Binary, refusal

_LINE_BYTES = 52
_LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""A line begins with the letter at the place of its length."""


def decoded(lines: Iterable[bytes], size_bytes: int, is_delta: bool) -> Binary:
    """Read a piece.

    Args:
        lines: of text, without their ends.
        size_bytes: what its head says.
        is_delta: what its head says.

    Raises:
        ConfigError: it is damaged, or larger than it says or than is taken.
    """
    if size_bytes > MAX_FILE_BYTES:
        raise refusal("", f"a binary piece of {size_bytes} bytes is larger than {MAX_FILE_BYTES}")
    packed = b"".join(_line(each) for each in lines)
    opened = zlib.decompressobj()
    try:
        data = opened.decompress(packed, size_bytes + 1)
    except zlib.error as error:
        raise refusal("", f"a binary piece is damaged: {error}") from None
    if len(data) != size_bytes or not opened.eof or opened.unused_data:
        raise refusal("", f"a binary piece is not of the {size_bytes} bytes that it says")
    return Binary(is_delta, data)


def _line(line: bytes) -> bytes:
    length = _LETTERS.find(line[:1]) + 1
    try:
        if length and len(line) == 1 + (length + 3) // 4 * 5:
            return base64.b85decode(line[1:])[:length]
    except ValueError:
        pass
    raise refusal("", f"a line of a binary piece is damaged: {line[:60]!r}")


def encoded(content: bytes) -> bytes:
    """Return a whole content as the lines of a piece, with its head and the empty line at its end."""
    packed = zlib.compress(content)
    parts = [b"literal %d\n" % len(content)]
    for start in range(0, len(packed), _LINE_BYTES):
        piece = packed[start : start + _LINE_BYTES]
        parts.append(_LETTERS[len(piece) - 1 : len(piece)] + base64.b85encode(piece, pad=True) + b"\n")
    return b"".join([*parts, b"\n"])


def applied(binary: Binary, old: bytes) -> bytes:
    """Return the content after the change of a file.

    Raises:
        ConfigError: a delta is damaged, or is not of this content.
    Source: the format of deltas in gitformat-pack(5).
    """
    if not binary.is_delta:
        return binary.data
    try:
        return _undelta(old, binary.data)
    except IndexError:
        raise refusal("", "a delta ends too early") from None


def _undelta(old: bytes, delta: bytes) -> bytes:
    old_size, place = _number(delta, 0)
    new_size, place = _number(delta, place)
    if old_size != len(old):
        raise refusal("", f"its delta is of a file of {old_size} bytes, and this one has {len(old)}")
    if new_size > MAX_FILE_BYTES:
        raise refusal("", f"its delta makes {new_size} bytes, more than {MAX_FILE_BYTES}")
    parts: list[bytes] = []
    made = 0
    while place < len(delta):
        code = delta[place]
        place += 1
        if code & 0x80:
            start, size, place = _copy(delta, code, place)
            piece = old[start : start + size]
        else:
            size = code
            piece = delta[place : place + size]
            place += size
        made += size
        if not code or len(piece) != size or made > new_size:
            raise refusal("", "its delta is damaged")
        parts.append(piece)
    if made != new_size:
        raise refusal("", "its delta is damaged")
    return b"".join(parts)


def _copy(delta: bytes, code: int, place: int) -> tuple[int, int, int]:
    values = [0, 0]
    for bit in range(7):
        if code >> bit & 1:
            which, shift = (0, bit * 8) if bit < 4 else (1, (bit - 4) * 8)
            values[which] |= delta[place] << shift
            place += 1
    return values[0], values[1] or 0x10000, place


def _number(delta: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = delta[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise refusal("", "a delta is damaged")
