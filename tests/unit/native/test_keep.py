"""`wf-init keep` with a stand-in for the virtual machine: what it relays, and what ends it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.native import stand_in

from worldfork.records.sandbox import Limits
from worldfork.sandbox import wire as sandbox_wire
from worldfork.sandbox.cgroups import detect_layout
from worldfork.sandbox.microvm import wire
from worldfork.sandbox.microvm.wire import Kind, Op, Target
from worldfork.sandbox.program import encode_plan, spawn

STAND_IN = Path(stand_in.__file__)
WAIT_S = 20


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError(data)
        data += piece
    return data


class Control:
    """A client of `control`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, kind: int, payload: bytes = b"") -> None:
        self.sock.sendall(wire.frame(kind, 0, payload))

    def receive(self) -> tuple[int, bytes]:
        size, kind, _ = wire.HEADER.unpack(exactly(self.sock, wire.HEADER.size))
        return kind, exactly(self.sock, size)

    def ask(self, op: int, body: bytes = b"", tag: int = 77) -> wire.ControlMessage:
        self.sock.sendall(wire.control(op, tag, body))
        kind, payload = self.receive()
        assert kind == Kind.CONTROL
        return wire.read_control(payload)


class Keep:
    """A running `keep`."""

    def __init__(self, run: Path, owner: int, program: str, *items: tuple[str, str]) -> None:
        self.run = run
        plan = [
            ("id", "sb-keep"), ("run", str(run)), ("lock", str(run / "lock")),
            ("agent", "16"), ("qmp", "17"), ("generation", "5"), ("env", "WORD=here"),
            *[("arg", word) for word in (program, "-I", "-S", "-c", STAND_IN.read_text())],
            *items,
        ]  # fmt: skip
        self.pid, self.start = spawn("keep", encode_plan(plan), {4: owner})
        self.start.settimeout(WAIT_S)
        self.reaped: int | None = None
        self.machine = 0
        self.socks: list[socket.socket] = []

    def frame(self) -> tuple[int, bytes]:
        size, kind = struct.unpack_from("<IH", exactly(self.start, 12))
        return kind, exactly(self.start, size)

    def ready(self) -> None:
        kind, payload = self.frame()
        assert kind == wire.LAUNCHED
        self.machine = struct.unpack("<I", payload)[0]
        assert self.frame() == (wire.READY, struct.pack("<I", 5))

    def connect(self, name: str = "sock") -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        self.socks.append(sock)
        sock.settimeout(WAIT_S)
        sock.connect(str(self.run / name))
        return sock

    def control(self) -> Control:
        return Control(self.connect("control"))

    def code(self) -> int:
        if self.reaped is None:
            killer = threading.Timer(WAIT_S, os.kill, (self.pid, signal.SIGKILL))
            killer.start()
            try:
                self.reaped = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            finally:
                killer.cancel()
        return self.reaped


Start = Callable[..., Keep]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Keep] = []

    def go(*items: tuple[str, str], owner: int | None = None, program: str = sys.executable) -> Keep:
        run = tmp_path / f"r{len(started)}"
        run.mkdir(mode=0o700)
        own = os.pidfd_open(os.getpid()) if owner is None else owner
        try:
            keep = Keep(run, own, program, *items)
        finally:
            if owner is None:
                os.close(own)
        started.append(keep)
        return keep

    yield go
    for keep in started:
        for sock in (keep.start, *keep.socks):
            sock.close()
        with contextlib.suppress(ProcessLookupError):
            if keep.reaped is None:
                os.kill(keep.pid, signal.SIGKILL)
        keep.code()


@pytest.fixture
def keep(start: Start) -> Keep:
    keep = start()
    keep.ready()
    return keep


