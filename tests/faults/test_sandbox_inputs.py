"""What commands and callers throw at a sandbox beyond the numbered behaviours of tests/conformance.

Items 45 to 60 of the list of what users of such systems hit; `docs/peers-items.md` says where the others are tested.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.victims import deepen, wait_clean

from worldfork import CommandExitReason, Sandbox
from worldfork.core.errors import PathError, WorldforkError
from worldfork.lineage import place as places

MIB = 1 << 20


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    places.close_places()


@pytest.fixture
def sandbox(own_home: Path, base: str) -> Iterator[Sandbox]:
    with Sandbox.create(base=base, network="none") as made:
        yield made


def test_item_45_output_that_looks_like_our_own(sandbox: Sandbox) -> None:
    """Item 45: prompts, markers, frames, NUL, ANSI, a line of 10 MB: nothing of it is taken for anything."""
    frame = b"\x10\x00\x00\x00\x69\x00\x00\x00\x01\x00\x00\x00" + bytes(20)
    odd = b"$ # > PS1= __END__ 0\n\x1b[31mred\x1b[0m\r\x00\xff\xfe\n[... 5 bytes left out ...]\n" + frame
    sandbox.write_file("/odd", odd)
    for line in ("cat /odd", "cat /odd >&2; cat /odd"):
        assert sandbox.run("sh", ["-c", line]).stdout_bytes == odd
    assert sandbox.sh("cat /odd").stdout_bytes == odd
    long = sandbox.run("sh", ["-c", "yes | tr -d '\\n' | head -c 10000000"])
    assert long.stdout_bytes == b"y" * 10_000_000


def test_item_45_what_was_printed_before_the_time_limit_is_kept(sandbox: Sandbox) -> None:
    """Item 45: a diff of some MB, then a hang."""
    result = sandbox.run("sh", ["-c", "yes + | head -c 3000000; echo; echo last; sleep 1000"], timeout=3)
    assert result.reason is CommandExitReason.TIMED_OUT
    assert result.stdout_bytes.endswith(b"last\n")
    assert len(result.stdout_bytes) > 3_000_000


@pytest.mark.parametrize("path", ["/", "/dev/zero", "/dev/null", "/proc/kmsg", "/dev/tty", "/proc/self/mem"])
def test_item_46_what_cannot_be_read(sandbox: Sandbox, path: str) -> None:
    """Item 46: a directory, devices, files without an end: an error at once, never a hang."""
    began_s = time.monotonic()
    with pytest.raises(PathError) as caught:
        sandbox.read_file(path, max_bytes=MIB)
    assert time.monotonic() - began_s < 5
    assert caught.value.path == path
    assert caught.value.errno
    assert sandbox.run("true").ok


def test_item_46_fifos_and_sparse_files(sandbox: Sandbox, tmp_path: Path) -> None:
    """Items 46 and 50: nobody writes to the FIFO; the file has 4 GiB and takes no space."""
    sandbox.sh("mkfifo /fifo && truncate -s 4G /sparse", check=True)
    for call in (lambda: sandbox.read_file("/fifo"), lambda: sandbox.write_file("/fifo", b"x")):
        with pytest.raises(PathError):
            call()
    with pytest.raises(PathError) as caught:
        sandbox.read_file("/sparse")
    assert caught.value.errno == errno.EFBIG
    # Its snapshot is as sparse, whichever way it is taken.
    for line in ("true", "sleep 1000 & true"):
        sandbox.start_process("sh", ["-c", line])
        with Sandbox.create(snapshot_id=sandbox.checkpoint().snapshot_id) as restored:
            assert restored.sh("stat -c '%s %b' /sparse").stdout == "4294967296 0\n"


def test_item_49_large_scripts_and_variables(sandbox: Sandbox) -> None:
    """Item 49: one argument may have 128 KiB, which is said; a file, input and variables carry what is larger."""
    script = "exit 7\n" + "#" * MIB
    refused = sandbox.run("sh", ["-c", script])
    assert refused.reason is CommandExitReason.NOT_STARTED
    assert "128 KiB" in refused.stderr
    assert sandbox.run("sh", [], stdin=script).exit_code == 7
    sandbox.write_file("/script", script)
    assert sandbox.run("sh", ["/script"]).exit_code == 7
    variables = {f"V{number}": "x" * 100_000 for number in range(10)}
    counted = sandbox.run("sh", ["-c", "env | wc -c"], env=variables)
    assert int(counted.stdout) > 10 * 100_000
    assert sandbox.run("true").ok


def test_item_52_orphans_and_the_limit_of_processes(own_home: Path, base: str) -> None:
    """Item 52: 3000 orphans under a limit of 64 processes: each is reaped. At the limit the error says so."""
    with Sandbox.create(base=base, network="none", pids=64) as sandbox:
        sandbox.sh("for i in $(seq 3000); do (true &) ; done; true", timeout=60)
        assert sandbox.info().processes == 0
        full = sandbox.start_process("sh", ["-c", "for i in $(seq 63); do sleep 1000 & done; echo full; wait"])
        for event in sandbox.follow_stdout(full.pid):
            assert event.line == "full"
            break
        refused = sandbox.run("sh", ["-c", "true | true"])
        assert not refused.ok
        assert "fork" in refused.stderr
        sandbox.kill_process(full.pid)
        assert sandbox.info().processes == 0
        assert sandbox.run("sh", ["-c", "true | true"]).ok


HELD_OPEN = """
exec 3>/deleted; echo still here >&3; rm /deleted
exec 4</f 5>>/log
mkfifo /fifo; (read line < /fifo) &
(while :; do echo tick >&5; sleep 0.01; done) &
echo ready
sleep 1000
"""


def test_item_55_a_snapshot_under_open_files(sandbox: Sandbox) -> None:
    """Item 55: deleted and open, a FIFO with a reader, a log that grows: the copy is right, the source undisturbed."""
    sandbox.write_file("/f", b"first")
    process = sandbox.start_process("sh", ["-c", HELD_OPEN])
    for event in sandbox.follow_stdout(process.pid):
        assert event.line == "ready"
        break
    snapshot = sandbox.checkpoint()
    with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
        assert restored.read_file("/f") == b"first"
        assert restored.run("test", ["-p", "/fifo"]).ok or restored.sh("test -p /fifo").ok
        assert restored.sh("test ! -e /deleted").ok
        log = restored.read_file("/log")
        assert log == b"tick\n" * (len(log) // 5)
        assert restored.info().processes == 0
    before = len(sandbox.read_file("/log"))
    deadline_s = time.monotonic() + 10
    while len(sandbox.read_file("/log")) == before:
        assert time.monotonic() < deadline_s
    assert sandbox.get_process(process.pid).status == "running"


STEADY = """
i=0
while :; do i=$((i + 1)); echo $i > /a.new; mv /a.new /a; echo $i > /b.new; mv /b.new /b; done
"""


def test_item_58_snapshots_of_a_sandbox_that_writes(sandbox: Sandbox) -> None:
    """Item 58: two files that follow each other; every snapshot is of one moment, and the newer of the later one."""
    sandbox.start_process("sh", ["-c", STEADY])
    seen = 0
    deadline_s = time.monotonic() + 10
    while not sandbox.sh("test -e /b").ok:
        assert time.monotonic() < deadline_s
    for _ in range(12):
        snapshot = sandbox.checkpoint()
        with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
            first, second = int(restored.read_file("/a")), int(restored.read_file("/b"))
        assert first - second in (0, 1)
        assert first >= seen
        seen = first
    assert sandbox.list_processes()[0].status == "running"


def test_item_47_more_layers_than_a_mount_can_have(own_home: Path, base: str) -> None:
    """Item 47: a chain that reaches the kernel's 500. Each checkpoint is right, or refused and nothing has changed."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/n", b"-1")
        chain = deepen(sandbox.checkpoint(), 490)
    with Sandbox.create(snapshot_id=chain) as sandbox:
        assert sandbox.read_file("/n") == b"-1"
        refused = _checkpoint_until_refused(sandbox)
        assert sandbox.run("true").ok
        if refused is not None:
            assert refused.remedy
        taken = sandbox.list_snapshots()
        assert len(taken) >= 8
        with Sandbox.create(snapshot_id=taken[-1].snapshot_id) as restored:
            assert restored.read_file("/n") == str(len(taken) - 1).encode()
    assert wait_clean(own_home) == []


