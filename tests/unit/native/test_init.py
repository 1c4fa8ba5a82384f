"""PID 1: running commands, their ends, their streams and who they run as."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import time

import pytest
from tests.unit.native import raw_client as raw
from tests.unit.native.raw_client import Init, RawClient, u32, wait_until

pytestmark = pytest.mark.sandbox


def test_hello_tells_the_version_and_the_id(client: RawClient) -> None:
    kind, channel, payload = client.hello
    assert (kind, channel, payload[:2]) == (raw.HELLO, 0, b"\x01\x00")
    assert payload[4:] == u32(1) + raw.text("sb-harness")


def test_every_exit_code_arrives(client: RawClient) -> None:
    for first in range(0, 1000, 100):
        wanted = {client.start(["sh", "-c", f"exit {n % 256}"]): n % 256 for n in range(first, first + 100)}
        assert {channel: client.finish(channel).code for channel in wanted} == wanted
    wait_until(lambda: client.inside() == 0)


def test_streams_are_kept_apart_or_merged(client: RawClient) -> None:
    apart = client.sh("echo out; echo err >&2; exit 3")
    assert (apart.out, apart.err, apart.code, apart.reason) == (b"out\n", b"err\n", 3, "exited")
    assert client.sh("echo out; echo err >&2", raw.MERGE).out == b"out\nerr\n"
    silent = client.sh("echo out; echo err >&2", raw.DISCARD_OUT | raw.DISCARD_ERR)
    assert (silent.out, silent.err, silent.code) == (b"", b"", 0)


def test_a_command_gets_nothing_of_pid_1(client: RawClient) -> None:
    done = client.sh("ls /proc/self/fd; grep -E 'SigBlk|SigIgn|NoNewPrivs' /proc/self/status; umask; echo $PWD", env=())
    assert done.out.split()[:4] == [b"0", b"1", b"2", b"3"], "3 is the directory that ls reads"
    assert done.out.split()[4:] == b"SigBlk: 0000000000000000 SigIgn: 0000000000000000 NoNewPrivs: 1 0022 /".split()
    assert client.sh("cat /proc/self/oom_score_adj").out == b"500\n"
    session, own = client.sh("ps -o sid= -p $$; echo $$").out.split()
    assert session == own


@pytest.mark.parametrize(
    ("argv", "fields", "code", "says"),
    [
        (["nope"], {}, errno.ENOENT, b"cannot run nope"),
        (["/etc/passwd"], {}, errno.EACCES, b"cannot run /etc/passwd"),
        (["true"], {"cwd": "/nope"}, errno.ENOENT, b"cannot enter the directory /nope"),
        (["true"], {"rlimits": ((99, 1, 1),)}, errno.EINVAL, b"no such resource limit"),
        (["true", "x" * (5 << 20)], {}, errno.E2BIG, b"cannot run true"),
        ([""], {}, errno.ENOENT, b"cannot run an empty name"),
    ],
)
def test_what_cannot_start_says_why(
    client: RawClient, argv: list[str], fields: dict[str, object], code: int, says: bytes
) -> None:
    done = client.run(argv, **fields)
    assert (done.reason, done.code) == ("not_started", code)
    assert done.err.startswith(says), done.err


def test_a_script_without_an_interpreter_is_not_given_to_a_shell(client: RawClient, tmp_path: object) -> None:
    script = os.path.join(str(tmp_path), "script")
    with open(script, "w", encoding="utf-8") as file:
        file.write("echo wrong\n")
    os.chmod(script, 0o755)
    done = client.run([script])
    assert (done.reason, done.code, done.out) == ("not_started", errno.ENOEXEC, b"")


def test_a_request_that_is_no_command_is_refused(client: RawClient) -> None:
    for ending in (
        client.run([]),
        client.run(["a\0b"]),
        client.run(["true"], 1 << 12),
        client.run(["true"], user="no one"),
    ):
        assert (ending.kind, ending.code) == (raw.ERROR, errno.EINVAL)
    assert client.run(["true"]).code == 0


def test_a_background_child_does_not_hold_the_end_up(client: RawClient) -> None:
    for line in ("sleep 60 &", "nohup sleep 60 &", "setsid sleep 60 &", "(sleep 60 &) &", "yes &"):
        began = time.monotonic()
        done = client.sh(f"{line} echo x", drain_ms=50)
        assert (done.reason, done.code) == ("exited", 0)
        assert b"x\n" in done.out
        assert time.monotonic() - began < 3
    assert client.inside() >= 5


def test_output_waits_for_credit(client: RawClient) -> None:
    channel = client.start(["yes"], credit=1000)
    frames = client.quiet(0.2)
    assert sum(len(payload) for kind, _, payload in frames if kind == raw.STDOUT) == 1000
    assert client.run(["true"]).code == 0, "another channel goes on"
    client.send(raw.CREDIT, channel, u32(500))
    assert sum(len(payload) for _, _, payload in client.quiet(0.2)) == 500
    assert client.kill(channel).reason == "cancelled"


def test_nothing_is_lost_when_credit_comes_after_the_drain_time(client: RawClient) -> None:
    channel = client.start(["sh", "-c", "head -c 60000 /dev/zero"], credit=0, drain_ms=10)
    assert [kind for kind, _, _ in client.quiet(0.2)] == [raw.STARTED]
    client.send(raw.CREDIT, channel, u32(100_000))
    assert len(client.finish(channel).out) == 60000


def test_much_output_is_whole(client: RawClient) -> None:
    assert client.sh("seq 1 300000").out == b"".join(b"%d\n" % n for n in range(1, 300001))


def test_stdin_flows_by_credit(client: RawClient) -> None:
    channel = client.start(["wc", "-c"], raw.WITH_STDIN)
    credit, left = 65536, 1_000_000
    while left:
        part = min(credit, left, 65536)
        client.send(raw.STDIN, channel, b"z" * part)
        credit, left = credit - part, left - part
        if not credit:
            kind, _, payload = client.frame(channel)
            credit += int.from_bytes(payload, "little") if kind == raw.STDIN_MORE else 0
    client.send(raw.STDIN, channel, b"", raw.EOF_FLAG)
    assert client.finish(channel).out.strip() == b"1000000"


def test_a_command_that_does_not_read_does_not_stop_its_client(client: RawClient) -> None:
    channel = client.start(["sh", "-c", "exec 0<&-; sleep 0.1"], raw.WITH_STDIN)
    client.send(raw.STDIN, channel, b"z" * 65536)
    assert client.finish(channel).code == 0


def test_a_terminal(client: RawClient) -> None:
    channel = client.start(["sh", "-c", "tty >&2; read line; stty size; echo got $line"], raw.PTY | raw.WITH_STDIN)
    client.send(raw.RESIZE, channel, b"\x28\x00\x64\x00")
    client.send(raw.STDIN, channel, b"hello\n")
    done = client.finish(channel)
    assert b"/dev/pts/" in done.out
    assert done.out.endswith(b"40 100\r\ngot hello\r\n")


@pytest.mark.root
def test_users_come_from_the_files_inside(client: RawClient) -> None:
    assert client.run(["id", "-u"], user="nobody").out == b"65534\n"
    assert client.run(["id", "-G"], user="1234:5").out == b"5\n"
    assert client.run(["id"], user="0").out.startswith(b"uid=0(root) gid=0(root)")
    assert client.run(["id", "-u"], user="4294967295").kind == raw.ERROR


def test_one_id_means_one_user(start: object) -> None:
    client = start("--user").client()  # type: ignore[operator]
    for user in ("", "root", "0", "0:0"):
        assert client.run(["id", "-u"], user=user).out == b"0\n"
    refused = client.run(["id"], user="1234")
    assert refused.kind == raw.ERROR
    assert b"single user id" in refused.payload


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff" * 12,
        raw.u32(1 << 20) + b"\x02\x00\x00\x00" + u32(1),
        u32(9 << 20) + b"\x01\x00\x00\x00" + u32(1),
        u32(4) + b"\x01\x00\x00\x00" + u32(1) + b"abcd",
        u32(1) + b"\x08\x00\x00\x00" + u32(1) + b"x",
        u32(0) + b"\x65\x00\x00\x00" + u32(1),
    ],
)
def test_nonsense_ends_its_own_connection_only(init: Init, client: RawClient, nonsense: bytes) -> None:
    running = client.start(["sleep", "60"])
    other = init.client()
    other.sock.sendall(nonsense)
    with pytest.raises((EOFError, ConnectionResetError)):
        other.frame()
    assert client.run(["true"]).code == 0
    assert client.kill(running).reason == "cancelled"


def test_stdin_beyond_its_credit_ends_the_connection(init: Init, client: RawClient) -> None:
    greedy = init.client()
    channel = greedy.start(["sleep", "60"], raw.WITH_STDIN)
    with pytest.raises(ConnectionError):
        greedy.sock.sendall((struct.pack("<IHHI", 65536, raw.STDIN, 0, channel) + b"z" * 65536) * 100)
    assert client.run(["true"]).code == 0
    wait_until(lambda: client.inside() == 0)


def test_a_client_that_never_reads_costs_little(init: Init, client: RawClient) -> None:
    client.start(["yes"], credit=1 << 31)
    client.sock.setblocking(False)
    question = struct.pack("<IHHI", 0, raw.INFO, 0, 7) * 1000
    until = time.monotonic() + 1
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            client.sock.send(question)
    assert init.client().run(["true"]).code == 0
    with open(f"/proc/{init.pid()}/status", encoding="ascii") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert resident < 8 * 1024
