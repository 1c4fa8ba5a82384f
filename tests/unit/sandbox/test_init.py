"""The client against the real PID 1, started by the C part's test program without a root of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.sandbox.fake_init import run

from worldfork.core.errors import PathError, SandboxDied, SandboxError
from worldfork.sandbox import files
from worldfork.sandbox.command import CommandSpec, Reason
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.download import download_tree
from worldfork.sandbox.process import Process
from worldfork.sandbox.upload import upload_tree

pytestmark = pytest.mark.sandbox
NATIVE = Path(__file__).resolve().parents[3] / "native"
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
SANDBOX_ID = os.environ.get("WORLDFORK_HARNESS_ID", "sb-harness")

Client = Callable[[], Awaitable[Connection]]


def sh(line: str, **fields: object) -> CommandSpec:
    return CommandSpec(("sh", "-c", line), env=ENV, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test program, compiled."""
    source = NATIVE / "tests" / "harness.c"
    if not source.exists():
        pytest.skip("native/tests/harness.c is not there")
    inputs = [source, NATIVE / "build.py", *NATIVE.glob("*.c"), *NATIVE.glob("*.h")]
    out = NATIVE / "tests" / "harness"
    if out.exists() and out.stat().st_mtime_ns > max(path.stat().st_mtime_ns for path in inputs):
        return out
    if not os.access(out.parent, os.W_OK):
        out = tmp_path_factory.mktemp("native") / "harness"
    built = subprocess.run(
        [sys.executable, NATIVE / "build.py", "--harness", "--out", out], capture_output=True, text=True, check=False
    )
    if built.returncode:
        pytest.skip(f"the harness cannot be built: {built.stderr[-500:]}")
    return out


@pytest.fixture
def place(program: Path) -> Iterator[Path]:
    """The socket of an init that runs for one test."""
    with tempfile.TemporaryDirectory(prefix="wf-init-") as directory:
        path = Path(directory) / "sock"
        options = [] if os.geteuid() == 0 else ["--user"]
        process = subprocess.Popen([program, path, *options], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        (Path(directory) / "pid").write_text(str(process.pid))
        try:
            deadline = time.monotonic() + 10
            while not path.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    said = process.stderr.read().decode() if process.stderr and process.poll() is not None else ""
                    pytest.skip(f"the harness cannot run here: {said.strip()}")
                time.sleep(0.005)
            yield path
        finally:
            process.kill()
            process.communicate()


async def connect(path: Path) -> Connection:
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, str(path))
    return await Connection.open(sock, sandbox_id=SANDBOX_ID)


@contextlib.asynccontextmanager
async def client(path: Path) -> AsyncIterator[Connection]:
    connection = await connect(path)
    try:
        yield connection
    finally:
        connection.close()


def with_init(path: Path, test: Callable[[Connection], Awaitable[None]], timeout_s: float = 30) -> None:
    async def connected() -> None:
        async with client(path) as connection:
            await test(connection)

    run(connected(), timeout_s)


def test_a_command_tells_what_it_did(place: Path) -> None:
    async def test(connection: Connection) -> None:
        result = await connection.run(sh("printf out; printf err >&2; exit 3"))
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out", "err")
        assert (result.reason, result.signal) == (Reason.EXITED, None)
        result = await connection.run(sh("pwd; echo $X", working_dir="/usr"))
        assert result.stdout == "/usr\n\n"
        result = await connection.run(sh("echo out; echo err >&2", merge=True))
        assert (result.stdout, result.stderr) == ("out\nerr\n", "")
        result = await connection.run(sh("kill -SEGV $$"))
        assert (result.reason, result.exit_code, result.signal) == (Reason.SIGNALED, -11, 11)
        result = await connection.run(sh("cat", stdin=b"\0" + "😀".encode() * 100_000))
        assert result.stdout_bytes == b"\0" + "😀".encode() * 100_000
        result = await connection.run(sh("cat"))
        assert (result.ok, result.stdout) == (True, "")

    with_init(place, test)


def test_what_does_not_start_says_why(place: Path) -> None:
    async def test(connection: Connection) -> None:
        result = await connection.run(CommandSpec(("no-such-program",), env=ENV))
        assert (result.reason, result.exit_code) == (Reason.NOT_STARTED, 127)
        assert "no-such-program" in result.stderr
        result = await connection.run(CommandSpec(("/etc/passwd",), env=ENV))
        assert (result.reason, result.exit_code) == (Reason.NOT_STARTED, 126)
        result = await connection.run(CommandSpec(("true", "a" * 200_000), env=ENV))
        assert (result.reason, result.exit_code) == (Reason.NOT_STARTED, 126)
        process = await connection.start(CommandSpec(("no-such-program",), env=ENV))
        result = await process.wait()
        assert result.reason is Reason.NOT_STARTED
        assert "no-such-program" in result.stderr
        with pytest.raises(SandboxError):
            await connection.run(sh("true", user="no-such-user"))

    with_init(place, test)


