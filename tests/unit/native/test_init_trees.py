"""PID 1: what is killed with a command, what lives on, and what it does about both."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.native import raw_client as raw
from tests.unit.native.raw_client import Init, RawClient, u32, wait_until

pytestmark = pytest.mark.sandbox

FLEEING = "setsid sh -c 'sleep 600 & (sleep 600 &) ; sleep 600' & (setsid sleep 600 &) ; echo partial; sleep 600"
"""A tree with sessions of its own and double forks."""


def ended_by(client: RawClient, channel: int) -> int:
    """The pid that STARTED tells."""
    kind, _, payload = client.frame(channel)
    assert kind == raw.STARTED, payload
    return int.from_bytes(payload, "little")


def is_gone(pid: int) -> bool:
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_a_time_limit_kills_the_whole_tree(client: RawClient) -> None:
    began = time.monotonic()
    done = client.sh(FLEEING, timeout_ms=200)
    assert (done.reason, done.code, done.out) == ("timeout", -9, b"partial\n")
    assert time.monotonic() - began < 3
    assert client.inside() == 0


def test_a_cancelled_tree_is_gone_with_its_end(client: RawClient) -> None:
    channel = client.start(["sh", "-c", f"trap '' TERM; {FLEEING}"])
    ended_by(client, channel)
    assert client.frame(channel)[2] == b"partial\n"
    assert client.kill(channel).reason == "cancelled"
    assert client.inside() == 0


def test_a_signal_goes_to_the_process_or_to_all(client: RawClient) -> None:
    for flags, left in ((0, 1), (raw.TREE, 0)):
        channel = client.start(["sh", "-c", "sleep 600 & echo go; wait"], drain_ms=20)
        ended_by(client, channel)
        client.frame(channel)
        client.send(raw.SIGNAL, channel, struct.pack("<i", signal.SIGTERM), flags)
        done = client.finish(channel)
        assert (done.reason, done.signal) == ("signaled", signal.SIGTERM)
        if left == 0:
            wait_until(lambda: client.inside() == 1)  # that of the first round
        else:
            assert client.inside() == 1


def test_a_killed_supervisor_leaves_nothing(client: RawClient) -> None:
    done = client.sh("setsid sleep 600 & sleep 600 & kill -9 $PPID; sleep 600")
    assert (done.reason, done.signal) == ("signaled", 9)
    wait_until(lambda: client.inside() == 0)
    assert client.run(["true"]).code == 0


def test_a_stopped_supervisor_does_not_save_its_command(client: RawClient) -> None:
    began = time.monotonic()
    done = client.sh("kill -STOP $PPID; sleep 600", timeout_ms=100)
    assert done.reason == "timeout"
    assert time.monotonic() - began < 3
    wait_until(lambda: client.inside() == 0)


def test_orphans_are_reaped(client: RawClient) -> None:
    line = "i=0; while [ $i -lt 1000 ]; do (true &); i=$((i+1)); done; sleep 0.3; ps -eo stat= | grep -c Z"
    done = client.sh(line)
    assert done.out == b"0\n"
    assert client.inside() == 0


def test_a_client_that_leaves_takes_its_commands_along(init: Init, client: RawClient) -> None:
    leaving = init.client()
    ended_by(leaving, leaving.start(["sh", "-c", "setsid sleep 600 & sleep 600"]))
    ended_by(leaving, leaving.start(["sleep", "600"], raw.KEEP))
    assert leaving.sh("setsid sleep 600 &").code == 0
    leaving.sock.close()
    wait_until(lambda: client.inside() == 2)  # the kept one, and the one left in the background


def test_a_kept_process_is_found_again(init: Init, client: RawClient) -> None:
    first = init.client()
    line = "echo one; echo two >&2; read x; echo got $x; sleep 600"
    channel = first.start(["sh", "-c", line], raw.KEEP | raw.WITH_STDIN)
    pid = ended_by(first, channel)
    assert first.frame(channel)[2] + first.frame(channel)[2] == b"one\ntwo\n"
    first.sock.close()
    wait_until(lambda: struct.unpack_from("<I", client.ask(raw.INFO).payload, 16)[0] == 1)
    again = client.open(raw.ATTACH, u32(pid, 1 << 20, raw.REPLAY | raw.FOLLOW | raw.CLAIM))
    assert [client.frame(again)[0] for _ in range(3)] == [raw.STARTED, raw.STDOUT, raw.STDERR]
    refused = client.ask(raw.ATTACH, u32(pid, 1 << 20, raw.FOLLOW | raw.CLAIM))
    assert refused.kind == raw.ERROR, "its stdin has one writer"
    client.send(raw.STDIN, again, b"hey\n")
    assert {client.frame(again)[0] for _ in range(2)} == {raw.STDIN_MORE, raw.STDOUT}
    client.send(raw.SIGNAL, again, struct.pack("<i", 15))
    assert client.finish(again).signal == 15
    replayed = client.ask(raw.ATTACH, u32(pid, 1 << 20, raw.REPLAY))
    assert (replayed.out, replayed.err, replayed.reason) == (b"one\ngot hey\n", b"two\n", "signaled")
    rows = client.ask(raw.LIST).payload
    assert struct.unpack_from("<IIBBBxii", rows) == (1, pid, 2, 1, 0, -15, 15)
    assert rows[36:] == u32(3) + b"".join(map(raw.text, ("sh", "-c", line)))


def test_a_kept_process_outruns_a_viewer_and_says_so(client: RawClient) -> None:
    channel = client.start(["sh", "-c", "seq 1 400000; sleep 600"], raw.KEEP, credit=0)
    pid = ended_by(client, channel)
    whole = b"".join(b"%d\n" % n for n in range(1, 400001))
    time.sleep(2)
    seen = client.ask(raw.ATTACH, u32(pid, 1 << 24, raw.REPLAY))
    lost = [int.from_bytes(payload, "little") for kind, payload in seen.frames if kind == raw.TRUNCATED]
    assert seen.kind == raw.REPLY
    assert sum(lost) + len(seen.out) == len(whole)
    assert whole.endswith(seen.out)


def test_a_viewer_that_keeps_up_loses_nothing(client: RawClient) -> None:
    done = client.sh("seq 1 400000", raw.KEEP, credit=1 << 16)
    assert done.out == b"".join(b"%d\n" % n for n in range(1, 400001))
    assert [kind for kind, _ in done.frames] == [raw.STARTED]


def test_a_hold_makes_commands_wait(init: Init, client: RawClient) -> None:
    other = init.client()
    assert client.ask(raw.HOLD, u32(10_000)).payload == u32(0, 0)
    waiting = other.start(["cat"], raw.WITH_STDIN)
    other.send(raw.STDIN, waiting, b"hello", raw.EOF_FLAG)
    assert other.kill(other.start(["true"])).reason == "cancelled"
    second = other.open(raw.HOLD, u32(50))
    assert other.quiet(0.1) == []
    assert client.ask(raw.RELEASE).kind == raw.REPLY
    assert other.frame(second)[0] == raw.REPLY
    assert other.finish(waiting).out == b"hello"
    late = other.ask(raw.RELEASE)
    assert late.kind == raw.ERROR, "the second one's time was over"


def test_a_holder_that_leaves_lets_go(init: Init, client: RawClient) -> None:
    holder = init.client()
    assert holder.ask(raw.HOLD, u32(60_000)).kind == raw.REPLY
    waiting = client.start(["true"])
    assert client.quiet(0.05) == []
    holder.sock.close()
    assert client.finish(waiting).code == 0


def test_freeze_stops_all_and_leaves_the_stopped_stopped(init: Init, client: RawClient) -> None:
    other = init.client()
    talking = client.start(["sh", "-c", "while :; do echo t; sleep 0.01; done"])
    stopped = other.start(["sh", "-c", "kill -STOP $$; echo resumed"])
    ended_by(other, stopped)
    client.frame(talking), client.frame(talking)
    time.sleep(0.05)
    assert other.ask(raw.FREEZE).payload == u32(1)
    client.quiet(0.05)
    waiting = client.start(["true"])
    assert client.quiet(0.1) == []
    assert other.ask(raw.THAW).kind == raw.REPLY
    assert client.finish(waiting).code == 0
    assert client.frame(talking)[0] == raw.STDOUT
    assert other.quiet(0.1) == []
    assert other.ask(raw.FREEZE).payload == u32(1)
    other.sock.close()
    assert client.run(["true"]).code == 0, "a freeze ends with the connection that asked for it"


def test_shutdown_asks_before_it_kills(init: Init, client: RawClient) -> None:
    polite = client.start(["sh", "-c", "trap 'echo bye; exit 7' TERM; echo go; while :; do sleep 0.02; done"])
    deaf = client.start(["sh", "-c", "trap '' TERM; echo go; while :; do sleep 1; done"])
    for channel in (polite, deaf):
        ended_by(client, channel)
        client.frame(channel)
    assert client.ask(raw.SHUTDOWN, u32(300)).kind == raw.REPLY
    ended = client.finish(polite)
    assert (ended.out, ended.code) == (b"bye\n", 7)
    assert client.finish(deaf).signal == 9
    assert init.process.wait(5) == 0


def test_the_end_of_the_owner_is_the_end(init: Init, client: RawClient) -> None:
    pid = init.pid()
    ended_by(client, client.start(["sleep", "600"]))
    init.process.kill()
    wait_until(lambda: is_gone(pid))


@pytest.mark.parametrize("detached", [False, True])
def test_the_leash_ends_a_sandbox_that_is_not_detached(start: Callable[..., Init], detached: bool) -> None:
    ours, theirs = socket.socketpair()
    options = ("--user", "--owner", str(theirs.fileno()), *(["--detached"] if detached else []))
    init = start(*options, keep=(theirs.fileno(),))
    theirs.close()
    owner = RawClient(ours)
    assert owner.run(["true"]).code == 0
    owner.close()
    if detached:
        assert init.client().run(["true"]).code == 0
    else:
        assert init.process.wait(5) == 0


def test_a_lifetime_ends(start: Callable[..., Init]) -> None:
    init = start("--user", "--lifetime", "150")
    init.client().start(["sleep", "600"])
    assert init.process.wait(5) == 2  # WF_END_TIME, told from being asked


def test_pid_1_holds_its_lock_to_the_end(start: Callable[..., Init], tmp_path: Path) -> None:
    path = tmp_path / "lock"
    init = start("--user", "--lock", path)
    assert init.client().run(["true"]).code == 0
    with path.open("r+") as file:
        with pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        init.process.kill()

        def free() -> bool:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        wait_until(free)


def test_nsfds_and_mapped(client: RawClient, tmp_path: Path) -> None:
    assert client.ask(raw.NSFDS).kind == raw.REPLY
    kinds = [os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in client.fds]
    assert kinds == ["user", "mnt", "pid", "net"]
    written = tmp_path / "written"
    channel = client.start(["sh", "-c", f"exec 5>{written} 6</etc/passwd; echo go; sleep 600"])
    ended_by(client, channel)
    client.frame(channel)
    files = client.ask(raw.MAPPED).payload
    st = written.stat()
    assert files == u32(1) + struct.pack("<QQ", st.st_dev, st.st_ino)
