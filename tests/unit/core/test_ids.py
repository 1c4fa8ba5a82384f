from __future__ import annotations

import hashlib
import re

import pytest

from worldfork.core.errors import ConfigError
from worldfork.core.ids import PREFIXES, check_id, content_id, new_id


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_new_id_passes_its_own_check(prefix: str) -> None:
    text = new_id(prefix)
    assert re.fullmatch(rf"{prefix}-[a-z2-7]{{16}}", text)
    assert check_id(prefix, text) == text


def test_ids_differ() -> None:
    assert len({new_id("sb") for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sb-",
        "sn-aaaaaaaaaaaaaaaa",
        "sb-aaaaaaaaaaaaaaa",
        "sb-aaaaaaaaaaaaaaaaa",
        "sb-aaaaaaaaaaaaaaa1",
        "sb-AAAAAAAAAAAAAAAA",
        "sb-aaaaaaaaaaaaaaaa\n",
        "sb-../../etc/passwd",
        "sb-aaaaaaaaaaaaaaa\u0131",
        None,
        7,
    ],
)
def test_nothing_else_passes(text: object) -> None:
    with pytest.raises(ConfigError):
        check_id("sb", text)  # type: ignore[arg-type]


def test_an_unknown_prefix_is_refused() -> None:
    with pytest.raises(ConfigError):
        new_id("xx")


def test_content_ids_tell_parts_apart() -> None:
    assert content_id(b"ab", b"c") != content_id(b"a", b"bc")
    assert content_id(b"abc") == content_id(b"abc")
    assert content_id() == hashlib.sha256().hexdigest()