def test_a_time_limit_returns_what_there_was(place: Path) -> None:
    async def test(connection: Connection) -> None:
        result = await connection.run(sh("echo partial; setsid sleep 60 & sleep 60", timeout_s=0.3))
        assert (result.reason, result.timed_out, result.stdout) == (Reason.TIMED_OUT, True, "partial\n")
        assert (await connection.info()).processes == 0

    with_init(place, test)


@pytest.mark.parametrize(
    "line",
    [
        "sleep 60 &",
        "nohup sleep 60 &",
        "setsid sleep 60 &",
        "(setsid sh -c 'sleep 60 &' &)",
        "(while :; do echo x; done) &",
    ],
)
def test_a_background_child_does_not_hold_the_result_up(place: Path, line: str) -> None:
    async def test(connection: Connection) -> None:
        began = time.monotonic()
        result = await connection.run(sh(f"{line}\necho done"))
        assert result.ok
        assert "done\n" in result.stdout
        assert time.monotonic() - began < 5
        assert (await connection.info()).processes >= 1

    with_init(place, test)


def test_cancelling_leaves_no_process(place: Path) -> None:
    async def test(connection: Connection) -> None:
        line = "setsid sleep 60 & (setsid sh -c 'trap \"\" TERM; sleep 60' &) ; sleep 60"
        task = asyncio.create_task(connection.run(sh(line)))
        while (await connection.info()).processes < 4:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        info = await connection.info()
        assert (info.processes, info.running_commands) == (0, 0)

    with_init(place, test)


def test_every_exit_code_of_quick_commands_arrives(place: Path) -> None:
    async def test(connection: Connection) -> None:
        for start in range(0, 512, 64):
            results = await asyncio.gather(
                *[connection.run(sh(f"exit {number % 256}")) for number in range(start, start + 64)]
            )
            assert [each.exit_code for each in results] == [number % 256 for number in range(start, start + 64)]

    with_init(place, test)


def test_output_for_ever_is_stopped_or_kept_at_both_ends(place: Path) -> None:
    async def test(connection: Connection) -> None:
        result = await connection.run(sh("yes"), max_output_bytes=100_000)
        assert (result.reason, len(result.stdout_bytes)) == (Reason.OUTPUT_LIMIT, 100_000)
        result = await connection.run(sh("seq 1 300000"), max_output_bytes=1000, keep_tail=True)
        assert result.ok
        assert result.stdout.startswith("1\n2\n")
        assert result.stdout.endswith("300000\n")
        assert result.stdout_dropped_bytes > 1_000_000

    with_init(place, test)


def test_a_slow_consumer_slows_its_own_command_alone(place: Path) -> None:
    async def test(connection: Connection) -> None:
        process = await connection.start(sh("i=0; while :; do i=$((i+1)); echo $i; done | tee /dev/stderr >/dev/null"))
        assert (await anext(process))[0] == "stderr"
        await asyncio.sleep(0.3)
        queued = sum(len(data) for _, data in process._queue)
        assert queued <= 256 * 1024
        began = time.monotonic()
        assert (await connection.run(sh("echo quick"))).stdout == "quick\n"
        assert time.monotonic() - began < 2
        process.kill()
        assert (await process.wait()).reason is Reason.CANCELLED

    with_init(place, test)


def test_a_conversation_with_a_command(place: Path) -> None:
    async def fill(process: Any) -> None:
        while True:
            await process.write_stdin(b"x" * 6_553_600)

    async def test(connection: Connection) -> None:
        process = await connection.start(sh("while read line; do echo got $line; done; echo bye", stdin=True))
        await process.write_stdin(b"one\n")
        assert await anext(process) == ("stdout", b"got one\n")
        await process.write_stdin(b"two\n")
        assert await anext(process) == ("stdout", b"got two\n")
        process.close_stdin()
        assert b"".join([data async for _, data in process]) == b"bye\n"
        assert (await process.wait()).ok
        gone = await connection.start(sh("sleep 0.2", stdin=True))
        # What is on its way when the command ends is taken, and how much that is depends on who runs first.
        with pytest.raises(BrokenPipeError):
            await fill(gone)

    with_init(place, test)


def test_much_input_goes_through_a_terminal_and_a_pipe(place: Path) -> None:
    async def test(connection: Connection) -> None:
        process = await connection.start(CommandSpec(("stty", "size"), env=ENV, tty=(31, 97), stdin=True))
        assert b"31 97" in b"".join([data async for _, data in process])
        data = os.urandom(3_000_000)
        assert (await connection.run(sh("cat", stdin=data))).stdout_bytes == data

    with_init(place, test)


