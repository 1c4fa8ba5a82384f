"""Names of files in patches: plain, or quoted as in C where a line could not hold them."""

from __future__ import annotations

from worldfork.content.patches.model import checked_path, refusal

_ESCAPES = {
    b"a": b"\a", b"b": b"\b", b"t": b"\t", b"n": b"\n", b"v": b"\v", b"f": b"\f", b"r": b"\r", b'"': b'"', b"\\": b"\\",
}  # fmt: skip
_WRITTEN = {value[0]: b"\\" + key for key, value in _ESCAPES.items()}
_OCTAL = b"01234567"


def unquoted(text: bytes) -> tuple[bytes, bytes]:
    """Return what a quoted name at the beginning of `text` says, and what follows it.

    Raises:
        ConfigError: the quotation has no end, or an escape in it says nothing.
    """
    found = bytearray()
    place = 1
    while place < len(text):
        char = text[place : place + 1]
        place += 1
        if char == b'"':
            return bytes(found), text[place:]
        if char != b"\\":
            found += char
            continue
        escape = text[place : place + 1]
        digits = text[place : place + 3]
        if escape in _ESCAPES:
            found += _ESCAPES[escape]
            place += 1
        elif len(digits) == 3 and all(each in _OCTAL for each in digits) and int(digits, 8) < 256:
            found.append(int(digits, 8))
            place += 3
        else:
            break
    raise refusal("", f"a name is quoted wrongly: {text[:80]!r}")


def quoted(name: bytes) -> bytes:
    """Return a name as a head of git has it: in quotes where it needs them."""
    if all(0x20 <= byte < 0x7F and byte not in b'"\\' for byte in name):
        return name
    return b'"' + b"".join(_WRITTEN.get(byte) or _spelled(byte) for byte in name) + b'"'


def _spelled(byte: int) -> bytes:
    return bytes([byte]) if 0x20 <= byte < 0x7F else b"\\%03o" % byte


def one_name(text: bytes, strip: int) -> str | None:
    """Read the name of a head such as `--- a/path`; None for `/dev/null`.

    Args:
        text: what follows the head's word; what comes after a tab is a time and not looked at.
        strip: how many leading directories to take off.

    Raises:
        ConfigError: it is no path within a tree.
    """
    name = unquoted(text)[0] if text.startswith(b'"') else text.partition(b"\t")[0]
    if name == b"/dev/null":
        return None
    return checked_path(stripped(name, strip))


def stripped(name: bytes, strip: int) -> bytes:
    """Take leading directories off a name.

    Raises:
        ConfigError: it has fewer.
    """
    parts = name.split(b"/", strip)
    if len(parts) <= strip or (strip and name.startswith(b"/")):
        raise refusal("", f"{name[:200]!r} does not begin with {strip} directories to be taken off, as `a/` and `b/`")
    return parts[strip]


def same_name(text: bytes, strip: int) -> str | None:
    """Read the one name that `diff --git a/NAME b/NAME` has twice; None where it has two different ones.

    Raises:
        ConfigError: it is no path within a tree.
    """
    if text.startswith(b'"'):
        first, rest = unquoted(text)
        second = _rest_of(rest[1:])
        return _if_same(first, second, strip)
    at = text.find(b" ")
    while at >= 0:
        rest = text[at + 1 :]
        second = _rest_of(rest)
        # Names may have spaces: the right one is between two halves that say the same.
        if text[:at].split(b"/", strip)[-1] == second.split(b"/", strip)[-1] and second.count(b"/") >= strip:
            return _if_same(text[:at], second, strip)
        at = text.find(b" ", at + 1)
    return None


def _rest_of(text: bytes) -> bytes:
    return unquoted(text)[0] if text.startswith(b'"') else text


def _if_same(first: bytes, second: bytes, strip: int) -> str | None:
    one, other = stripped(first, strip), stripped(second, strip)
    return checked_path(one) if one == other else None
