"""What the conformance tests share: the drivers, what they can do here, and sandboxes that end with their test."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from worldfork import Sandbox
from worldfork.lineage.place import place
from worldfork.sandbox.driver import Capabilities

DRIVERS = ("namespace",)
"""Every driver passes every test of this directory, but for what its capabilities exclude."""
HERE = Path(__file__).resolve().parent
NO_CGROUPS = "ignore:no cgroup of this host:RuntimeWarning"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "behaviour(number, ...): the numbers of docs/behaviour.md that the test shows")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    for item in mine:
        # A host without cgroups is told so once per process; test_limits.py looks at the words.
        item.add_marker(pytest.mark.filterwarnings(NO_CGROUPS))
    for first in mine[:1]:
        first.add_marker(pytest.mark.timeout(240))  # the base is made once, by the first test


@pytest.fixture(scope="session", params=DRIVERS, autouse=True)
def driver(request: pytest.FixtureRequest) -> str:
    """The name of a driver."""
    return str(request.param)


@pytest.fixture(scope="session")
def capabilities(driver: str, home: Path) -> Capabilities:
    """What the driver can do on this host. Makes the base on the way, which takes seconds once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no cgroup of this host", RuntimeWarning)
        with Sandbox.create(driver=driver, network="none"):
            return place().driver.capabilities()


@pytest.fixture
def needs(capabilities: Capabilities) -> Callable[[str], None]:
    """Skip what the driver says that it cannot do: `needs("limits")`."""

    def check(name: str) -> None:
        if not getattr(capabilities, name):
            pytest.skip(f"a capability that this driver has not got here: {name}")

    return check


@dataclass
class Sandboxes:
    """Makes sandboxes, and ends them with the test."""

    driver: str
    made: list[Sandbox] = field(default_factory=list)

    def create(self, *positional: Any, **arguments: Any) -> Sandbox:
        """A sandbox of the driver in question, without network unless told otherwise."""
        arguments.setdefault("driver", self.driver)
        arguments.setdefault("network", "none")
        return self.keep(Sandbox.create(*positional, **arguments))

    def restore(self, snapshot: Any, **arguments: Any) -> Sandbox:
        """One sandbox from a snapshot."""
        return self.create(snapshot_id=snapshot.snapshot_id, **arguments)

    def fork(self, source: Any, n: int = 1, **options: Any) -> list[Sandbox]:
        """`n` sandboxes from a snapshot or a live sandbox."""
        children = source.fork(n, **options).unwrap()
        self.made += children
        return list(children)

    def keep(self, sandbox: Sandbox) -> Sandbox:
        """Have a sandbox ended with the others."""
        self.made.append(sandbox)
        return sandbox

    def end(self) -> None:
        """End them all, the newest first; every one, whatever the others do."""
        failures = []
        for sandbox in reversed(self.made):
            try:
                sandbox.terminate()
            except Exception as error:
                failures.append(error)
        if failures:
            raise ExceptionGroup("sandboxes that would not end", failures)


@pytest.fixture
def sandboxes(driver: str, capabilities: Capabilities) -> Iterator[Sandboxes]:
    """Makes sandboxes that end with the test."""
    made = Sandboxes(driver)
    yield made
    made.end()


@pytest.fixture
def box(sandboxes: Sandboxes) -> Sandbox:
    """A fresh sandbox."""
    return sandboxes.create()


Elsewhere = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def elsewhere(home: Path) -> Iterator[Elsewhere]:
    """Starts Python programs that use the same home as this process; what still runs ends with the test."""
    running: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-W", NO_CGROUPS, "-c", program, *arguments],
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str], timeout_s: float = 40) -> str:
    """Wait for a program that must succeed and return what it printed."""
    out, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, f"ended with {process.returncode}: {out}"
    return out
