"""Chains of every depth at which a mount has failed somewhere, in a home whose path is long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.victims import deepen

from worldfork import Sandbox
from worldfork.lineage import place as places


@pytest.fixture
def long_home(fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # 500 paths of layers are 150 KB then; the options of mount(2) end at one page.
    home = fresh_home / ("d" * 60) / ("e" * 60)
    monkeypatch.setenv("WORLDFORK_HOME", str(home))
    yield home
    places.close_places()


@pytest.mark.filterwarnings("ignore:no cgroup of this host")
def test_chains_of_every_depth_can_be_gone_on_with(long_home: Path, base: str) -> None:
    """moby#26380, buildkit#4810, podman#13432: mounts failed where their options filled a page, or at 128 layers."""
    with Sandbox.create(base=base, network="none") as sandbox:
        sandbox.write_file("/lowest", b"lowest")
        taken = sandbox.checkpoint()
    for depth in (1, 127, 128, 180, 499, 500, 501, 700):
        chain = deepen(taken, depth)
        with Sandbox.create(snapshot_id=chain) as sandbox:
            assert sandbox.read_file("/lowest") == b"lowest"
            sandbox.write_file("/depth", str(depth).encode())
            deeper = sandbox.checkpoint()
        with Sandbox.create(snapshot_id=deeper.snapshot_id) as sandbox:
            assert sandbox.read_file("/lowest") == b"lowest"
            assert sandbox.read_file("/depth") == str(depth).encode()
