"""The tests' side before answers that no honest candidate gives."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from worldfork.reward.split import stubs
from worldfork.reward.split.encoding import Encoder
from worldfork.reward.split.remotes import Link
from worldfork.reward.split.stubs import Stubs

NONE = b"N"


class Failed(BaseException):
    """Fails a test."""


class Stream:
    """Answers with what it was told, the last again and again."""

    def __init__(self, *answers: tuple[bytes, bytes]) -> None:
        self.answers = list(answers)
        self.sent: list[tuple[bytes, bytes]] = []
        self.abandoned = 0

    def exchange(self, kind: bytes, body: bytes) -> tuple[bytes, bytes]:
        self.sent.append((kind, body))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def abandon(self) -> None:
        self.abandoned += 1


def counted(tag: bytes, *parts: bytes) -> bytes:
    return tag + struct.pack("<I", len(parts)) + b"".join(parts)


def value(plain: Any) -> bytes:
    encoder = Encoder(lambda *_: False)
    encoder.write(plain)
    return bytes(encoder.finished())


def opened(monkeypatch: pytest.MonkeyPatch, stream: Stream) -> Stubs:
    monkeypatch.setattr(stubs, "LINK", Link())
    made = Stubs()
    plan = {"directory": "/workspace", "modules": {}, "shapes": {}, "learning": False}
    made.open(stream, plan, Failed)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("told", [(None, None), None, 7, (0, 1, 2), (0, (), 3)])
def test_a_call_back_that_is_none_fails_the_test_whatever_it_catches(
    monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    stream = Stream((b"K", value(told)))
    made = opened(monkeypatch, stream)
    with pytest.raises(Failed):
        made.ask("f()", "call", "f")
    assert made.spoiled
    assert stream.abandoned == 1


def test_what_a_function_of_the_tests_answers_may_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream((b"K", value((0, (), {}))), (b"R", value((5, None))))
    made = opened(monkeypatch, stream)
    made._callbacks.append(lambda: "x" * (5 << 20))
    assert made.ask("f()", "call", "f") == 5
    assert [kind for kind, _ in stream.sent] == [b"C", b"W"]


def test_a_plain_value_that_is_never_plain_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = b"o" + struct.pack("<I", 1) + counted(b"t", value("<plain>"))
    stream = Stream((b"R", counted(b"t", endless, NONE)))
    made = opened(monkeypatch, stream)
    with pytest.raises(Failed):
        made.ask("f()", "call", "f")
    assert made.spoiled
    assert len(stream.sent) < 100


CLASSES = {
    "Node": {"bases": [], "methods": ["value", "__len__", "__eq__"]},
    "Leaf": {"bases": ["Node"], "methods": ["value", "__call__"]},
    "Other": {"bases": [], "methods": ["__lt__"]},
    "Hand": {"bases": ["list"], "methods": ["score"]},
}


def filled(
    monkeypatch: pytest.MonkeyPatch, shapes: dict[str, list[str]], *present: str
) -> tuple[Stubs, dict[str, Any]]:
    """Return the stubs of a candidate that has the names that are present."""
    stream = Stream((b"R", value((present, None))))
    monkeypatch.setattr(stubs, "LINK", Link())
    made = Stubs()
    module = {"functions": ["make"], "classes": CLASSES, "exceptions": {}, "values": []}
    plan = {"directory": "/workspace", "modules": {"m.py": module}, "shapes": shapes, "learning": False}
    made.open(stream, plan, Failed)  # type: ignore[arg-type]
    names: dict[str, Any] = {"__name__": "m"}
    made.fill(names, "m.py")
    return made, names


def test_a_class_of_another_name_stands_where_the_reference_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made, names = filled(monkeypatch, {"m.make()": ["Node"], "Node.next": ["Other"]}, "make")
    kind = made._kind(("Element", "object", "<own>"), "m.make()")
    assert {"value", "__len__", "__eq__"} <= set(vars(kind))
    assert "Node" not in names
    assert "__lt__" in vars(made._kind(("Element", "object", "<own>"), "Node.next"))
    assert made._kind(("Element", "object", "<own>"), "m.other()") is stubs.Opaque


def test_where_the_reference_has_several_it_has_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"m.make()": ["Leaf", "Other"], "Other.next": ["Node"]}
    made, names = filled(monkeypatch, shapes, "make", "Leaf")
    kind = made._kind(("Element", "object", "<own>"), "m.make()")
    assert {"value", "__len__", "__call__"} <= set(vars(kind))
    # Compared only if all of them are; and none of the classes that the tests know.
    assert not {"__eq__", "__lt__"} & set(vars(kind))
    assert not issubclass(kind, names["Leaf"])
    assert made._kind(("Element", "Leaf", "object", "<own>"), "m.make()") is names["Leaf"]
    assert made._kind(("Element", "object", "<own>"), f"{kind.__qualname__}.next") is not stubs.Opaque


def test_what_is_plain_or_of_the_library_is_no_such_class(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = filled(monkeypatch, {"m.make()": ["Node"], "m.deal()": ["Hand"]}, "make")
    assert made._kind(("Pair", "tuple", "object", "<own>", "<plain>"), "m.make()") is None
    assert made._kind(("function", "object", "<function>"), "m.make()") is stubs.Function
    assert "score" in vars(made._kind(("Cards", "list", "object", "<own>", "<plain>"), "m.deal()"))