def _checkpoint_until_refused(sandbox: Sandbox) -> WorldforkError | None:
    for number in range(20):
        sandbox.write_file("/n", str(number).encode())
        try:
            sandbox.checkpoint()
        except WorldforkError as error:
            assert sandbox.read_file("/n") == str(number).encode()
            return error
    return None


def test_item_60_the_shortest_commands(sandbox: Sandbox) -> None:
    """Item 60: 3000 commands that end at once, from 8 threads: every exit code and every byte is delivered."""

    def run(number: int) -> bool:
        code = number % 256
        result = sandbox.run("sh", ["-c", f"printf {number}; exit {code}"])
        return (result.exit_code, result.stdout) == (code, str(number))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(3000)))


def test_item_31_many_sandboxes_one_after_the_other(own_home: Path, base: str) -> None:
    """Items 31 and 25: interfaces of the host, mounts and descriptors are as many after 200 sandboxes as before."""

    def count() -> tuple[int, int, int]:
        mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
        return len(os.listdir("/sys/class/net")), mounts, len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        Sandbox.create(base=base, network="none").terminate()
    interfaces, mounts, descriptors = count()
    for number in range(200):
        with Sandbox.create(base=base, network="none" if number % 2 else "host") as sandbox:
            assert sandbox.run("true").ok
    assert wait_clean(own_home) == []
    assert count()[:2] == (interfaces, mounts)
    # The store opens one more connection, of some descriptors, when it first needs it.
    assert count()[2] < descriptors + 20
