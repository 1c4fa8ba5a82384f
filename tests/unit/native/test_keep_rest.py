"""`wf-init keep` while a client lets its machine rest, and after one that did has gone."""

from __future__ import annotations

import json

import pytest
from tests.unit.native import stand_in
from tests.unit.native.keeping import WAIT_S, Keep, Start, exactly

from worldfork.sandbox.microvm import wire
from worldfork.sandbox.microvm.wire import Kind, Op


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


def test_a_machine_that_a_dead_client_stopped_runs_again_before_anybody_is_heard(start_keep: Start) -> None:
    keep = start_keep(("env", "REFUSALS=2"))
    keep.ready()
    holder = keep.control()
    holder.send(Kind.QUIESCE)
    assert holder.receive() == (Kind.QUIET, b"")
    other = keep.control()
    other.send(Kind.QUIESCE)
    other.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        other.receive()
    other.sock.settimeout(WAIT_S)
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
