"""Orders to QEMU: whatever answers at the socket, the caller gets a result or a typed error in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import SandboxDied, SandboxError
from worldfork.sandbox.microvm import qmp

GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 22}}, "capabilities": []}}
Answer = Callable[[dict[str, Any]], list[Any]]


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def qemu(path: Path, answer: Answer, greeting: object = GREETING) -> AsyncIterator[list[dict[str, Any]]]:
    """Serve one connection as QEMU does; each order is answered with lines of `answer`; None closes."""
    seen: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(greeting if isinstance(greeting, bytes) else json.dumps(greeting).encode() + b"\r\n")
            while line := await reader.readline():
                order = json.loads(line)
                seen.append(order)
                if order["execute"] == "qmp_capabilities":
                    writer.write(json.dumps({"return": {}, "id": order["id"]}).encode() + b"\r\n")
                    continue
                for part in answer(order):
                    if part is None:
                        return
                    writer.write(part if isinstance(part, bytes) else json.dumps(part).encode() + b"\r\n")
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, path)
    try:
        yield seen
    finally:
        server.close()


def returned(order: dict[str, Any]) -> list[Any]:
    return [{"event": "STOP", "data": {}}, {"return": {"status": "paused", "error": 1}, "id": order["id"]}]


def test_an_order_gives_its_result_and_events_are_dropped(tmp_path: Path) -> None:
    async def work() -> None:
        async with qemu(tmp_path / "s", returned) as seen, qmp.connect(tmp_path / "s") as monitor:
            assert monitor.version == "7.2.22"
            assert await monitor.execute("query-status", {"a": 1}) == {"status": "paused", "error": 1}
            assert await monitor.execute("query-status") == {"status": "paused", "error": 1}
            assert [order["execute"] for order in seen] == ["qmp_capabilities", "query-status", "query-status"]
            assert seen[1]["arguments"] == {"a": 1}

    run(work())


def test_a_long_path_is_reached(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()

    async def work() -> None:
        here = os.open(deep, os.O_RDONLY)
        try:
            async with qemu(Path(f"/proc/self/fd/{here}/s"), returned), qmp.connect(deep / "s") as monitor:
                assert await monitor.execute("stop")
        finally:
            os.close(here)

    run(work())


def test_a_refusal_has_its_class_and_the_connection_goes_on(tmp_path: Path) -> None:
    def refuse(order: dict[str, Any]) -> list[Any]:
        if order["execute"] == "bad":
            return [{"error": {"class": "CommandNotFound", "desc": "no bad"}, "id": order["id"]}]
        return returned(order)

    async def work() -> None:
        async with qemu(tmp_path / "s", refuse), qmp.connect(tmp_path / "s") as monitor:
            with pytest.raises(SandboxError, match="no bad") as caught:
                await monitor.execute("bad")
            assert caught.value.fields["qmp_class"] == "CommandNotFound"
            assert await monitor.execute("good")

    run(work())


def test_silence_ends_at_the_time_limit_and_spoils_the_connection(tmp_path: Path) -> None:
    async def work() -> None:
        async with qemu(tmp_path / "s", lambda _: []), qmp.connect(tmp_path / "s") as monitor:
            with pytest.raises(SandboxError, match="no answer to stop"):
                await monitor.execute("stop", timeout_s=0.05)
            with pytest.raises(SandboxError, match="cannot carry out cont"):
                await monitor.execute("cont")

    run(work())


def test_a_silent_greeting_ends_at_the_time_limit(tmp_path: Path) -> None:
    async def work() -> None:
        async with qemu(tmp_path / "s", returned, b""):
            with pytest.raises(SandboxError, match="greeting"):
                async with qmp.connect(tmp_path / "s", timeout_s=0.05):
                    pass

    run(work())


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([None], SandboxDied),
        ([b"no json\n"], SandboxError),
        ([b"[1]\n"], SandboxError),
        ([{"return": {}, "id": 99}], SandboxError),
        ([{"id": 2}], SandboxError),
        ([b"x" * (qmp.LINE_LIMIT_BYTES + (1 << 20))], SandboxError),
    ],
)
def test_nonsense_is_a_typed_error(tmp_path: Path, lines: list[Any], error: type[SandboxError]) -> None:
    async def work() -> None:
        async with qemu(tmp_path / "s", lambda _: lines), qmp.connect(tmp_path / "s") as monitor:
            with pytest.raises(error):
                await monitor.execute("stop")

    run(work())


@pytest.mark.parametrize("greeting", [{"QMP": {}}, {"hello": 1}, {"QMP": {"version": {"qemu": 7}}}])
def test_what_is_no_qemu_is_told(tmp_path: Path, greeting: object) -> None:
    async def work() -> None:
        async with qemu(tmp_path / "s", returned, greeting):
            with pytest.raises(SandboxError, match="not QEMU"):
                async with qmp.connect(tmp_path / "s"):
                    pass

    run(work())


def test_nobody_there_is_a_dead_sandbox(tmp_path: Path) -> None:
    async def work() -> None:
        with pytest.raises(SandboxDied):
            async with qmp.connect(tmp_path / "none"):
                pass

    run(work())


def test_descriptors_go_along(tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen(1)

    def serve() -> int:
        with listening, listening.accept()[0] as peer:
            peer.sendall(json.dumps(GREETING).encode() + b"\n")
            peer.recv(4096)
            peer.sendall(b'{"return": {}, "id": 1}\n')
            _, fds, _, _ = socket.recv_fds(peer, 4096, 4)
            peer.sendall(b'{"return": {}, "id": 2}\n')
            return fds[0]

    async def work() -> None:
        serving = asyncio.create_task(asyncio.to_thread(serve))
        with (tmp_path / "file").open("w") as file:
            async with qmp.connect(tmp_path / "s") as monitor:
                await monitor.execute("add-fd", {"fdset-id": 1}, fds=[file.fileno()])
        got = await serving
        assert os.fstat(got).st_ino == (tmp_path / "file").stat().st_ino
        os.close(got)

    run(work())
