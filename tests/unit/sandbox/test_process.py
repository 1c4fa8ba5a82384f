"""A process against a played init: credit in both directions, detaching, replays."""

from __future__ import annotations

import asyncio
import errno
import struct

import pytest
from tests.unit.sandbox.fake_init import FakeInit, connected, ending, error, output, run

from worldfork.core.errors import SandboxError
from worldfork.sandbox import wire
from worldfork.sandbox.command import CommandSpec, Reason
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.process import Process
from worldfork.sandbox.streams import WINDOW_BYTES

PIECE = b"x" * wire.MAX_PAYLOAD_BYTES
FILL = WINDOW_BYTES // len(PIECE)


async def begun(connection: Connection, init: FakeInit, spec: CommandSpec) -> Process:
    task = asyncio.create_task(connection.start(spec))
    await init.started((await init.expect(wire.EXEC)).channel)
    return await task


async def silent(init: FakeInit) -> bool:
    """Nothing comes from the client although it had its turns."""
    try:
        async with asyncio.timeout(0.02):
            await init.receive()
    except TimeoutError:
        return True
    return False


def test_credit_follows_the_consumer() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            process = await begun(connection, init, CommandSpec(("yes",)))
            await init.send(*[output(process.channel, PIECE)] * FILL)
            assert await silent(init)
            taken = 0
            async for _, data in process:
                taken += len(data)
                if taken == WINDOW_BYTES // 2:
                    frame = await init.expect(wire.CREDIT)
                    assert frame.payload == struct.pack("<I", WINDOW_BYTES // 2)
                    break
            assert await silent(init)

    run(test())


def test_run_grants_as_it_keeps() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(CommandSpec(("yes",))))
            channel = (await init.expect(wire.EXEC)).channel
            granted = WINDOW_BYTES
            for _ in range(64):
                while granted < len(PIECE):
                    granted += struct.unpack("<I", (await init.expect(wire.CREDIT)).payload)[0]
                granted -= len(PIECE)
                await init.send(output(channel, PIECE))
            await init.exited(channel)
            assert len((await task).stdout_bytes) == 64 * len(PIECE)

    run(test())


def test_waiting_drops_what_nobody_takes() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            process = await begun(connection, init, CommandSpec(("yes",)))
            await init.send(*[output(process.channel, PIECE)] * FILL)
            await asyncio.sleep(0.01)
            task = asyncio.create_task(process.wait())
            await init.expect(wire.CREDIT)
            await init.exited(process.channel, 4)
            result = await task
            assert (result.exit_code, result.stdout_bytes) == (4, b"")

    run(test())


def test_waiting_beside_a_consumer_leaves_it_everything() -> None:
    async def consume(process: Process) -> bytes:
        return b"".join([data async for _, data in process])

    async def test() -> None:
        async with connected() as (connection, init):
            process = await begun(connection, init, CommandSpec(("cat",)))
            consumer = asyncio.create_task(consume(process))
            await asyncio.sleep(0)
            waiter = asyncio.create_task(process.wait())
            await init.send(
                output(process.channel, b"abc"), output(process.channel, b"def"), ending(process.channel, 0)
            )
            assert (await waiter).ok
            assert await consumer == b"abcdef"

    run(test())


def test_cancelling_a_wait_leaves_the_command_alone() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            process = await begun(connection, init, CommandSpec(("sleep",)))
            task = asyncio.create_task(process.wait())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await silent(init)
            await init.exited(process.channel, 2)
            assert (await process.wait()).exit_code == 2

    run(test())


def test_stdin_goes_out_within_credit() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            data = bytes(range(256)) * 1024
            task = asyncio.create_task(connection.run(CommandSpec(("cat",), stdin=data)))
            channel = (await init.expect(wire.EXEC)).channel
            received = (await init.expect(wire.STDIN)).payload
            assert len(received) == wire.STDIN_CREDIT_BYTES
            assert await silent(init)
            for size_bytes in (1, 99_999, len(data)):
                await init.send(wire.u32_frame(wire.STDIN_CREDIT, channel, size_bytes))
                wanted = min(len(data), len(received) + size_bytes)
                while len(received) < wanted:
                    received += (await init.expect(wire.STDIN)).payload
                assert len(received) == wanted
            assert (await init.expect(wire.STDIN)).flags == wire.FLAG_EOF
            assert received == data
            await init.exited(channel)
            assert (await task).ok

    run(test())