def gone(pid: int) -> bool:
    """Whether a process has ended within the time given; its pidfd tells."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(WAIT_S * 1000))
    finally:
        os.close(fd)


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


def test_while_quiet_nothing_passes_and_then_everything(keep: Keep) -> None:
    holder, other = keep.control(), keep.control()
    stream = keep.connect()
    stream.sendall(b"before")
    assert exactly(stream, 6) == b"before"
    holder.send(Kind.QUIESCE)
    assert holder.receive() == (Kind.QUIET, b"")
    stream.sendall(b"meanwhile")
    other.sock.sendall(wire.control(Op.STATS, 3, b"asked"))
    stream.settimeout(0.2)
    with pytest.raises(TimeoutError):
        stream.recv(1)
    stream.settimeout(WAIT_S)
    holder.send(Kind.GO)
    assert holder.receive() == (Kind.GO, b"")
    assert exactly(stream, 9) == b"meanwhile"
    assert wire.read_control(other.receive()[1]).body == b"asked"


def test_the_end_of_the_one_who_asked_for_quiet_is_a_go(keep: Keep) -> None:
    for early in (False, True):
        holder = keep.control()
        holder.send(Kind.QUIESCE)
        if not early:
            assert holder.receive() == (Kind.QUIET, b"")
        holder.sock.close()
        assert keep.control().ask(Op.STATS, b"goes on").body == b"goes on"


def orders(keep: Keep) -> list[str]:
    told: list[str] = json.loads(keep.control().ask(stand_in.ORDERS).body)
    return told


def test_a_machine_that_a_dead_client_stopped_runs_again_before_anybody_is_heard(start: Start) -> None:
    keep = start(("env", "REFUSALS=2"))
    keep.ready()
    holder = keep.control()
    holder.send(Kind.QUIESCE)
    assert holder.receive() == (Kind.QUIET, b"")
    other = keep.control()
    other.send(Kind.QUIESCE)
    holder.sock.close()
    assert other.receive() == (Kind.QUIET, b""), "it waited for its turn"
    other.send(Kind.GO)
    assert other.receive() == (Kind.GO, b"")
    assert orders(keep) == ["qmp_capabilities", "cont"] * 3, "it is told until it does it, and then no more"


def test_who_says_go_has_let_the_machine_run_and_keep_orders_nothing(keep: Keep) -> None:
    holder = keep.control()
    holder.send(Kind.QUIESCE)
    assert holder.receive() == (Kind.QUIET, b"")
    holder.send(Kind.GO)
    assert holder.receive() == (Kind.GO, b"")
    holder.sock.close()
    assert orders(keep) == []


def test_a_monitor_that_another_still_has_is_waited_for(keep: Keep) -> None:
    with keep.connect("qmp") as monitor, monitor.makefile("r") as lines:
        lines.readline()
        holder = keep.control()
        holder.send(Kind.QUIESCE)
        holder.sock.close()
        waiting = keep.control()
        waiting.sock.sendall(wire.control(stand_in.ORDERS, 1))
        waiting.sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            waiting.receive()
    waiting.sock.settimeout(WAIT_S)
    assert json.loads(wire.read_control(waiting.receive()[1]).body) == ["qmp_capabilities", "cont"]


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


def test_the_end_of_the_owner_is_the_end(start: Start) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fd = os.pidfd_open(owner.pid)
    keep = start(owner=fd)
    os.close(fd)
    keep.ready()
    owner.communicate(b"\n")
    assert keep.code() == 0
    assert gone(keep.machine)


def test_one_that_is_detached_outlives_its_owner_until_its_time_is_over(start: Start) -> None:
    keep = start(("detached", "1"), ("lifetime_ms", "1500"))
    keep.ready()
    keep.start.close()
    assert keep.control().ask(Op.STATS, b"there").body == b"there"
    assert keep.code() == 2
    assert gone(keep.machine)


def test_a_killed_keep_takes_the_machine_along(keep: Keep) -> None:
    os.kill(keep.pid, signal.SIGKILL)
    assert keep.code() == -signal.SIGKILL
    assert gone(keep.machine)


def test_a_program_that_is_not_there_is_told(start: Start) -> None:
    keep = start(program="/nope")
    said = [keep.frame() for _ in range(2)]
    told = next(payload for kind, payload in said if kind == sandbox_wire.ERROR)
    assert sandbox_wire.read_error(told) == (errno.ENOENT, "keep: running /nope")
    assert keep.code() == wire.KeepEnd.MACHINE


def test_a_program_that_would_be_looked_for_is_refused(start: Start) -> None:
    keep = start(program="python3")
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
def test_the_machine_runs_as_who_it_is_told_and_still_ends_with_keep(start: Start) -> None:
    keep = start(("uid", "65534"), ("gid", "65534"), program="/usr/bin/python3")
    keep.ready()
    assert keep.control().ask(Op.STATS, b"there").body == b"there"
    status = dict(line.split(":", 1) for line in Path(f"/proc/{keep.machine}/status").read_text().splitlines())
    assert status["Uid"].split() == status["Gid"].split() == ["65534"] * 4
    assert (status["Groups"].split(), status["CapEff"].strip(), status["NoNewPrivs"].strip()) == ([], "0" * 16, "1")
    os.kill(keep.pid, signal.SIGKILL)
    assert gone(keep.machine)


@pytest.mark.skipif(not detect_layout().limited, reason="no cgroup can be written here")
def test_the_machine_is_in_its_cgroups_and_keep_is_not(start: Start) -> None:
    layout, name = detect_layout(), f"sb-keep-{os.getpid()}"
    keep = start(*layout.items(name, Limits(memory_mb=512)))
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
