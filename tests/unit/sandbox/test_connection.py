"""A connection against a played init: the end, cancellation, limits and calls."""

from __future__ import annotations

import array
import asyncio
import errno
import os
import signal
import socket
import struct

import pytest
from tests.unit.sandbox.fake_init import SANDBOX_ID, FakeInit, connected, ending, error, hello, output, run

from worldfork.core.errors import ConfigError, FormatUnsupported, SandboxDied, SandboxError
from worldfork.sandbox import wire
from worldfork.sandbox.command import CommandSpec, Reason
from worldfork.sandbox.connection import IN_MACHINE, Connection

TRUE = CommandSpec(("true",))


async def opened(*first: bytes, close: bool = False) -> Connection:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"".join(first))
        if close:
            theirs.close()
        try:
            return await Connection.open(ours, sandbox_id=SANDBOX_ID)
        finally:
            assert ours.fileno() == -1


def test_another_version_is_told() -> None:
    with pytest.raises(FormatUnsupported) as caught:
        run(opened(hello(version=2)))
    assert caught.value.sandbox_id == SANDBOX_ID  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "first",
    [
        b"",
        hello()[:7],
        hello(sandbox_id="sb-bbbbbbbbbbbbbbbb"),
        b"\xff" * 40,
        wire.frame(wire.HELLO, 0, b"\1\0"),
        error(0, 1),
    ],
    ids=["nothing", "half", "another sandbox", "noise", "short", "refused"],
)
def test_a_greeting_that_is_none_is_a_dead_sandbox(first: bytes) -> None:
    with pytest.raises(SandboxDied) as caught:
        run(opened(first, close=True))
    assert caught.value.sandbox_id == SANDBOX_ID  # type: ignore[attr-defined]
    assert caught.value.remedy


def test_an_init_in_a_machine_need_not_know_its_sandbox() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(hello(sandbox_id=IN_MACHINE))
            connection = await Connection.open(ours, sandbox_id=SANDBOX_ID)
            connection.close()
            assert connection.sandbox_id == SANDBOX_ID

    run(test())


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 5, 11, 12, 13, 64, 1000])
def test_a_command_whatever_the_pieces(piece_bytes: int) -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(TRUE))
            channel = (await init.expect(wire.EXEC)).channel
            stream = wire.u32_frame(wire.STARTED, channel, 7) + output(channel, "a😀b".encode())
            stream += output(channel, b"\xffe", wire.STDERR) + output(channel, b"c") + ending(channel, 0, 3)
            for start in range(0, len(stream), piece_bytes):
                await init.send(stream[start : start + piece_bytes])
                await asyncio.sleep(0)
            result = await task
            assert (result.exit_code, result.stdout, result.stderr) == (3, "a😀bc", "\ufffde")
            assert (result.reason, result.signal, result.cpu_s, result.wall_s) == (Reason.EXITED, None, 0.0015, 0.009)
            assert result.max_rss_bytes == 2 << 20

    run(test())


def test_everything_under_way_learns_of_the_end() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            running = connection.start(TRUE)
            task = asyncio.create_task(running)
            channel = (await init.expect(wire.EXEC)).channel
            await init.started(channel)
            process = await task
            pending = [
                asyncio.create_task(connection.run(TRUE)),
                asyncio.create_task(connection.start(TRUE)),
                asyncio.create_task(connection.info()),
                asyncio.create_task(connection.hold(5)),
                asyncio.create_task(process.wait()),
                asyncio.create_task(connection.attach(9)),
            ]
            for _ in range(5):
                await init.receive()
            init.close()
            await connection.closed.wait()
            for task_ in pending:
                with pytest.raises(SandboxDied) as caught:
                    await task_
                assert caught.value.sandbox_id == SANDBOX_ID  # type: ignore[attr-defined]
            with pytest.raises(SandboxDied):
                await connection.run(TRUE)

    run(test())


def test_what_was_printed_before_the_end_is_read_first() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.start(TRUE))
            channel = (await init.expect(wire.EXEC)).channel
            await init.started(channel)
            process = await task
            await init.send(output(channel, b"last words"))
            init.close()
            await connection.closed.wait()
            assert await anext(process) == ("stdout", b"last words")
            with pytest.raises(SandboxDied):
                await anext(process)

    run(test())


def test_an_end_that_came_with_the_end_of_the_stream_counts() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(TRUE))
            channel = (await init.expect(wire.EXEC)).channel
            await init.exited(channel, 5)
            init.close()
            assert (await task).exit_code == 5

    run(test())


def test_a_broken_frame_ends_the_connection() -> None:
    async def test(noise: bytes) -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(TRUE))
            channel = (await init.expect(wire.EXEC)).channel
            await init.send(noise or ending(channel, 77))
            with pytest.raises(SandboxDied, match="protocol"):
                await task

    for noise in (b"\xff" * 12, wire.frame(wire.EXIT, 1, b"short"), wire.frame(wire.HELLO, 1), b""):
        run(test(noise))


