"""A machine's program in the hands of its guest, before the `keep` that holds it: it goes when it is to go."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.native import keeping
from tests.unit.native.conftest import start_keep
from tests.unit.native.keeping import Keep, Start, gone
from tests.unit.sandbox.microvm import stand_ins

from worldfork.sandbox.cgroups import detect_layout, remove_groups
from worldfork.sandbox.microvm import wire
from worldfork.sandbox.microvm.ending import end_machine
from worldfork.sandbox.microvm.manifest import Running, write_running
from worldfork.sandbox.microvm.wire import Kind, Op

__all__ = ["start_keep"]

pytestmark = pytest.mark.slow

HOSTILE = """
import os, socket, struct, sys, threading
sock = socket.socket(fileno=16)
def framed(kind, payload=b"", stream=0):
    return struct.pack("<IHH", len(payload), kind, stream) + payload
def frame(*what):
    sock.sendall(framed(*what))
def shout():
    block = b"x" * 65536
    while True:
        os.write(2, block)
def take():
    head = sock.recv(8, socket.MSG_WAITALL)
    if len(head) < 8:
        sys.exit(0)
    size, kind, stream = struct.unpack("<IHH", head)
    return kind, stream, sock.recv(size, socket.MSG_WAITALL) if size else b""
how = os.environ["HOW"]
if how == "silent":
    threading.Event().wait()
hello = framed(9, take()[2])
if how == "early":
    # In one piece, so that they are there before anybody can ask.
    for tag in range(1, 200):
        hello += framed(5, struct.pack("<HHIi", 4, 0, tag, 0) + b"forged")
sock.sendall(hello)
if how == "loud":
    for _ in range(4):
        threading.Thread(target=shout, daemon=True).start()
if how == "flood":
    answer = struct.pack("<HHIi", 4, 0, 99, 0) + bytes(60000)
    while True:
        frame(5, answer)
if how == "half":
    sock.sendall(struct.pack("<IHH", 60000, 5, 0) + b"and no more")
if how.startswith("says "):
    sock.sendall(bytes.fromhex(how[5:]))
if how == "deaf":
    threading.Event().wait()
while True:
    kind, stream, payload = take()
    if kind == 5 and how != "half":
        op, _, tag, _ = struct.unpack_from("<HHIi", payload)
        answer = struct.pack("<HHIi", op, 0, tag, 0) + b"true"
        frame(5, answer)
        frame(5, answer)
"""


@pytest.fixture(autouse=True)
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE, encoding="utf-8")
    monkeypatch.setattr(keeping, "STAND_IN", path)


def begun(start_keep: Start, how: str) -> Keep:
    keep = start_keep(("env", f"HOW={how}"), program=sys.executable)
    kind, payload = keep.frame()
    assert kind == wire.LAUNCHED
    keep.machine = struct.unpack("<I", payload)[0]
    return keep


@pytest.mark.parametrize("how", ["silent", "loud", "flood", "half", "deaf", "early"])
def test_the_end_of_its_owner_is_its_end_whatever_it_does(start_keep: Start, how: str) -> None:
    keep = begun(start_keep, how)
    if how != "silent":
        assert keep.frame()[0] == wire.READY
    keep.start.close()
    assert gone(keep.machine)
    assert keep.code() == 0


@pytest.mark.parametrize("how", ["loud", "flood", "deaf"])
def test_the_end_of_its_time_is_its_end_whatever_it_does(start_keep: Start, how: str) -> None:
    keep = start_keep(("env", f"HOW={how}"), ("lifetime_ms", "1500"), program=sys.executable)
    assert keep.code() == 2


def test_answers_that_come_before_their_request_and_twice_are_nobodys(start_keep: Start) -> None:
    keep = begun(start_keep, "early")
    assert keep.frame()[0] == wire.READY
    for tag in (7, 8, 9):
        answer = keep.control().ask(Op.STATS, tag=tag)
        assert (answer.tag, answer.body) == (tag, b"true")


@pytest.mark.parametrize("seed", range(40))
def test_whatever_it_says_is_taken_or_ends_it(start_keep: Start, seed: int) -> None:
    chance = random.Random(seed)
    said = b""
    for _ in range(chance.randrange(1, 6)):
        kind = chance.choice([*map(int, Kind), 0, 99])
        payload = chance.randbytes(chance.choice([0, 1, 2, 4, 12, 16, 40]))
        if kind == Kind.CONTROL and chance.random() < 0.5:
            payload = struct.pack("<HHIii", Op.ENDED, 0, 0, 0, chance.choice([0, 2, 5, 256, 265, -1, 2**31 - 1]))
        said += struct.pack("<IHH", len(payload), kind, chance.choice([0, 1, 65535])) + payload
    keep = begun(start_keep, f"says {said.hex()}")
    keep.frame()
    keep.start.close()
    assert keep.code() in {0, 1, 2, *map(int, wire.KeepEnd)}, "it broke"
    assert gone(keep.machine)


def test_a_killed_keep_takes_it_along(start_keep: Start) -> None:
    keep = begun(start_keep, "loud")
    assert keep.frame()[0] == wire.READY
    os.kill(keep.pid, signal.SIGKILL)
    assert keep.code() == -signal.SIGKILL
    assert gone(keep.machine)


def known(keep: Keep, pid: int) -> str:
    write_running(keep.run, Running(pid, 18, str(keep.run), 5, "none", stand_ins.BUILD, ((), (), ())))
    return str(keep.run)


@pytest.mark.parametrize("how", ["loud", "deaf", "half"])
def test_who_did_not_start_it_can_end_it_though_its_guest_does_nothing(start_keep: Start, how: str) -> None:
    keep = begun(start_keep, how)
    assert keep.frame()[0] == wire.READY
    end_machine(known(keep, keep.machine))
    assert keep.code() == wire.KeepEnd.MACHINE
    assert gone(keep.machine)


def test_a_process_that_is_no_machine_of_this_keep_is_left_alone(start_keep: Start) -> None:
    keep = begun(start_keep, "early")
    assert keep.frame()[0] == wire.READY
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        end_machine(known(keep, other.pid))
        other.communicate(b"\n", timeout=20)
        assert other.returncode == 0
    assert keep.control().ask(Op.STATS).body == b"true"


@pytest.mark.root
def test_one_that_outlives_its_keep_goes_with_its_groups() -> None:
    layout = detect_layout()
    if not layout.limited:
        pytest.skip("this machine gives out no groups")
    groups = layout.directories("sb-outlives")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as left:
        for group in groups:
            Path(group).mkdir()
            Path(group, "cgroup.procs").write_text(str(left.pid), encoding="ascii")
        assert remove_groups(groups) == []
        assert left.wait(20) == -signal.SIGKILL
