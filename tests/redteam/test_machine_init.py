"""What a guest that was broken into can say as the init of its sandbox: its caller gets errors, and never waits."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sandbox.fake_init import SANDBOX_ID, FakeInit, connected, ending, hello, output, run

from worldfork.core.errors import SandboxDied, WorldforkError
from worldfork.sandbox import connection as connections
from worldfork.sandbox import files, wire
from worldfork.sandbox.command import CommandSpec
from worldfork.sandbox.connection import IN_MACHINE, Connection

pytestmark = pytest.mark.slow

TRUE = CommandSpec(("true",))
CALLS: dict[str, Callable[[Connection], Awaitable[object]]] = {
    "run": lambda c: c.run(TRUE),
    "processes": lambda c: c.processes(),
    "info": lambda c: c.info(),
    "account": lambda c: c.account(),
    "mapped": lambda c: c.mapped(),
    "hold": lambda c: c.hold(1),
    "release": lambda c: c.release(),
    "freeze": lambda c: c.freeze(),
    "thaw": lambda c: c.thaw(),
    "namespaces": lambda c: c.nsfds(),
    "list": lambda c: files.list_directory(c, "/"),
    "stat": lambda c: files.stat(c, "/"),
    "read": lambda c: files.read_file(c, "/x"),
}
_NUMBERS = st.sampled_from([0, 1, 2**63, 2**64 - 1])
_ENDINGS = st.builds(
    lambda reason, code, signal, *rest: wire.frame(
        wire.EXIT, 1, struct.pack("<B3xiiQQQQ", reason, code, signal, *rest)
    ),
    st.integers(0, 255),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**31), 2**31 - 1),
    *[_NUMBERS] * 4,
)
_BODIES = st.one_of(
    st.binary(max_size=120),
    st.integers(0, 60).map(lambda count: bytes([255]) * count),
    st.builds(lambda count, rest: struct.pack("<I", count) + rest, st.integers(0, 3), st.binary(max_size=60)),
)
_FRAMES = st.one_of(
    _ENDINGS,
    st.builds(
        wire.frame,
        st.sampled_from([*range(wire.HELLO, wire.TRUNCATED + 1), 1, 65535]),
        st.sampled_from([1, 0, 2]),
        _BODIES,
    ),
)


async def heard(call: Callable[[Connection], Awaitable[object]], said: list[bytes], faults: list[str]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context)))
    async with connected() as (connection, init):
        asked = asyncio.ensure_future(call(connection))
        await init.receive()
        await init.send(*said)
        init.close()
        try:
            await asked
        except WorldforkError:
            pass


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=60, deadline=None)
@given(said=st.lists(_FRAMES, min_size=1, max_size=4))
def test_whatever_it_says_is_an_answer_or_an_error_of_ours(name: str, said: list[bytes]) -> None:
    faults: list[str] = []
    run(heard(CALLS[name], said, faults))
    assert faults == []


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("run", "list", "stat", "read")])
def test_an_init_that_never_answers_holds_nobody_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_ANSWER_S", 0.05)

    async def scenario() -> None:
        async with connected() as (connection, init):
            asked = asyncio.ensure_future(CALLS[name](connection))
            await init.receive()
            with pytest.raises(SandboxDied, match="did not answer"):
                await asked
            assert connection.closed.is_set()

    run(scenario(), timeout_s=10)


def test_a_time_limit_that_the_guest_does_not_keep_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_OVERDUE_S", 0.05)

    async def scenario() -> None:
        async with connected() as (connection, init):
            asked = asyncio.ensure_future(connection.run(CommandSpec(("sleep",), timeout_s=0.05, drain_s=0.0)))
            channel = (await init.expect(wire.EXEC)).channel
            await init.started(channel)
            with pytest.raises(SandboxDied, match="time limit"):
                await asked

    run(scenario(), timeout_s=10)


def test_an_init_that_keeps_time_is_not_hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_OVERDUE_S", 5.0)

    async def scenario() -> None:
        async with connected() as (connection, init):
            asked = asyncio.ensure_future(connection.run(CommandSpec(("sleep",), timeout_s=0.01, drain_s=0.0)))
            channel = (await init.expect(wire.EXEC)).channel
            await init.started(channel)
            await asyncio.sleep(0.05)  # longer than its limit: the end takes its way
            await init.send(ending(channel, 3))
            assert (await asked).timed_out

    run(scenario(), timeout_s=10)


def test_a_flood_that_nobody_takes_ends_the_connection_and_fills_nothing() -> None:
    async def flood(init: FakeInit, piece: bytes) -> None:
        for _ in range(4096):
            await init.send(piece)

    async def scenario() -> None:
        async with connected() as (connection, init):
            process = connection.launch(CommandSpec(("yes",)))
            channel = (await init.expect(wire.EXEC)).channel
            await init.started(channel)
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                await flood(init, output(channel, bytes(32 << 10)))
            await connection.closed.wait()
            with pytest.raises(SandboxDied, match="more output than it may"):
                await process.wait()
            assert sum(len(data) for _, data in process._queue) <= 256 << 10

    run(scenario())


def test_answers_to_what_nobody_asked_and_second_answers_change_nothing() -> None:
    async def scenario() -> None:
        async with connected() as (connection, init):
            asked = asyncio.ensure_future(connection.info())
            channel = (await init.expect(wire.INFO)).channel
            reply = wire.frame(wire.REPLY, channel, struct.pack("<QIIIII", 5000, 1, 2, 3, 0, 0))
            await init.send(wire.frame(wire.REPLY, channel + 7, b"forged"), reply, reply, ending(channel, 0))
            assert (await asked).uptime_s == 5
            again = asyncio.ensure_future(connection.run(TRUE))
            channel = (await init.expect(wire.EXEC)).channel
            await init.started(channel)
            await init.exited(channel)
            assert (await again).ok

    run(scenario())


async def greeted() -> tuple[Connection, FakeInit]:
    ours, theirs = socket.socketpair()
    init = FakeInit(theirs)
    await init.send(hello(sandbox_id=IN_MACHINE))
    return await Connection.open(ours, sandbox_id=SANDBOX_ID), init


def test_a_machine_that_hangs_is_noticed_by_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PULSE_S", 0.02)
    monkeypatch.setattr(connections, "_ANSWER_S", 0.1)

    async def scenario() -> None:
        connection, init = await greeted()
        with pytest.raises(SandboxDied, match="did not answer"):
            await connection.run(CommandSpec(("sleep",)))
        init.close()

    run(scenario(), timeout_s=10)


def test_a_machine_whose_init_lives_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_PULSE_S", 0.02)

    async def scenario() -> None:
        connection, init = await greeted()
        waiting = asyncio.ensure_future(connection.run(CommandSpec(("sleep",))))
        channel = (await init.expect(wire.EXEC)).channel
        for _ in range(3):
            asked = (await init.expect(wire.INFO)).channel
            await init.send(wire.frame(wire.REPLY, asked, struct.pack("<QIIIII", 1, 1, 1, 1, 0, 0)))
        await init.started(channel)
        await init.exited(channel)
        assert (await waiting).ok
        connection.close()
        init.close()

    run(scenario(), timeout_s=10)