def test_cancellation_kills_the_tree_and_waits_for_it() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(TRUE))
            channel = (await init.expect(wire.EXEC)).channel
            await init.started(channel)
            task.cancel()
            frame = await init.expect(wire.SIGNAL)
            assert (frame.channel, frame.flags, frame.payload) == (channel, wire.FLAG_TREE, struct.pack("<i", 9))
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not task.done()
            await init.send(ending(channel, 4, -9, 9))
            with pytest.raises(asyncio.CancelledError):
                await task

    run(test())


def test_cancelling_a_start_kills_what_may_have_started() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.start(TRUE))
            channel = (await init.expect(wire.EXEC)).channel
            task.cancel()
            assert (await init.expect(wire.SIGNAL)).channel == channel
            await init.send(ending(channel, 4, -9, 9))
            with pytest.raises(asyncio.CancelledError):
                await task

    run(test())


def test_a_sandbox_that_dies_during_a_cancellation_does_not_hold_it_up() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(TRUE))
            await init.expect(wire.EXEC)
            task.cancel()
            await init.expect(wire.SIGNAL)
            init.close()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(test())


def test_more_than_the_limit_kills_the_tree_and_keeps_the_head() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(TRUE, max_output_bytes=10))
            channel = (await init.expect(wire.EXEC)).channel
            await init.send(output(channel, b"0123456789"), output(channel, b"x"), output(channel, b"y"))
            await init.expect(wire.SIGNAL)
            await init.send(output(channel, b"z"), ending(channel, 4, -9, 9))
            result = await task
            assert (result.reason, result.stdout, result.stdout_dropped_bytes) == (Reason.OUTPUT_LIMIT, "0123456789", 3)
            assert not result.ok

    run(test())


def test_keeping_the_tail_lets_the_command_go_on() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(TRUE, max_output_bytes=4, keep_tail=True))
            channel = (await init.expect(wire.EXEC)).channel
            await init.send(output(channel, b"abcdefgh"), ending(channel, 0))
            result = await task
            assert (result.ok, result.stdout) == (True, "ab\n[... 4 bytes left out ...]\ngh")

    run(test())


@pytest.mark.parametrize(
    ("number", "said", "exit_code", "stderr"),
    [
        (errno.ENOENT, b"", 127, "prog: No such file"),
        (errno.EACCES, b"", 126, "prog: Permission"),
        (errno.ENOENT, b"said\n", 127, "said\n"),
    ],
)
def test_a_command_that_does_not_start_is_a_result(number: int, said: bytes, exit_code: int, stderr: str) -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(CommandSpec(("prog",))))
            channel = (await init.expect(wire.EXEC)).channel
            await init.send(*([output(channel, said, wire.STDERR)] if said else []), ending(channel, 5, number))
            result = await task
            assert (result.reason, result.exit_code) == (Reason.NOT_STARTED, exit_code)
            assert result.stderr.startswith(stderr)

    run(test())


def test_a_refusal_is_an_error_unless_the_sandboxs_limits_cause_it() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(TRUE))
            await init.send(error((await init.expect(wire.EXEC)).channel, errno.EINVAL, "no user of that name"))
            with pytest.raises(SandboxError, match="no user of that name"):
                await task
            task = asyncio.create_task(connection.run(TRUE))
            await init.send(error((await init.expect(wire.EXEC)).channel, errno.EAGAIN))
            result = await task
            assert (result.reason, result.exit_code) == (Reason.NOT_STARTED, 126)
            assert "limit of processes" in result.stderr

    run(test())


def test_frames_of_channels_that_are_over_are_ignored() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(TRUE))
            channel = (await init.expect(wire.EXEC)).channel
            await init.exited(channel)
            await task
            await init.send(error(channel, errno.ESRCH), output(channel, b"late"), wire.frame(wire.REPLY, 4711))
            task = asyncio.create_task(connection.run(TRUE))
            await init.exited((await init.expect(wire.EXEC)).channel, 1)
            assert (await task).exit_code == 1

    run(test())


def test_hundreds_at_once_each_get_their_own_end() -> None:
    async def answer(init: FakeInit, count: int) -> None:
        channels = [(await init.expect(wire.EXEC)).channel for _ in range(count)]
        for channel in reversed(channels):
            await init.send(output(channel, str(channel).encode()), ending(channel, 0, channel % 200))

    async def test() -> None:
        async with connected() as (connection, init):
            tasks = [asyncio.create_task(connection.run(TRUE)) for _ in range(500)]
            await answer(init, 500)
            for result in await asyncio.gather(*tasks):
                assert result.exit_code == int(result.stdout) % 200

    run(test())


