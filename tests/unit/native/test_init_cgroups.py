"""PID 1 with cgroups (v1) that the harness is given."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.native import raw_client as raw
from tests.unit.native.raw_client import Init, u32, wait_until

pytestmark = [pytest.mark.sandbox, pytest.mark.root]
BOMB = """
import os, signal, sys
if len(sys.argv) > 1:
    os.fork(), os.fork()
    os.kill(int(sys.argv[1]), signal.SIGKILL)
while True:
    try:
        os.fork()
        os.setsid()
    except OSError:
        pass
"""


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Path]]:
    """Makes a cgroup below a named v1 hierarchy."""
    made: list[Path] = []

    def make(hierarchy: str) -> Path:
        path = Path("/sys/fs/cgroup", hierarchy, f"wf-test-{os.getpid()}")
        try:
            path.mkdir()
        except OSError as error:
            pytest.skip(f"no cgroup v1 hierarchy {hierarchy} to make a group in: {error}")
        made.append(path)
        return path

    def removed(path: Path) -> bool:
        with contextlib.suppress(OSError):
            path.rmdir()
        return not path.exists()

    yield make
    for path in made:
        with contextlib.suppress(OSError):
            (path / "memory.force_empty").write_text("1")
        wait_until(lambda path=path: removed(path))  # type: ignore[misc]


def test_a_fork_bomb_ends_with_its_time(group: Callable[[str], Path], start: Callable[..., Init]) -> None:
    pids = group("pids")
    (pids / "pids.max").write_text("150")
    client = start("--join", pids / "tasks").client()
    began = time.monotonic()
    assert client.run(["/usr/bin/env", "python3", "-c", BOMB], timeout_ms=800).reason == "timeout"
    assert time.monotonic() - began < 8
    assert client.inside() == 0
    done = client.sh(f"exec python3 -c '{BOMB}' $PPID", timeout_ms=8000)
    assert done.signal == 9
    wait_until(lambda: client.inside() == 0, 8)
    crowded = client.sh("for i in $(seq 200); do sleep 600 & done; wait", timeout_ms=5000)
    assert b"fork" in crowded.err
    assert client.run(["true"]).code == 0, "PID 1 is not in the crowded group"


def test_the_freezer_stops_the_clock_too(group: Callable[[str], Path], start: Callable[..., Init]) -> None:
    freezer = group("freezer")
    init = start("--join", freezer / "tasks", "--freezer", freezer / "freezer.state")
    client, other = init.client(), init.client()
    channel = client.start(["sh", "-c", "while :; do echo t; sleep 0.01; done"], timeout_ms=700)
    client.frame(channel), client.frame(channel)
    assert other.ask(raw.FREEZE).payload == u32(1)
    assert (freezer / "freezer.state").read_text() == "FROZEN\n"
    client.quiet(0.1)
    assert client.quiet(0.8) == [], "neither output nor the time limit"
    other.sock.close()
    wait_until(lambda: (freezer / "freezer.state").read_text() == "THAWED\n")
    assert client.finish(channel).reason == "timeout"
    assert client.ask(raw.FREEZE).payload == u32(1)
    assert client.ask(raw.SHUTDOWN, u32(0)).kind == raw.REPLY
    assert init.process.wait(5) == 0


def test_out_of_memory_is_told_from_a_kill(group: Callable[[str], Path], start: Callable[..., Init]) -> None:
    memory = group("memory")
    (memory / "memory.limit_in_bytes").write_text(str(40 << 20))
    client = start("--join", memory / "tasks", "--oom", memory / "memory.oom_control").client()
    assert client.run(["python3", "-c", "x = b'a' * (100 << 20)"]).reason == "oom"
    assert client.sh("kill -9 $$").reason == "signaled"
    assert client.sh("python3 -c 'x = b\"a\" * (100 << 20)'; echo $?").out.split()[-1] == b"137"
    assert client.ask(raw.ACCOUNT).payload[8:] == (2).to_bytes(8, "little")