async def first_output(process: Process) -> bytes:
    async for _, data in process:
        return data
    return b""


def test_a_kept_process_lives_on_and_is_found_again(place: Path) -> None:
    async def test() -> None:
        async with client(place) as connection:
            process = await connection.start(sh("echo begun; cat; echo ended; exit 4", keep=True, stdin=True))
            assert await first_output(process) == b"begun\n"
            pid = process.pid
        async with client(place) as connection:
            (listed,) = await connection.processes()
            assert (listed.pid, listed.status, listed.keep) == (pid, "running", True)
            peek = await connection.attach(pid, follow=False)
            assert await first_output(peek) == b"begun\n"
            follower = await connection.attach(pid, claim_stdin=True)
            await follower.write_stdin(b"more\n")
            follower.close_stdin()
            assert b"".join([data async for _, data in follower]) == b"begun\nmore\nended\n"
            assert (await follower.wait()).exit_code == 4
            (listed,) = await connection.processes()
            assert (listed.status, listed.exit_code) == ("exited", 4)
            again = await connection.attach(pid)
            assert b"".join([data async for _, data in again]) == b"begun\nmore\nended\n"
            with pytest.raises(SandboxError):
                await connection.attach(99_999)

    run(test())


def test_a_command_dies_with_its_connection(place: Path) -> None:
    async def test() -> None:
        async with client(place) as watcher:
            async with client(place) as connection:
                await connection.start(sh("setsid sleep 60 & sleep 60"))
                while (await watcher.info()).processes < 2:
                    await asyncio.sleep(0.01)
            while (await watcher.info()).processes:
                await asyncio.sleep(0.01)

    run(test())


def test_held_commands_wait(place: Path) -> None:
    async def test(connection: Connection) -> None:
        report = await connection.hold(10)
        assert (report.running_commands, report.other_processes) == (0, 0)
        task = asyncio.create_task(connection.run(sh("echo ran")))
        done, _ = await asyncio.wait([task], timeout=0.2)
        assert not done
        assert (await connection.info()).held
        await connection.release()
        assert (await task).stdout == "ran\n"

    with_init(place, test)


def test_freezing_stops_and_thawing_goes_on(place: Path) -> None:
    async def test(connection: Connection) -> None:
        process = await connection.start(sh("while :; do echo x; sleep 0.01; done"))
        await anext(process)
        await connection.freeze()
        assert (await connection.info()).frozen
        process._queue.clear()
        await asyncio.sleep(0.1)
        process._queue.clear()
        await asyncio.sleep(0.1)
        assert not process._queue
        await connection.thaw()
        assert (await anext(process))[1].startswith(b"x")
        process.kill()
        await process.wait()

    with_init(place, test)


def test_namespaces_can_be_looked_at(place: Path) -> None:
    async def test(connection: Connection) -> None:
        descriptors = await connection.nsfds()
        try:
            names = [os.readlink(f"/proc/self/fd/{descriptor}").partition(":")[0] for descriptor in descriptors]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        assert names == ["user", "mnt", "pid", "net"]

    with_init(place, test)


def test_the_account_grows(place: Path) -> None:
    async def test(connection: Connection) -> None:
        before = (await connection.account()).cpu_s
        await connection.run(sh("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"))
        assert (await connection.account()).cpu_s > before
        assert await connection.mapped() == []

    with_init(place, test)


def test_shutting_down_ends_everything(place: Path) -> None:
    async def test(connection: Connection) -> None:
        process = await connection.start(sh("sleep 60"))
        await connection.shutdown(0.1)
        async with asyncio.timeout(5):
            await connection.closed.wait()
        with pytest.raises(SandboxError):
            await connection.run(sh("true"))
        assert process.ended

    with_init(place, test)


def test_killing_init_is_a_dead_sandbox(place: Path) -> None:
    harness = int((place.parent / "pid").read_text())

    async def test(connection: Connection) -> None:
        task = asyncio.create_task(connection.run(sh("sleep 60")))
        while not (await connection.info()).running_commands:
            await asyncio.sleep(0.01)
        for init in Path(f"/proc/{harness}/task/{harness}/children").read_text().split() or [str(harness)]:
            os.kill(int(init), signal.SIGKILL)
        with pytest.raises(SandboxDied):
            await task

    with_init(place, test)


@pytest.fixture
def inside() -> Iterator[str]:
    """A directory that the sandbox of the harness, which has the host's root, sees too."""
    with tempfile.TemporaryDirectory(prefix="wf-files-") as directory:
        yield directory


