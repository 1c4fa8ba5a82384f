"""`wf-init keep` with a stand-in for the virtual machine: what it relays, and what ends it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.unit.native import stand_in
from tests.unit.native.keeping import Keep, Start, exactly, gone

from worldfork.records.sandbox import Limits
from worldfork.sandbox import wire as sandbox_wire
from worldfork.sandbox.cgroups import detect_layout
from worldfork.sandbox.microvm import wire
from worldfork.sandbox.microvm.wire import Kind, Op, Target


def test_connections_are_streams_of_their_own(keep: Keep) -> None:
    socks = [keep.connect() for _ in range(20)]
    for number, sock in enumerate(socks):
        sock.sendall(b"%d" % number * 1000)
    for number, sock in enumerate(socks):
        wanted = b"%d" % number * 1000
        assert exactly(sock, len(wanted)) == wanted
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
        sock.close()


def test_more_than_a_window_passes_whole_both_ways(keep: Keep) -> None:
    sent = os.urandom(5_000_000)
    with keep.connect() as sock:
        writer = threading.Thread(target=sock.sendall, args=(sent,))
        writer.start()
        assert exactly(sock, len(sent)) == sent
        writer.join()


def test_one_that_does_not_read_holds_up_nobody_else(keep: Keep) -> None:
    with keep.connect() as full, keep.connect() as other:
        full.setblocking(False)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while sent < 50_000_000:
                sent += full.send(b"x" * 65536)
        assert sent < 50_000_000
        other.sendall(b"hello")
        assert exactly(other, 5) == b"hello"


def test_requests_are_answered_to_the_one_who_asked(keep: Keep) -> None:
    one, two = keep.control(), keep.control()
    one.sock.sendall(wire.control(Op.STATS, 1, b"one"))
    two.sock.sendall(wire.control(Op.STATS, 1, b"two"))
    for client, body in ((two, b"two"), (one, b"one")):
        assert wire.read_control(client.receive()[1]) == wire.ControlMessage(Op.STATS, 1, 0, body)


def test_a_control_connection_becomes_a_stream(keep: Keep) -> None:
    client = keep.control()
    client.sock.sendall(wire.frame(Kind.OPEN, 0, wire.open_payload(Target.EXPORT, b"/x")) + b"at once")
    assert exactly(client.sock, 7) == b"at once"


@pytest.mark.parametrize(
    "bad", [wire.frame(Kind.DATA), wire.frame(Kind.CONTROL, 0, b"short"), wire.frame(Kind.GO), b"\xff" * 8]
)
def test_a_client_that_breaks_the_rules_loses_its_connection_alone(keep: Keep, bad: bytes) -> None:
    client = keep.control()
    client.sock.sendall(bad)
    assert client.sock.recv(1) == b""
    assert keep.control().ask(Op.STATS, b"still there").body == b"still there"


def test_the_machine_gets_what_it_was_given_and_no_more(keep: Keep) -> None:
    fds, environ, leads = eval(keep.control().ask(stand_in.TELL).body)
    assert set(fds) - {"3"} == {"0", "1", "2", "16", "17"}, "3 is the directory that it lists"
    assert environ.get("WORD") == "here"
    assert set(environ) <= {"WORD", "LC_CTYPE"}
    assert leads


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 1), (2, 2), (77, 1), (256 + 9, wire.KeepEnd.INIT)])
def test_the_end_inside_is_its_exit(keep: Keep, status: int, code: int) -> None:
    keep.control().sock.sendall(wire.control(stand_in.END, 1, struct.pack("<i", status)))
    assert keep.code() == code
    assert gone(keep.machine)


def test_a_machine_that_ends_says_its_last_words(keep: Keep) -> None:
    keep.control().sock.sendall(wire.control(stand_in.DIE, 1))
    kind, payload = keep.frame()
    assert (kind, sandbox_wire.read_error(payload)[1]) == (
        sandbox_wire.ERROR,
        "keep: the machine ended: the machine is on fire\n",
    )
    assert keep.code() == wire.KeepEnd.MACHINE


def test_a_machine_killed_from_outside(keep: Keep) -> None:
    os.kill(keep.machine, signal.SIGKILL)
    assert keep.code() == wire.KeepEnd.MACHINE


@pytest.mark.parametrize(
    "bytes_sent",
    [b"\xff" * 64, wire.frame(Kind.DATA, 9, b"x"), wire.frame(Kind.QUIET), wire.frame(Kind.OPEN, 1, b"\0\0")],
    ids=["garbage", "no stream", "quiet unasked", "open"],
)
def test_a_guest_that_breaks_the_rules_ends(keep: Keep, bytes_sent: bytes) -> None:
    keep.control().sock.sendall(wire.control(stand_in.GARBAGE, 1, bytes_sent))
    assert keep.code() == wire.KeepEnd.GUEST
    assert gone(keep.machine)


def test_the_end_of_the_leash_is_the_end(keep: Keep) -> None:
    keep.start.close()
    assert keep.code() == 0
    assert gone(keep.machine)


def test_the_end_of_the_owner_is_the_end(start_keep: Start) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fd = os.pidfd_open(owner.pid)
    keep = start_keep(owner=fd)
    os.close(fd)
    keep.ready()
    owner.communicate(b"\n")
    assert keep.code() == 0
    assert gone(keep.machine)


def test_one_that_is_detached_outlives_its_owner_until_its_time_is_over(start_keep: Start) -> None:
    keep = start_keep(("detached", "1"), ("lifetime_ms", "1500"))
    keep.ready()
    keep.start.close()
    assert keep.control().ask(Op.STATS, b"there").body == b"there"
    assert keep.code() == 2
    assert gone(keep.machine)


def test_a_killed_keep_takes_the_machine_along(keep: Keep) -> None:
    os.kill(keep.pid, signal.SIGKILL)
    assert keep.code() == -signal.SIGKILL
    assert gone(keep.machine)


def test_a_program_that_is_not_there_is_told(start_keep: Start) -> None:
    keep = start_keep(program="/nope")
    said = [keep.frame() for _ in range(2)]
    told = next(payload for kind, payload in said if kind == sandbox_wire.ERROR)
    assert sandbox_wire.read_error(told) == (errno.ENOENT, "keep: running /nope")
    assert keep.code() == wire.KeepEnd.MACHINE


def test_a_program_that_would_be_looked_for_is_refused(start_keep: Start) -> None:
    keep = start_keep(program="python3")
    said = [keep.frame() for _ in range(2)]
    told = next(payload for kind, payload in said if kind == sandbox_wire.ERROR)
    number, text = sandbox_wire.read_error(told)
    assert (number, text) == (errno.EINVAL, "keep: the machine's program is no absolute path: python3")


def test_the_lock_is_held_and_taken_once(keep: Keep) -> None:
    with open(keep.run / "lock", "r+b") as file, pytest.raises(BlockingIOError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_sockets_are_for_the_owner_alone(keep: Keep) -> None:
    for name in ("sock", "control", "qmp"):
        assert (keep.run / name).stat().st_mode & 0o077 == 0


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/usr/bin/python3"), reason="takes root, and a Python that anybody may run"
)
def test_the_machine_runs_as_who_it_is_told_and_still_ends_with_keep(start_keep: Start) -> None:
    keep = start_keep(("uid", "65534"), ("gid", "65534"), program="/usr/bin/python3")
    keep.ready()
    assert keep.control().ask(Op.STATS, b"there").body == b"there"
    status = dict(line.split(":", 1) for line in Path(f"/proc/{keep.machine}/status").read_text().splitlines())
    assert status["Uid"].split() == status["Gid"].split() == ["65534"] * 4
    assert (status["Groups"].split(), status["CapEff"].strip(), status["NoNewPrivs"].strip()) == ([], "0" * 16, "1")
    os.kill(keep.pid, signal.SIGKILL)
    assert gone(keep.machine)


@pytest.mark.skipif(not detect_layout().limited, reason="no cgroup can be written here")
def test_the_machine_is_in_its_cgroups_and_keep_is_not(start_keep: Start) -> None:
    layout, name = detect_layout(), f"sb-keep-{os.getpid()}"
    keep = start_keep(*layout.items(name, Limits(memory_mb=512)))
    try:
        keep.ready()
        assert name in Path(f"/proc/{keep.machine}/cgroup").read_text()
        assert name not in Path(f"/proc/{keep.pid}/cgroup").read_text()
    finally:
        os.kill(keep.pid, signal.SIGKILL)
        keep.code()
        assert gone(keep.machine)
        for directory in layout.directories(name):
            os.rmdir(directory)


def test_the_header_and_its_twin_say_the_same() -> None:
    header = (Path(__file__).resolve().parents[3] / "native" / "mux.h").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"\b([A-Z_]+) = (\d+)\b", header)}
    for op in Op:
        assert numbers[f"OP_{op.name}"] == op
    for target in Target:
        assert numbers[f"TO_{target.name}"] == target
    for kind in Kind:
        assert numbers["MUX_DATA_FRAME" if kind is Kind.DATA else f"MUX_{kind.name}"] == kind
    assert numbers["MUX_ENTROPY"] == wire.ENTROPY_BYTES_MAX
    assert wire.EXPORT_HEAD.size == 64
