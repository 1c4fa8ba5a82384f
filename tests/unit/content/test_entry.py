"""Entries as lines, and their order."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldfork.content.entry import Entry, decode, encode, sort_key

_texts = st.binary(max_size=20).map(os.fsdecode)
_entries = st.builds(
    Entry,
    path=_texts,
    kind=st.sampled_from("fdlcbpsw"),
    mode=st.integers(0, 0o7777),
    uid=st.integers(0, 2**32 - 2),
    gid=st.integers(0, 2**32 - 2),
    mtime_ns=st.integers(-(2**63), 2**63),
    size_bytes=st.integers(0, 2**63 - 1),
    content=st.sampled_from(["", "ab" * 32]),
    target=_texts,
    device=st.tuples(st.integers(0, 2**32), st.integers(0, 2**32)),
    link=_texts,
    xattrs=st.lists(st.tuples(_texts, st.binary(max_size=30))).map(tuple),
    opaque=st.booleans(),
    redirect=_texts,
)


@given(_entries)
def test_a_line_gives_back_its_entry(entry: Entry) -> None:
    line = encode(entry)
    assert decode(line) == entry
    assert encode(decode(line)) == line
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert line.isascii()


@given(st.lists(_entries, min_size=2, max_size=2, unique=True))
def test_different_entries_have_different_lines(pair: list[Entry]) -> None:
    assert encode(pair[0]) != encode(pair[1])


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b"[1]", b"null", b"[" + b"0," * 13 + b"0]", b"\xff"])
def test_what_is_no_line_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode(line)


def test_canonical_order_is_depth_first_by_bytes() -> None:
    ordered = ["", "A", "a", "a/z", "a.b", "a.b/c", "b\n", "bb", "é", "\uffff", "\udcff"]
    assert sorted({*ordered}, key=sort_key) == ordered