def test_files(place: Path, inside: str) -> None:
    async def test(connection: Connection) -> None:
        path = f"{inside}/new/parents/f"
        data = os.urandom(1_500_000)
        await files.write_file(connection, path, data, mode=0o640, mtime_ns=10**18)
        record = await files.stat(connection, path)
        assert (record.kind, record.mode, record.size_bytes, record.mtime_ns) == ("f", 0o640, len(data), 10**18)
        assert await files.read_file(connection, path) == data
        assert (
            b"".join([p async for p in files.read_stream(connection, path, offset_bytes=10, limit_bytes=9)])
            == data[10:19]
        )
        await files.write_file(connection, path, b"tail", append=True)
        assert Path(path).read_bytes() == data + b"tail"
        await files.write_file(connection, path, b"short")
        assert Path(path).read_bytes() == b"short"
        assert Path(path).stat().st_mode & 0o7777 == 0o640
        with pytest.raises(PathError) as caught:
            await files.write_file(connection, path, b"", exclusive=True)
        assert caught.value.errno == errno.EEXIST
        await files.make_link(connection, "f", f"{inside}/new/parents/l")
        entries = await files.list_directory(connection, f"{inside}/new/parents")
        assert [(entry.name, entry.kind, entry.target) for entry in entries] == [("f", "f", ""), ("l", "l", "f")]
        assert (await files.stat(connection, f"{inside}/new/parents/l", follow=False)).kind == "l"
        await files.change_mode(connection, path, 0o600)
        await files.rename(connection, path, f"{inside}/g")
        assert Path(inside, "g").stat().st_mode & 0o7777 == 0o600
        with pytest.raises(PathError) as caught:
            await files.delete(connection, f"{inside}/new")
        assert caught.value.errno == errno.ENOTEMPTY
        await files.delete(connection, f"{inside}/new", recursive=True)
        assert os.listdir(inside) == ["g"]

    with_init(place, test)


def test_very_many_files_are_laid_in_one_request(place: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    builtin = Connection.builtin

    async def counted(self: Connection, operation: str, *arguments: Any, **options: Any) -> bytes:
        asked.append(operation)
        return await builtin(self, operation, *arguments, **options)

    monkeypatch.setattr(Connection, "builtin", counted)
    many = {f"d{number % 50}/f{number}": (b"%d" % number, 0o644) for number in range(2000)}

    async def test(connection: Connection) -> None:
        await files.lay(connection, inside, {"gone": (b"", 0o644), "big": (bytes(3_000_000), 0o600)})
        await files.lay(connection, inside, many, removed=["gone", "d1"])
        with pytest.raises(PathError, match="outside") as caught:
            await files.lay(connection, inside, {"../outside": (b"", 0o644)})
        assert (caught.value.path, caught.value.errno) == (inside, errno.EINVAL)

    with_init(place, test)
    found = [path for path in Path(inside).rglob("*") if path.is_file()]
    assert {str(path.relative_to(inside)): path.read_bytes() for path in found if path.name != "big"} == {
        name: content for name, (content, _) in many.items()
    }
    assert Path(inside, "big").stat().st_size == 3_000_000
    assert asked == ["lay"] * 3


def test_reading_what_is_no_file_fails_at_once(place: Path, inside: str) -> None:
    os.mkfifo(f"{inside}/pipe")
    with open(f"{inside}/sparse", "wb") as sparse:
        sparse.truncate(4 << 30)

    async def test(connection: Connection) -> None:
        for path, number in [
            (inside, errno.EISDIR),
            (f"{inside}/pipe", errno.EINVAL),
            ("/dev/zero", errno.EINVAL),
            (f"{inside}/none", errno.ENOENT),
            (f"{inside}/sparse", errno.EFBIG),
        ]:
            with pytest.raises(PathError) as caught:
                await files.read_file(connection, path)
            assert (caught.value.path, caught.value.errno) == (path, number)
        with pytest.raises(PathError):
            await files.write_file(connection, f"{inside}/pipe", b"x")
        assert await files.read_file(connection, "/proc/self/status")

    with_init(place, test)


def test_a_tree_there_and_back(place: Path, inside: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(60):
        (source / f"d{number % 7}").mkdir(parents=True, exist_ok=True)
        (source / f"d{number % 7}" / f"f{number}").write_bytes(os.urandom(number * 1000))
    (source / "link").symlink_to("d1/f1")
    (source / "d2").chmod(0o700)

    async def test(connection: Connection) -> None:
        up = await upload_tree(connection, source, f"{inside}/in")
        down = await download_tree(connection, f"{inside}/in", tmp_path / "out")
        assert up == down
        assert (up.files, up.directories, up.links) == (60, 7, 1)

    with_init(place, test)
    difference = subprocess.run(["diff", "-r", source, tmp_path / "out"], capture_output=True, check=False)
    assert difference.returncode == 0, difference.stdout
    assert (tmp_path / "out" / "d2").stat().st_mode & 0o777 == 0o700
