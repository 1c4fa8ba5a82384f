"""The codec: frames survive any cut of the stream, and nonsense is told."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldfork.core.errors import ConfigError
from worldfork.sandbox import replies, wire
from worldfork.sandbox.command import CommandSpec

frames = st.builds(
    wire.Frame, st.integers(1, 200), st.integers(0, 65535), st.integers(0, 2**32 - 1), st.binary(max_size=300)
)


def encoded(frame: wire.Frame) -> bytes:
    return wire.frame(frame.kind, frame.channel, frame.payload, frame.flags)


@given(st.lists(frames, max_size=6), st.lists(st.integers(0, 2000), max_size=8))
def test_frames_survive_any_cut(sent: list[wire.Frame], cuts: list[int]) -> None:
    stream = b"".join(map(encoded, sent))
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader = wire.FrameReader()
    received = [frame for start, end in itertools.pairwise(edges) for frame in reader.feed(stream[start:end])]
    assert received == sent


def test_frames_survive_one_byte_at_a_time() -> None:
    sent = [wire.Frame(103, 0, 5, b"abc"), wire.Frame(105, 1, 2**32 - 1, b""), wire.Frame(104, 0, 1, b"\0" * 40)]
    reader = wire.FrameReader()
    received = [f for byte in b"".join(map(encoded, sent)) for f in reader.feed(bytes([byte]))]
    assert received == sent


@given(st.binary(max_size=200))
def test_noise_is_frames_or_malformed_and_nothing_else(noise: bytes) -> None:
    try:
        for frame in wire.FrameReader().feed(noise):
            assert len(frame.payload) <= wire.MAX_PAYLOAD_BYTES
    except wire.MalformedFrame:
        pass


def test_a_frame_that_announces_too_much_is_malformed() -> None:
    reader = wire.FrameReader()
    assert reader.feed(struct.pack("<IHHI", wire.MAX_PAYLOAD_BYTES, 103, 0, 1)) == []
    with pytest.raises(wire.MalformedFrame):
        wire.FrameReader().feed(struct.pack("<IHHI", wire.MAX_PAYLOAD_BYTES + 1, 103, 0, 1))


def test_exec_carries_every_field() -> None:
    spec = CommandSpec(
        ("echo", b"\xff", "ü"),
        env={"A": "1=2"},
        working_dir="/w",
        user="10:20",
        stdin=True,
        merge=True,
        tty=(24, 80),
        keep=True,
        timeout_s=1.5,
        drain_s=0.25,
        rlimits=((7, 10, -1),),
        discard_stderr=True,
    )
    (frame,) = wire.FrameReader().feed(wire.exec_frame(9, spec, 4096))
    assert (frame.kind, frame.channel) == (wire.EXEC, 9)
    cursor = wire.Cursor(frame.payload)
    assert cursor.take(struct.Struct("<IIQI")) == (1 | 2 | 4 | 16 | 64, 4096, 1500, 250)
    assert (cursor.text(), cursor.text()) == ("10:20", "/w")
    assert cursor.take(struct.Struct("<HHI")) == (24, 80, 1)
    assert cursor.take(struct.Struct("<IQQ")) == (7, 10, 2**64 - 1)
    assert [cursor.raw_text() for _ in range(cursor.u32())] == [b"echo", b"\xff", "ü".encode()]
    assert [cursor.raw_text() for _ in range(cursor.u32())] == [b"A=1=2"]
    assert cursor.at_end


def test_the_shortest_time_limit_is_not_none() -> None:
    (frame,) = wire.FrameReader().feed(wire.exec_frame(1, CommandSpec(("x",), timeout_s=1e-9), 0))
    assert wire.Cursor(frame.payload).take(struct.Struct("<IIQI"))[2] == 1


def test_a_command_too_large_to_send_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        wire.exec_frame(1, CommandSpec(("x", "a" * wire.MAX_EXEC_BYTES)), 0)
    assert "file" in caught.value.remedy


@pytest.mark.parametrize(
    "read",
    [replies.read_processes, replies.read_info, replies.read_hold, replies.read_account, replies.read_mapped],
)
def test_short_answers_are_malformed(read: object) -> None:
    with pytest.raises(wire.MalformedFrame):
        read(b"\1\0\0")  # type: ignore[operator]


@given(st.binary(max_size=120))
def test_listings_of_noise_are_malformed_or_read(noise: bytes) -> None:
    try:
        replies.read_files(noise)
    except wire.MalformedFrame:
        pass


def test_a_listing_keeps_names_that_are_not_text() -> None:
    data = struct.pack("<BIIIQqQI", ord("l"), 0o120777, 1, 2, 3, -5, 6, 1) + wire.text(b"\xff") + wire.text(b"/a")
    (record,) = replies.read_files(data)
    assert (record.kind, record.mode, record.mtime_ns, record.name, record.target) == ("l", 0o777, -5, "\udcff", "/a")


def test_a_listed_process_that_runs_has_no_exit_code() -> None:
    one = struct.pack("<IBBBxiiQQ", 5, 0, 1, 1, 0, 0, 1500, 0) + struct.pack("<I", 1) + wire.text("x")
    two = struct.pack("<IBBBxiiQQ", 6, 2, 1, 0, -9, 9, 1500, 2500) + struct.pack("<I", 0)
    first, second = replies.read_processes(struct.pack("<I", 2) + one + two)
    assert (first.status, first.exit_code, first.ended_s, first.argv) == ("running", None, None, ("x",))
    assert (second.status, second.exit_code, second.signal, second.ended_s) == ("signaled", -9, 9, 2.5)
