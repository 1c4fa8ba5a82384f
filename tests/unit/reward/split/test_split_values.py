"""Values as bytes and back; bytes that are none."""

from __future__ import annotations

import datetime
import math
import struct
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldfork.reward.split.decoding import Decoder, apply_contents
from worldfork.reward.split.encoding import Encoder
from worldfork.reward.split.values import FROM_TESTS_ONLY, MAX_DEPTH, MAX_VALUES, Malformed, scan

ZONE = datetime.timezone(datetime.timedelta(hours=-3, minutes=30), "here")

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(4300, 4400).map(lambda digits: -(10**digits))
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.dates()
    | st.datetimes(timezones=st.just(ZONE) | st.none())
    | st.times()
    | st.timedeltas()
)
HASHABLE = st.recursive(LEAVES, lambda below: st.tuples(below, below) | st.frozensets(below, max_size=3), max_leaves=5)
VALUES = st.recursive(
    HASHABLE,
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(HASHABLE, below, max_size=4)
        | st.sets(HASHABLE, max_size=4)
        | st.binary(max_size=8).map(bytearray)
        | st.tuples(below, below)
    ),
    max_leaves=20,
)


def refuse(_encoder: Encoder, _value: Any, _depth: int) -> bool:
    return False


def no_special(tag: str, _decoder: Decoder) -> Any:
    raise AssertionError(tag)


def written(value: Any) -> bytes:
    encoder = Encoder(refuse)
    encoder.write(value)
    return encoder.finished()


def read(data: bytes) -> Any:
    scan(data, 0, FROM_TESTS_ONLY)
    return Decoder(data, 0, no_special).read()


def types_of(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value), [types_of(each) for each in value]
    if isinstance(value, dict):
        return dict, [(types_of(key), types_of(each)) for key, each in value.items()]
    return type(value)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_a_value_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    back = read(written(value))
    assert back == value
    assert types_of(back) == types_of(value)


def test_values_that_do_not_equal_themselves_and_odd_text_come_back() -> None:
    back = read(written([math.nan, Decimal("sNaN"), "\ud800", range(3, 9, 2), NotImplemented, -0.0]))
    assert math.isnan(back[0])
    assert str(back[1]) == "sNaN"
    assert back[2:5] == ["\ud800", range(3, 9, 2), NotImplemented]
    assert math.copysign(1, back[5]) == -1


def test_the_same_container_twice_and_one_in_itself() -> None:
    inner: list[Any] = [1]
    outer = {"a": inner, "b": inner, "c": (inner,)}
    inner.append(outer)
    back = read(written(outer))
    assert back["a"] is back["b"] is back["c"][0]
    assert back["a"][1] is back


class Number(int):
    pass


