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
