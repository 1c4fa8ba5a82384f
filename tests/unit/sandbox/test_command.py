"""Output within a cap, and results that say what happened."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldfork.core.errors import CommandFailed, CommandTimeout, ConfigError
from worldfork.sandbox.command import CommandResult, CommandSpec, OutputBuffer, Reason

MARKER = re.compile(rb"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n")
TEXTS = st.text(st.sampled_from("aé€😀\n"), max_size=60)


def filled(data: bytes, piece_bytes: int, cap_bytes: int, *, keep_tail: bool) -> OutputBuffer:
    buffer = OutputBuffer(cap_bytes, keep_tail=keep_tail)
    for start in range(0, len(data), piece_bytes):
        buffer.add(data[start : start + piece_bytes])
    return buffer


@given(st.binary(max_size=200), st.integers(1, 50), st.booleans())
def test_within_the_cap_bytes_are_exact(data: bytes, piece_bytes: int, keep_tail: bool) -> None:
    assert filled(data, piece_bytes, len(data) or 1, keep_tail=keep_tail).join() == (data, 0)


@given(TEXTS, st.integers(1, 9), st.integers(0, 100), st.booleans())
def test_a_cut_never_splits_a_character(text: str, piece_bytes: int, cap_bytes: int, keep_tail: bool) -> None:
    data = text.encode()
    buffer = filled(data, piece_bytes, cap_bytes, keep_tail=keep_tail)
    kept, dropped_bytes = buffer.join()
    kept.decode("utf-8", "strict")
    assert buffer.over == (len(data) > cap_bytes)
    if not buffer.over:
        assert (kept, dropped_bytes) == (data, 0)
        return
    if keep_tail and cap_bytes:
        head, stated, tail = MARKER.split(kept)
        assert int(stated) == dropped_bytes
    else:
        head, tail = kept, b""
    assert data.startswith(head)
    assert data.endswith(tail)
    assert len(head) + len(tail) + dropped_bytes == len(data)
    assert len(head) + len(tail) <= cap_bytes
    # No more is lost than the two characters at the cuts.
    assert len(head) + len(tail) >= cap_bytes - 6


def test_an_emoji_survives_every_offset_of_every_piece_size() -> None:
    data = ("x" * 3 + "😀" * 5).encode()
    for piece_bytes in range(1, len(data)):
        assert filled(data, piece_bytes, len(data), keep_tail=True).join()[0] == data
        for cap_bytes in range(len(data)):
            for keep_tail in (False, True):
                filled(data, piece_bytes, cap_bytes, keep_tail=keep_tail).join()[0].decode("utf-8", "strict")


@given(st.binary(min_size=1, max_size=300), st.integers(1, 60), st.integers(0, 80))
def test_what_is_not_text_loses_at_most_three_bytes_at_a_cut(data: bytes, piece_bytes: int, cap_bytes: int) -> None:
    kept, dropped_bytes = filled(data, piece_bytes, cap_bytes, keep_tail=False).join()
    assert data.startswith(kept)
    assert len(kept) + dropped_bytes == len(data)
    assert min(len(data), cap_bytes) - len(kept) <= 3


def test_the_tail_of_a_long_stream_takes_no_more_than_twice_its_cap() -> None:
    buffer = OutputBuffer(1000, keep_tail=True)
    for number in range(20_000):
        buffer.add(b"%06d\n" % number)
    kept, dropped_bytes = buffer.join()
    assert kept.startswith(b"000000\n")
    assert kept.endswith(b"019999\n")
    assert dropped_bytes == 140_000 - 1000
    assert len(buffer._tail) <= 1000


def result(
    reason: Reason = Reason.EXITED, code: int = 0, stderr: bytes = b"", signal: int | None = None
) -> CommandResult:
    return CommandResult(code, b"", stderr, reason, signal, 1.0, 0.1, 1024)


def test_check_returns_what_is_fine() -> None:
    fine = result()
    assert fine.check() is fine
    assert fine.ok


def test_check_tells_the_code_and_the_last_line() -> None:
    with pytest.raises(CommandFailed) as caught:
        result(code=3, stderr=b"one\ntwo\n").check()
    assert str(caught.value) == "the command ended with exit code 3: two"
    assert caught.value.result.exit_code == 3


def test_check_tells_a_time_limit_from_a_failure() -> None:
    with pytest.raises(CommandTimeout):
        result(Reason.TIMED_OUT, -9, signal=9).check()


@pytest.mark.parametrize("reason", [each for each in Reason if each is not Reason.EXITED])
def test_no_other_reason_is_ok_whatever_the_code(reason: Reason) -> None:
    assert not result(reason).ok
    with pytest.raises((CommandFailed, CommandTimeout)):
        result(reason).check()


def test_a_signal_is_named() -> None:
    with pytest.raises(CommandFailed, match="SIGSEGV"):
        result(Reason.SIGNALED, -11, signal=11).check()


def test_bytes_that_are_not_text_are_replaced() -> None:
    assert result(stderr=b"a\xffb").stderr == "a\ufffdb"


@pytest.mark.parametrize(
    "wrong",
    [
        {"argv": ()},
        {"argv": ("",)},
        {"argv": ("a\0b",)},
        {"argv": (b"a\0b",)},
        {"argv": ("a",), "env": {"A=B": "1"}},
        {"argv": ("a",), "env": {"A": "1\0"}},
        {"argv": ("a",), "env": {"": "1"}},
        {"argv": ("a",), "working_dir": "/\0"},
        {"argv": ("a",), "timeout_s": 0},
        {"argv": ("a",), "timeout_s": float("nan")},
        {"argv": ("a",), "drain_s": -1},
        {"argv": ("a",), "tty": (-1, 80)},
    ],
)
def test_what_no_sandbox_could_do_is_refused_at_once(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        CommandSpec(**wrong)  # type: ignore[arg-type]
