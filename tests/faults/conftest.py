"""What the tests of faults share: a small root to start sandboxes on in no time."""

from __future__ import annotations

import pytest
from tests.roots import make_small_root


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base with a shell and a few programs, as `create(base=...)` takes it."""
    return f"dir:{make_small_root(tmp_path_factory.mktemp('root') / 'small')}"
