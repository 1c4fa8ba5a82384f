"""What the tests of faults share: a small root to start sandboxes on in no time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import actors
from tests.roots import make_small_root


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base with a shell and a few programs, as `create(base=...)` takes it."""
    return f"dir:{make_small_root(tmp_path_factory.mktemp('root') / 'small')}"


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory that nobody has to wait for: for tests that tell by themselves what a disk would keep."""
    with tempfile.TemporaryDirectory(prefix="wf-store-", dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def no_actor_is_left() -> Iterator[None]:
    """End the processes of a test that failed while they stood at a step."""
    yield
    actors.end_all()
