"""Output: bytes come back as they were printed, bounded where nobody could take them all."""

from __future__ import annotations

import time

import pytest
from tests.conformance.conftest import Pace
from tests.conformance.inside import processes, python

from worldfork import CommandExitReason, Sandbox


@pytest.mark.behaviour("output-1")
def test_bytes_come_back_exactly(box: Sandbox) -> None:
    every = bytes(range(256)) * 3
    result = box.run("python", ["-c", "import sys; sys.stdout.buffer.write(bytes(range(256)) * 3)"])
    assert result.stdout_bytes == every
    assert result.stdout == every.decode("utf-8", "replace")
    assert "�" in result.stdout
    assert box.run("printf", ["no line end\\r\\n\\n"]).stdout == "no line end\r\n\n"


@pytest.mark.behaviour("output-2")
def test_characters_are_whole_across_pieces(box: Sandbox) -> None:
    # One byte first, so that no piece of a power of two ends between two characters.
    text = "x" + "😀" * 200_000
    box.write_file("/tmp/faces", text)
    assert box.run("cat", ["/tmp/faces"]).stdout == text
    program = (
        "import sys\n"
        "for byte in 'é😀'.encode() * 50:\n"
        "    sys.stdout.buffer.write(bytes([byte]))\n"
        "    sys.stdout.buffer.flush()\n"
    )
    assert python(box, program) == "é😀" * 50
    assert box.sh("cat /tmp/faces", max_output_bytes=2_000_000).stdout == text


@pytest.mark.behaviour("output-3")
def test_both_streams_at_once_and_apart(box: Sandbox) -> None:
    program = (
        "import os, threading\n"
        "def pour(fd, byte):\n"
        "    for _ in range(128):\n"
        "        data = byte * 65536\n"
        "        while data:\n"
        "            data = data[os.write(fd, data):]\n"
        "both = [threading.Thread(target=pour, args=pair) for pair in ((1, b'o'), (2, b'e'))]\n"
        "[thread.start() for thread in both]\n"
        "[thread.join() for thread in both]\n"
    )
    result = box.run("python", ["-c", program], timeout=30)
    assert result.exit_code == 0
    assert result.stdout_bytes == b"o" * (128 * 65536)
    assert result.stderr_bytes == b"e" * (128 * 65536)


@pytest.mark.behaviour("output-4")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_ends_at_its_limit(box: Sandbox, stream: str) -> None:
    line = "setsid yes & exec yes" if stream == "stdout" else "setsid yes >&2 & exec yes >&2"
    result = box.run("sh", ["-c", line], max_output_bytes=100_001, timeout=30)
    assert (result.reason, result.ok) == (CommandExitReason.OUTPUT_LIMIT, False)
    kept = getattr(result, f"{stream}_bytes")
    assert kept == (b"y\n" * 50_001)[:100_001]
    assert getattr(result, f"{stream}_dropped_bytes") > 0
    assert processes(box) == 0


@pytest.mark.behaviour("output-4")
def test_output_up_to_the_limit_is_no_matter(box: Sandbox) -> None:
    result = box.run("head", ["-c", "100000", "/dev/zero"], max_output_bytes=100_000)
    assert (result.reason, len(result.stdout_bytes), result.stdout_dropped_bytes) == (
        CommandExitReason.EXITED, 100_000, 0,
    )  # fmt: skip


@pytest.mark.behaviour("output-5")
def test_the_shell_merges_in_the_order_written(box: Sandbox) -> None:
    result = box.sh("for i in 1 2 3 4 5; do echo out $i; echo err $i >&2; done")
    assert result.stdout == "".join(f"out {i}\nerr {i}\n" for i in range(1, 6))
    assert result.stderr == ""


@pytest.mark.behaviour("output-6")
def test_the_shell_keeps_head_and_tail(box: Sandbox) -> None:
    result = box.sh("echo first; seq 1000000; echo last; exit 3", max_output_bytes=10_000)
    total = len("first\n") + len("last\n") + sum(len(str(n)) + 1 for n in range(1, 1_000_001))
    assert (result.exit_code, result.reason) == (3, CommandExitReason.EXITED)
    assert result.stdout.startswith("first\n1\n2\n3\n")
    assert result.stdout.endswith("\n999999\n1000000\nlast\n")
    assert f"{result.stdout_dropped_bytes} bytes left out" in result.stdout
    assert 10_000 - 4 <= total - result.stdout_dropped_bytes <= 10_000
    assert len(result.stdout_bytes) < 10_100
    assert len(box.sh("seq 1000000").stdout_bytes) < 65 * 1024


@pytest.mark.behaviour("output-6")
def test_the_cut_falls_between_characters(box: Sandbox) -> None:
    for cap in range(1000, 1005):
        result = box.sh("printf '😀%.0s' $(seq 3000)", max_output_bytes=cap)
        head, tail = result.stdout.split("\n[... ")
        assert set(head) == {"😀"}
        assert set(tail.partition("...]\n")[2]) == {"😀"}
        assert b"\xef\xbf\xbd" not in result.stdout_bytes


@pytest.mark.behaviour("output-7")
def test_a_time_limit_and_endless_output_together(box: Sandbox, pace: Pace) -> None:
    result = box.sh("echo begin; yes", timeout=pace.seconds(0.5), max_output_bytes=1000)
    assert result.reason is CommandExitReason.TIMED_OUT
    assert result.stdout.startswith("begin\ny\ny\n")
    assert result.stdout.endswith("y\n")
    assert processes(box) == 0


@pytest.mark.behaviour("output-8")
def test_a_command_that_nobody_reads_waits_alone(box: Sandbox, pace: Pace) -> None:
    loud = box.start_process("sh", ["-c", "yes & wait"], stdout_mode="capture")
    lines = box.follow_output(loud.pid)
    assert next(lines).line == "y"
    # Nobody takes the rest; the others are as quick as before.
    began = time.monotonic()
    assert [box.run("echo", [str(number)]).stdout for number in range(20)] == [f"{number}\n" for number in range(20)]
    assert time.monotonic() - began < pace.seconds(10)
    lines.close()  # type: ignore[attr-defined]  # a generator
    box.kill_process(loud.pid)
    assert processes(box) == 0
