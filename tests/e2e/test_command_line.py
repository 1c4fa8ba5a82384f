"""The program itself, as a shell runs it, on real sandboxes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.architecture import rules

from worldfork.rollout.demo_task import DEMO_REWARDS

PROGRAM = str(Path(sys.executable).with_name("worldfork"))
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120


def worldfork(*arguments: str, stdin: bytes = b"", code: int | None = 0) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run([PROGRAM, *arguments], input=stdin, capture_output=True, timeout=LIMIT_S, check=False)
    if code is not None:
        assert done.returncode == code, done.stderr.decode()
    return done


def facts(*arguments: str, code: int = 0) -> Any:
    return json.loads(worldfork(*arguments, "--json", code=code).stdout)


def line(*arguments: str) -> str:
    return worldfork(*arguments).stdout.decode().strip()


@pytest.fixture
def sandbox() -> Iterator[str]:
    sandbox_id = line("create", "--network", "none")
    assert re.fullmatch(r"sb-[a-z2-7]{16}", sandbox_id)
    yield sandbox_id
    worldfork("rm", sandbox_id, code=None)


def test_a_sandbox_from_create_to_rm() -> None:
    sandbox_id = line("create", "--network", "none", "--name", "box", "-e", "COLOUR=blue")
    ids = [sandbox_id]
    try:
        assert facts("ls")[0]["sandbox_id"] == sandbox_id
        assert worldfork("exec", "box", "--", "sh", "-c", "echo $COLOUR > seen; pwd").stdout == b"/workspace\n"
        snapshot = facts("checkpoint", "--label", "first", "--durable", sandbox_id)
        assert (snapshot["label"], snapshot["status"]) == ("first", "completed")
        snapshot_id = snapshot["snapshot_id"]
        assert snapshot_id in [each["snapshot_id"] for each in facts("snapshots")]
        forks = facts("fork", snapshot_id, "-n", "2", "--seed", "7", "--seed", "8")
        ids += [fork["sandbox_id"] for fork in forks]
        assert [fork["index"] for fork in forks] == [0, 1]
        for index, fork in enumerate(forks):
            said = worldfork("exec", fork["sandbox_id"], "sh", "-c", "cat seen; echo $WORLDFORK_SEED").stdout
            assert said == f"blue\n{7 + index}\n".encode()
        busy = worldfork("snapshots", "rm", snapshot_id, "--json", code=11)
        assert set(json.loads(busy.stderr)["error"]["fields"]["holders"]) >= set(ids[1:])
    finally:
        assert facts("rm", *ids) == {"removed": ids}
    assert line("ls", "-q") == ""
    worldfork("snapshots", "rm", snapshot_id)
    assert snapshot_id not in line("snapshots", "-q")
    assert facts("sweep")["failures"] == []


def test_exec_is_transparent(sandbox: str) -> None:
    data = os.urandom(3_000_000)
    assert worldfork("exec", sandbox, "--", "cat", stdin=data).stdout == data
    both = worldfork("exec", sandbox, "sh", "-c", "echo out; echo err >&2; exit 7", code=7)
    assert (both.stdout, both.stderr) == (b"out\n", b"err\n")
    assert worldfork("exec", "-n", sandbox, "cat", stdin=b"unread").stdout == b""
    assert worldfork("exec", "-w", "/tmp", "-e", "A=1", sandbox, "sh", "-c", "echo $PWD $A").stdout == b"/tmp 1\n"


def test_exec_ends_as_its_command_does(sandbox: str) -> None:
    worldfork("exec", sandbox, "sh", "-c", "kill -KILL $$", code=137)
    worldfork("exec", sandbox, "no-such-program", code=127)
    worldfork("exec", sandbox, "/etc/passwd", code=126)
    late = worldfork("exec", "--timeout", "0.5", sandbox, "sleep", "60", code=124)
    assert late.stderr.startswith(b"worldfork: ")
    ended = facts("exec", "--json", sandbox, "sh", "-c", "echo a; exit 3")
    assert (ended["exit_code"], ended["stdout"], ended["reason"]) == (3, "a\n", "exited")
    worldfork("exec", "sb-aaaaaaaaaaaaaaaa", "true", code=13)


def test_exec_passes_signals_on(sandbox: str) -> None:
    script = "trap 'echo told; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen([PROGRAM, "exec", "-n", sandbox, "sh", "-c", script], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGTERM)
        assert running.stdout.read() == b"told\n"
        assert running.wait(LIMIT_S) == 5


def test_exec_ends_when_nobody_reads(sandbox: str) -> None:
    with subprocess.Popen([PROGRAM, "exec", "-n", sandbox, "yes"], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"y\n"
        running.stdout.close()
        assert running.wait(LIMIT_S) == 141
    assert worldfork("exec", sandbox, "sh", "-c", "pgrep -x yes || true").stdout == b""


def test_exec_on_a_terminal(sandbox: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(PROGRAM, [PROGRAM, "exec", "-t", sandbox, "sh"])
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
        _answer(terminal, b"", b"# ")
        assert b"33 101" in _answer(terminal, b"stty size\n", b"101\r\n")
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        assert b"40 120" in _answer(terminal, b"sleep 0.3; stty size\n", b"120\r\n")
        # A shell that has only just forked loses an interrupt; one that has begun another program does not.
        _answer(terminal, b"sh -c \"echo sta''rted; exec sleep 600\"\n", b"started\r\n")
        assert b"# " in _answer(terminal, b"\x03", b"# ")
        os.write(terminal, b"exit 9\n")
        _answer(terminal, b"", b"\0 never printed")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    finally:
        os.close(terminal)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _answer(terminal: int, typed: bytes, until: bytes) -> bytes:
    """Type, then read until something is there or the terminal is closed."""
    os.write(terminal, typed)
    seen = b""
    deadline_s = time.monotonic() + 30
    while until not in seen and time.monotonic() < deadline_s:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                data = os.read(terminal, 1 << 16)
            except OSError:  # EIO: the other side is closed
                break
            if not data:
                break
            seen += data
    return seen


def test_doctor_finds_a_way() -> None:
    results = facts("doctor")
    assert any(result["ok"] for result in results)
    assert {"name", "ok", "detail", "remedy"} <= set(results[0])


def test_the_readme_runs() -> None:
    ((_, block),) = rules.python_blocks(ROOT / "README.md")
    assert len(block.strip().splitlines()) <= 10
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout == "5\n" * 8 + "def add(a, b):\n    return a - b\n\n"


@pytest.mark.timeout(600)
def test_the_demo() -> None:
    done = subprocess.run([PROGRAM, "demo", "--json"], capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr.decode()
    story = json.loads(done.stdout)
    assert [thing["ok"] for thing in story["survived"]] == [True] * 5
    assert story["rewards"] == pytest.approx(list(DEMO_REWARDS))
    assert sum(story["advantages"]) == pytest.approx(0)
    assert {"task_id", "reward"} <= set(story["episodes"][0])
    assert story["economics"]["rebuild_h"] > story["economics"]["fork_h"]
    assert line("ls", "-q") == ""
    assert "worldfork demo" not in line("snapshots")
