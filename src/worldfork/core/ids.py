"""Names of things: random ids for what lives and changes, digests for what is content."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets

from worldfork.core.errors import ConfigError

PREFIXES = {"sb": "sandbox", "sn": "snapshot", "ly": "layer", "ow": "owner", "rd": "reading", "run": "run"}
"""What each prefix stands for."""

_BODY = re.compile(r"[a-z2-7]{16}", re.ASCII)


def new_id(prefix: str) -> str:
    """Make a random id such as `sb-k3v7...`: the prefix and 80 random bits as 16 of `a-z2-7`.

    Raises:
        ConfigError: the prefix is none of `PREFIXES`.
    """
    if prefix not in PREFIXES:
        raise ConfigError(f"{prefix!r} is not a prefix of ids", prefix=prefix)
    return f"{prefix}-{base64.b32encode(secrets.token_bytes(10)).decode('ascii').lower()}"


def check_id(prefix: str, text: object) -> str:
    """Return `text` if it is an id with this prefix. Ids become paths, so nothing else passes.

    Raises:
        ConfigError: it is not.
    """
    head = f"{prefix}-"
    if not isinstance(text, str) or not text.startswith(head) or not _BODY.fullmatch(text[len(head) :]):
        kind = PREFIXES.get(prefix, prefix)
        raise ConfigError(f"{text!r} is not a {kind} id", remedy=f"ids look like {head}k3v7q2abcd5efgh6", text=text)
    return text


def is_id(prefix: str, text: str) -> bool:
    """Tell whether a text is an id with this prefix."""
    try:
        check_id(prefix, text)
    except ConfigError:
        return False
    return True


def content_id(*parts: bytes) -> str:
    """Return the SHA-256 of the parts as 64 hex digits.

    Each part is preceded by its length, so that ("ab", "c") and ("a", "bc") differ.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
