"""Turns: one checkpoint of a sandbox at a time, and nobody who waits for ever or keeps others waiting."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.actors import Actor
from tests.victims import start_afresh, wait_clean

from worldfork import Sandbox
from worldfork.core.errors import Locked
from worldfork.lineage import place as places


@pytest.fixture
def own_home(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WORLDFORK_LEASE_TTL_S", "1")
    yield fresh_home
    places.close_places()


def test_one_that_stands_still_is_named(own_home: Path, base: str) -> None:
    """A process that was stopped in a checkpoint blocks the others for the time of a lease, and they say who it is."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"first")
        sandbox_id = sandbox.sandbox_id
        actor = Actor(lambda: Sandbox.connect(sandbox_id).checkpoint().snapshot_id, "checkpoint:held")
        actor.meet("checkpoint:held")
        actor.stand_still()
        for stop in (False, True):
            with pytest.raises(Locked, match=f"process {actor.pid} .*{sandbox_id}") as caught:
                sandbox.checkpoint(stop=stop)
            (owner_id,) = caught.value.holders
            assert places.place().store.is_alive(owner_id)
        actor.wake()
        actor.end()
        assert actor.error == ""
        with Sandbox.create(snapshot_id=sandbox.checkpoint().snapshot_id) as restored:
            assert restored.read_file("/f") == b"first"
        start_afresh()
        assert wait_clean(own_home, living=[sandbox_id]) == []


def test_commands_run_while_a_checkpoint_waits_for_its_turn(own_home: Path, base: str) -> None:
    with Sandbox.create(base=base, network="none") as sandbox, ThreadPoolExecutor(1) as pool:
        fd = os.open(own_home / "run" / sandbox.sandbox_id / "turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        waiting = pool.submit(sandbox.checkpoint)
        while not waiting.done():
            assert sandbox.run("true").ok
        with pytest.raises(Locked, match="unknown") as caught:
            waiting.result()
        assert caught.value.holders == []
        os.close(fd)
        assert sandbox.checkpoint().snapshot_id
