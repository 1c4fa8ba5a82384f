"""A store for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.stores import home_at

from worldfork.core.clock import ManualClock
from worldfork.store.store import Store


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    opened = Store.open(home_at(tmp_path / "home"), clock=clock)
    yield opened
    opened.close()
