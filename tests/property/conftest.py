"""What the property tests share. WORLDFORK_PROPERTY_FACTOR=20 searches twenty times as long, elsewhere each time."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tests.trees import Program, operations, program

from worldfork.core.remove import remove_tree

_FACTOR = int(os.environ.get("WORLDFORK_PROPERTY_FACTOR", "1"))
FORMS = ("trusted", "user") if os.geteuid() == 0 else ("user",)
"""As root both; an ordinary user has one."""


def examples(count: int) -> settings:
    """How many examples a test tries: the same ones each time, unless it shall search longer."""
    return settings(
        max_examples=count * _FACTOR,
        derandomize=_FACTOR == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(240 * _FACTOR))
            item.add_marker(pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning"))


def operations_for(form: str) -> st.SearchStrategy[Any]:
    """Operations that a sandbox of this form can do."""
    owners = [(0, 0), (1234, 5678), (0, 7)] if form == "trusted" else [(0, 0)]
    return operations(owners, overlay_xattrs=_escapes_marks(), capabilities=os.geteuid() == 0)


def _escapes_marks() -> bool:
    """Whether the kernel lets a file in an overlay have an attribute with the name of one of the overlay's marks."""
    return tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2]) >= (6, 7)


@pytest.fixture(scope="module")
def plain() -> Iterator[Program]:
    """Works on plain directories."""
    with program() as running:
        yield running


@pytest.fixture(scope="module")
def ground(home: Path) -> Iterator[Path]:
    """A directory on the disk that carries homes, for not every file system carries what a tree may hold."""
    made = Path(tempfile.mkdtemp(prefix="ground-", dir=home))
    yield made
    remove_tree(made)