@pytest.mark.parametrize(
    "value", [object(), Number(1), int, len, iter([]), [Number(2)], memoryview(b"x"), {1: {2: print}}]
)
def test_only_exact_types_are_written(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        written(value)


def test_what_is_too_large_or_too_deep_is_not_written() -> None:
    deep: list[Any] = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    for value in (deep, [0] * (MAX_VALUES + 1), "x" * (5 << 20), {"a": [b"y" * (3 << 20)] * 2}):
        with pytest.raises(Malformed):
            written(value)


U32 = struct.Struct("<I").pack
ONE = b"i" + U32(1) + b"\x01"
MALFORMED = {
    "nothing": b"",
    "an unknown tag": b"?",
    "a cut length": b"s\x01",
    "a cut text": b"s" + U32(5) + b"abc",
    "a cut float": b"f1234567",
    "a count of more than there is": b"l" + U32(0xFFFFFFFF),
    "a count of pairs of more than there is": b"d" + U32(0x80000000),
    "something after it": b"NN",
    "a function": b"k" + U32(0),
    "a name": b"y" + b"s" + U32(2) + b"os" + b"s" + U32(6) + b"system",
    "a module's object": b"p" + b"NNN",
    "an object of the tests": b"n" + U32(0) + b"s" + U32(1) + b"N",
    "too many levels": (b"t" + U32(1)) * 200 + b"N",
    "too many values": b"t" + U32(MAX_VALUES + 1) + b"N" * (MAX_VALUES + 1),
    "text that is no UTF-8": b"s" + U32(1) + b"\xff",
    "a Decimal that is none": b"c" + U32(1) + b"x",
    "a fraction of nothing": b"q" + ONE + b"i" + U32(1) + b"\x00",
    "a fraction of texts": b"q" + b"s" + U32(1) + b"1" + ONE,
    "a range without steps": b"j" + ONE + ONE + b"i" + U32(0),
    "a range of true": b"j" + b"TTT",
    "a month 1, day 1, year a text": b"Y" + b"s" + U32(1) + b"1" + ONE + ONE,
    "a day 0": b"Y" + ONE + ONE + b"i" + U32(0),
    "a time with a zone that is a text": b"H" + ONE * 4 + b"i" + U32(0) + b"s" + U32(0),
    "a zone of two days": b"Z" + b"W" + b"i" + U32(1) + b"\x02" + b"i" + U32(0) + b"i" + U32(0) + b"s" + U32(0),
    "a reference to nothing": b"r" + U32(3),
    "a list in a set": b"e" + U32(1) + b"l" + U32(0),
    "a list as a key": b"d" + U32(1) + b"l" + U32(0) + b"N",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_bytes_that_are_no_value_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        read(data)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    try:
        scan(data, 0, FROM_TESTS_ONLY | frozenset(b"o"))
        Decoder(data, 0, no_special).read()
    except Malformed:
        pass


@settings(max_examples=60, deadline=None)
@given(VALUES, st.data())
def test_a_value_with_a_byte_changed_is_a_value_or_refused(value: Any, data: st.DataObject) -> None:
    changed = bytearray(written(value))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        scan(bytes(changed), 0, FROM_TESTS_ONLY | frozenset(b"o"))
        Decoder(bytes(changed), 0, no_special).read()
    except Malformed:
        pass


def test_a_count_makes_nothing_before_its_elements_are_there() -> None:
    # 100 levels of lists, each of which says that it has as many elements as there are bytes left.
    data = b"".join(b"l" + U32(5 * (90 - level)) for level in range(90)) + b"N" * 400
    with pytest.raises(Malformed):
        read(data)


def contents_of(*mutables: Any) -> list[Any]:
    encoder = Encoder(refuse, mutables)
    encoder.counted(b"t", len(mutables))
    for mutable in mutables:
        encoder.contents(mutable)
    return list(Decoder(encoder.finished(), 0, no_special, mutables).read())


def test_containers_get_what_their_twins_hold() -> None:
    class Node:
        pass

    node, numbers, names, mapping = Node(), [1], {"a"}, {"k": 1}
    theirs: tuple[Any, ...] = (Node(), [3, 2], {"b", "c"}, {"z": None})
    theirs[0].next, theirs[0].value = None, 5
    data = bytearray(b"ab")
    (told,) = contents_of(bytearray(b"abc"))
    apply_contents(data, told)
    assert data == b"abc"
    for mine, told in zip((node, numbers, names, mapping), contents_of(*theirs), strict=True):
        apply_contents(mine, told)
    assert (vars(node), numbers, names, mapping) == (vars(theirs[0]), *theirs[1:])


@pytest.mark.parametrize(
    ("mutable", "told"),
    [([], 5), (bytearray(), 5), (bytearray(), ("x",)), (bytearray(), (b"", b"")),
     (set(), ([],)), ({}, ("a",)), ({}, ([], 1)), ({}, None), (type("Node", (), {})(), ("__class__", 1)),
     (type("Node", (), {})(), ("a b", 1)), (type("Node", (), {})(), (1, 1))],
)  # fmt: skip
def test_contents_of_another_kind_are_refused(mutable: Any, told: Any) -> None:
    with pytest.raises(Malformed):
        apply_contents(mutable, told)


def test_fractions_and_complex_numbers_keep_their_types() -> None:
    assert [type(each) for each in read(written([Fraction(1, 3), 1j, True, 1, 1.0]))] == [
        Fraction, complex, bool, int, float,
    ]  # fmt: skip
