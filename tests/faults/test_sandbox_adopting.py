"""Who moves a sandbox onto another state is killed in the middle: it is in the one or the other, and goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.victims import Tell, deaths, start_afresh, wait_clean

from worldfork import Sandbox
from worldfork.lineage import place as places


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    places.close_places()


def test_a_killed_client_of_an_adoption(own_home: Path, base: str) -> None:
    seen: set[bytes] = set()
    steps: set[str] = set()
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/f", b"one")
        sandbox.write_file("/only-one", b"1")
        one = sandbox.checkpoint()
        with Sandbox.create(snapshot_id=one.snapshot_id) as other:
            other.write_file("/f", b"two")
            other.delete_file("/only-one")
            two = other.checkpoint()

        def work(tell: Tell) -> None:
            client = Sandbox.connect(sandbox.sandbox_id)
            client.write_file("/mine", b"kept")
            tell(client.adopt(two.snapshot_id).snapshot_id)

        for death in deaths(lambda: places.place(), work):
            assert death.code in (0, -signal.SIGKILL), death
            steps.add(death.step)
            start_afresh()
            content = sandbox.read_file("/f")
            seen.add(content)
            there = {entry.name for entry in sandbox.list_directory("/").entries} & {"only-one", "mine"}
            assert (content, there) in ((b"one", {"only-one", "mine"}), (b"one", {"only-one"}), (b"two", set())), death
            snapshot = sandbox.checkpoint()
            with Sandbox.create(snapshot_id=snapshot.snapshot_id) as restored:
                assert restored.read_file("/f") == content, death
            for snapshot_id in death.told:
                with Sandbox.create(snapshot_id=snapshot_id) as before:
                    assert before.read_file("/mine") == b"kept"
            sandbox.adopt(one.snapshot_id)
            assert sandbox.read_file("/f") == b"one"
        assert {"checkpoint:renamed", "checkpoint:made", "checkpoint:rerooted"} <= steps
        assert seen == {b"one", b"two"}
        assert wait_clean(own_home, living=[sandbox.sandbox_id]) == []