def test_writers_take_turns_and_wait_for_credit() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            process = await begun(connection, init, CommandSpec(("cat",), stdin=True))
            first = asyncio.create_task(process.write_stdin(b"a" * (wire.STDIN_CREDIT_BYTES + 1)))
            second = asyncio.create_task(process.write_stdin(b"b"))
            received = (await init.expect(wire.STDIN)).payload
            assert not first.done()
            await init.send(wire.u32_frame(wire.STDIN_CREDIT, process.channel, 2))
            received += (await init.expect(wire.STDIN)).payload + (await init.expect(wire.STDIN)).payload
            assert received == b"a" * (wire.STDIN_CREDIT_BYTES + 1) + b"b"
            await asyncio.gather(first, second)
            process.close_stdin()
            process.close_stdin()
            assert (await init.expect(wire.STDIN)).flags == wire.FLAG_EOF
            assert await silent(init)
            with pytest.raises(BrokenPipeError):
                await process.write_stdin(b"more")

    run(test())


def test_a_write_to_a_command_that_ended_is_a_broken_pipe() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            process = await begun(connection, init, CommandSpec(("cat",), stdin=True))
            writer = asyncio.create_task(process.write_stdin(b"a" * 200_000))
            await init.expect(wire.STDIN)
            await init.exited(process.channel)
            with pytest.raises(BrokenPipeError):
                await writer

    run(test())


def test_a_cancelled_write_gives_up_its_turn() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            process = await begun(connection, init, CommandSpec(("cat",), stdin=True))
            writer = asyncio.create_task(process.write_stdin(b"a" * 200_000))
            await init.expect(wire.STDIN)
            writer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writer
            await init.send(wire.u32_frame(wire.STDIN_CREDIT, process.channel, 10))
            await process.write_stdin(b"next")
            assert (await init.expect(wire.STDIN)).payload == b"next"

    run(test())


def test_a_command_without_stdin_takes_none() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            process = await begun(connection, init, CommandSpec(("true",)))
            with pytest.raises(BrokenPipeError):
                await process.write_stdin(b"x")

    run(test())


def test_detaching_stops_following() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            process = await begun(connection, init, CommandSpec(("server",), keep=True))
            process.detach()
            await init.expect(wire.DETACH)
            with pytest.raises(SandboxError, match="detached"):
                await process.wait()
            await init.exited(process.channel)

    run(test())


def test_a_replay_that_does_not_follow_ends_with_the_process_running() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.attach(12, follow=False))
            frame = await init.expect(wire.ATTACH)
            assert frame.payload == struct.pack("<III", 12, WINDOW_BYTES, wire.ATTACH_REPLAY)
            await init.started(frame.channel, 12)
            process = await task
            lost = wire.frame(wire.TRUNCATED, frame.channel, struct.pack("<Q", 5))
            await init.send(lost, output(frame.channel, b"kept"), lost, wire.frame(wire.REPLY, frame.channel))
            assert [item async for item in process] == [("stdout", b"kept")]
            assert (process.pid, process.truncated_bytes) == (12, 10)
            with pytest.raises(SandboxError, match="still runs"):
                await process.wait()

    run(test())


def test_attaching_to_nothing_is_an_error() -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.attach(12))
            await init.send(error((await init.expect(wire.ATTACH)).channel, errno.ESRCH))
            with pytest.raises(SandboxError) as caught:
                await task
            assert caught.value.errno == errno.ESRCH  # type: ignore[attr-defined]

    run(test())


@pytest.mark.parametrize(
    ("number", "reason"),
    [(0, Reason.EXITED), (1, Reason.SIGNALED), (2, Reason.OOM_KILLED), (3, Reason.TIMED_OUT), (4, Reason.CANCELLED)],
)
def test_each_reason_is_told(number: int, reason: Reason) -> None:
    async def test() -> None:
        async with connected() as (connection, init):
            task = asyncio.create_task(connection.run(CommandSpec(("x",))))
            channel = (await init.expect(wire.EXEC)).channel
            await init.send(
                output(channel, b"partial"), ending(channel, number, -9 if number else 0, 9 if number else 0)
            )
            result = await task
            assert (result.reason, result.stdout) == (reason, "partial")
            assert result.timed_out == (reason is Reason.TIMED_OUT)

    run(test())