def test_a_request_larger_than_the_socket_waits_for_no_one() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            large = CommandSpec(("x", "a" * (7 << 20)))
            tasks = [asyncio.create_task(connection.run(large)), asyncio.create_task(connection.run(TRUE))]
            await asyncio.sleep(0)
            first, second = await init.expect(wire.EXEC), await init.expect(wire.EXEC)
            assert len(first.payload) > 7 << 20
            await init.send(ending(first.channel, 0, 1), ending(second.channel, 0, 2))
            assert [(await task).exit_code for task in tasks] == [1, 2]

    run(test())


def test_calls_are_decoded() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.hold(1.5))
            frame = await init.expect(wire.HOLD)
            assert frame.payload == struct.pack("<I", 1500)
            await init.send(wire.frame(wire.REPLY, frame.channel, struct.pack("<II", 2, 3)))
            report = await task
            assert (report.running_commands, report.other_processes) == (2, 3)
            call = asyncio.create_task(connection.account())
            frame = await init.expect(wire.ACCOUNT)
            await init.send(wire.frame(wire.REPLY, frame.channel, struct.pack("<QQ", 1_500_000, 2)))
            account = await call
            assert (account.cpu_s, account.oom_kills) == (1.5, 2)
            closing = asyncio.create_task(connection.shutdown(0))
            await init.expect(wire.SHUTDOWN)
            init.close()
            await closing

    run(test())


@pytest.mark.parametrize(
    ("name", "kind", "undo"), [("hold", wire.HOLD, wire.RELEASE), ("freeze", wire.FREEZE, wire.THAW)]
)
@pytest.mark.parametrize("answered_first", [False, True])
def test_what_was_granted_to_a_cancelled_caller_is_taken_back(
    name: str, kind: int, undo: int, answered_first: bool
) -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            call = connection.hold(60) if name == "hold" else connection.freeze()
            task = asyncio.create_task(call)
            frame = await init.expect(kind)
            answer = wire.frame(wire.REPLY, frame.channel, struct.pack("<II", 1, 1))
            if answered_first:
                # Both in one turn of the loop: the answer is in, the caller has not run since.
                init.sock.send(answer)
                connection._readable()
                task.cancel()
            else:
                task.cancel()
                await init.send(answer)
            with pytest.raises(asyncio.CancelledError):
                await task
            await init.expect(undo)

    run(test())


def test_a_freeze_that_fails_is_an_error_and_is_undone() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.freeze())
            frame = await init.expect(wire.FREEZE)
            await init.send(wire.frame(wire.REPLY, frame.channel, struct.pack("<I", 0)))
            with pytest.raises(SandboxError, match="stopped"):
                await task
            await init.expect(wire.THAW)

    run(test())


def test_namespaces_come_as_descriptors() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.nsfds())
            frame = await init.expect(wire.NSFDS)
            null = os.open("/dev/null", os.O_RDONLY)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null] * 4).tobytes())
            init.sock.sendmsg([wire.frame(wire.REPLY, frame.channel)], [rights])
            os.close(null)
            descriptors = await task
            assert len(set(descriptors)) == 4
            for descriptor in descriptors:
                assert not os.get_inheritable(descriptor)
                os.close(descriptor)

    run(test())


def test_namespaces_that_do_not_arrive_are_an_error() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.nsfds())
            await init.send(wire.frame(wire.REPLY, (await init.expect(wire.NSFDS)).channel))
            with pytest.raises(SandboxError):
                await task

    run(test())


def test_stdin_that_nobody_could_write_is_refused() -> None:
    async def test() -> None:
        async with connected() as (connection, _init):
            with pytest.raises(ConfigError):
                await connection.run(CommandSpec(("cat",), stdin=True))
            with pytest.raises(ConfigError):
                await connection.hold(-1)

    run(test())


def test_a_forked_child_lets_go_and_the_parent_goes_on() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            if (child := os.fork()) == 0:
                code = 1
                try:
                    connection.new_channel()
                except SandboxError:
                    code = 0 if connection._socket.fileno() == -1 else 2
                finally:
                    connection.close()
                    os._exit(code)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            task = asyncio.create_task(connection.run(TRUE))
            await init.exited((await init.expect(wire.EXEC)).channel, 9)
            assert (await task).exit_code == 9

    run(test())


def test_closing_is_idempotent_and_told_from_a_death() -> None:
    async def test() -> None:
        async with connected() as (connection, _init):
            task = asyncio.create_task(connection.run(TRUE))
            await asyncio.sleep(0)
            connection.close()
            connection.close()
            with pytest.raises(SandboxDied, match="closed on this side"):
                await task

    run(test())


def test_an_unknown_signal_is_refused() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.start(TRUE))
            channel = (await init.expect(wire.EXEC)).channel
            await init.started(channel)
            process = await task
            with pytest.raises(ConfigError):
                process.signal(0)
            process.signal(signal.SIGTERM)
            frame = await init.expect(wire.SIGNAL)
            assert (frame.flags, frame.payload) == (0, struct.pack("<i", 15))

    run(test())
