"""Requests to the guest of a machine, with a stand-in for it behind a real `keep`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest
from tests.unit.native import stand_in

from worldfork.core.errors import LaunchFailed, SandboxDied, SandboxError
from worldfork.sandbox.microvm import wire
from worldfork.sandbox.microvm.control import control, exactly, open_stream, reach
from worldfork.sandbox.microvm.keep import Kept, base_items, start_keep
from worldfork.sandbox.microvm.wire import Kind, Op, Target

PROGRAM = Path(stand_in.__file__).read_text(encoding="utf-8")
GENERATION = 7


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(bounded())


async def answering(kept: Kept) -> None:
    await kept.launched()
    await kept.ready()


class Machines:
    """Keeps of one test; each has a run directory of its own."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._kept: list[Kept] = []

    def start(self, *words: str) -> tuple[Kept, Path]:
        run = self._top / f"r{len(self._kept)}"
        run.mkdir(mode=0o700)
        arguments = words or (sys.executable, "-I", "-S", "-c", PROGRAM)
        kept = start_keep(base_items("sb-keep", run, str(run / "lock")), arguments, {}, GENERATION)
        self._kept.append(kept)
        return kept, run

    async def ready(self) -> tuple[Kept, Path]:
        kept, run = self.start()
        await answering(kept)
        return kept, run

    def end(self) -> None:
        for kept in self._kept:
            kept.put_down()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    found = Machines(tmp_path)
    yield found
    found.end()


def test_an_answer_is_the_body(machines: Machines) -> None:
    async def work() -> None:
        _, run = await machines.ready()
        async with control(run) as guest:
            assert await guest.ask(Op.STATS, b"one") == b"one"
            assert await guest.ask(Op.STATS, b"two") == b"two"

    run(work())


def test_two_clients_at_once(machines: Machines) -> None:
    async def work() -> None:
        _, run = await machines.ready()
        async with control(run) as one, control(run) as two:
            answers = await asyncio.gather(one.ask(Op.STATS, b"1"), two.ask(Op.STATS, b"2"))
            assert list(answers) == [b"1", b"2"]

    run(work())


def test_quiet_holds_up_others_until_go(machines: Machines) -> None:
    async def work() -> None:
        _, run = await machines.ready()
        async with control(run) as one, control(run) as two:
            await one.quiesce()
            with pytest.raises(SandboxError) as caught:
                await two.ask(Op.STATS, b"late", timeout_s=0.2)
            assert caught.value.fields["timeout_s"] == 0.2
            with pytest.raises(SandboxError):
                await two.ask(Op.STATS, b"never", timeout_s=0.2)
            await one.go()
            assert await one.ask(Op.STATS, b"on") == b"on"

    run(work())


def test_a_stream_is_a_connection_of_its_own(machines: Machines) -> None:
    async def work() -> None:
        _, run = await machines.ready()
        async with control(run) as guest:
            with await guest.stream(Target.EXPORT, b"/there") as sock, await open_stream(run, Target.LAUNCH) as other:
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(sock, b"echo")
                await loop.sock_sendall(other, b"other")
                assert await exactly(sock, 4) == b"echo"
                assert await exactly(other, 5) == b"other"
            assert await guest.ask(Op.STATS, b"still") == b"still"

    run(work())


def test_a_machine_that_ends_while_it_is_asked(machines: Machines) -> None:
    async def work() -> None:
        kept, run = await machines.ready()
        async with control(run) as guest:
            with reach(run / "control") as other:
                other.send(wire.control(stand_in.DIE, 1))
                with pytest.raises(EOFError):
                    await exactly(other, 1)
            with pytest.raises(SandboxDied):
                await guest.ask(Op.STATS)
        words = await kept.last_words()
        assert isinstance(words, LaunchFailed)
        assert "the machine is on fire" in words.message

    run(work())


def test_nobody_there(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(SandboxDied):
            async with control(tmp_path):
                pass
        with pytest.raises(SandboxDied):
            await open_stream(tmp_path, Target.EXPORT)

    run(work())


def test_a_program_that_is_not_there_is_named(machines: Machines, tmp_path: Path) -> None:
    async def work() -> None:
        kept, _ = machines.start(f"{tmp_path}/none/qemu")
        with pytest.raises(SandboxError) as caught:
            await answering(kept)
        assert f"{tmp_path}/none/qemu" in caught.value.message

    run(work())


def test_what_ends_before_it_answers_says_why(machines: Machines) -> None:
    async def work() -> None:
        kept, _ = machines.start(sys.executable, "-I", "-S", "-c", "import sys; sys.exit('no such device')")
        with pytest.raises(LaunchFailed) as caught:
            await answering(kept)
        assert "no such device" in caught.value.message

    run(work())


def test_put_down_waits_for_the_machine(machines: Machines) -> None:
    async def work() -> None:
        kept, _ = await machines.ready()
        qemu = os.pidfd_open(kept.qemu_pid)
        kept.put_down()
        try:
            with pytest.raises(ProcessLookupError):
                os.kill(kept.qemu_pid, 0)
        finally:
            os.close(qemu)

    run(work())


def test_what_answers_something_else_is_no_keep(tmp_path: Path) -> None:
    async def work() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(wire.HEADER.size)
            writer.write(wire.frame(Kind.DATA, 0, b"x" * 20))
            writer.close()

        async with await asyncio.start_unix_server(serve, tmp_path / "control"):
            async with control(tmp_path) as guest:
                with pytest.raises(SandboxDied):
                    await guest.ask(Op.STATS)

    run(work())
