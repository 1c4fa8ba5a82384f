"""A guest that sends its disk as slowly as it may: whoever waits for a checkpoint can stop waiting."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.sandbox.microvm import stand_ins
from tests.unit.sandbox.microvm.test_exporting import ROOT

from worldfork.core.settings import Settings
from worldfork.lineage.checkpoint import whole
from worldfork.lineage.live import Live
from worldfork.records.sandbox import Base, SandboxFacts
from worldfork.sandbox.connection import Connection
from worldfork.sandbox.microvm.driver import MicrovmDriver
from worldfork.sandbox.microvm.manifest import Running, write_running

pytestmark = pytest.mark.slow

DRIPS_S = 40.0


@contextlib.contextmanager
def dripping(run: Path) -> Iterator[threading.Event]:
    """A `control` behind which a guest sends a byte at a time; the event says that it has begun."""
    begun, over = threading.Event(), threading.Event()

    def serve() -> None:
        with listening.accept()[0] as sock, contextlib.suppress(OSError):
            sock.recv(1 << 16)
            sock.sendall(ROOT)
            begun.set()
            end_s = time.monotonic() + DRIPS_S
            while time.monotonic() < end_s and not over.wait(0.02):
                sock.sendall(b"\0")

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(run / "control"))
        listening.listen()
        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield begun
        finally:
            over.set()
            serving.join()


def test_a_checkpoint_of_a_guest_that_drips_ends_with_its_callers_patience(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_running(run, Running(1, 18, str(tmp_path), 1, "none", stand_ins.BUILD, ((), (), ())))
    driver = MicrovmDriver(Settings(home=tmp_path, allow_tcg=True), tmp_path / "images")
    facts = SandboxFacts(
        sandbox_id="sb-aaaaaaaaaaaaaaaa", name="dripping", run=str(run), form=driver.form, driver="microvm",
        base=Base("dir", "/srv/root"), snapshot_id=None, layers=(), cgroups=(),
    )  # fmt: skip
    place = SimpleNamespace(disk_on_host=lambda _: False, machines=lambda _: driver)
    live = cast(Live, SimpleNamespace(place=place, facts=facts))

    async def taking() -> Any:
        return await driver.copy_disk(facts, cast(Connection, None), tmp_path / "layer", idle=True), None

    async def scenario(begun: threading.Event) -> None:
        waiting = asyncio.ensure_future(whole(live, taking()))
        await asyncio.to_thread(begun.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with dripping(run) as begun:
        since_s = time.monotonic()
        asyncio.run(scenario(begun))
        assert time.monotonic() - since_s < DRIPS_S / 2
