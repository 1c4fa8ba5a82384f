from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
from tests.unit.cli import played
from typer.testing import CliRunner, Result

from worldfork.cli import execute, main, sandboxes, snapshots, suspending

Invoke = Callable[..., Result]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> type[played.PlayedSandbox]:
    """Put the played library where the verbs look for the real one."""

    class Fresh(played.PlayedSandbox):
        calls: ClassVar = []
        live: ClassVar = []
        stored: ClassVar = []
        failing_forks: ClassVar[set[int]] = set()

    for module in (sandboxes, snapshots, execute, suspending):
        monkeypatch.setattr(module, "Sandbox", Fresh)
    return Fresh


@pytest.fixture
def invoke() -> Invoke:
    """Run the program as a shell would."""

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main.app, list(arguments))

    return run
