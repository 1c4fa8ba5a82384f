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
from tests import machines
from tests.conformance.differences import lacks
from tests.conformance.selecting import choose
from tests.conformance.world import make_world

from worldfork import Sandbox
from worldfork.lineage.place import place
from worldfork.sandbox.driver import Capabilities

DRIVERS = ("namespace", "microvm")
"""Every driver passes every test of this directory, but for what its capabilities exclude: see `differences`."""
HERE = Path(__file__).resolve().parent
NO_CGROUPS = "ignore:no cgroup of this host:RuntimeWarning"


@dataclass(frozen=True)
class Pace:
    """How fast sandboxes are beside processes of this host: a guest may be interpreted."""

    patience: float
    """Multiplies the time limits of tests, and those in tests that something must come in before."""
    share: float
    """Of how often a test does again what one time shows too."""

    def seconds(self, usual_s: float) -> float:
        """Return a time limit."""
        return usual_s * self.patience

    def times(self, usual: int) -> int:
        """Return how often."""
        return max(1, int(usual * self.share))


PACES = {"namespace": Pace(1, 1), "microvm": Pace(4, 0.1)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--driver", choices=DRIVERS, default=DRIVERS[0], help="what tests/conformance tests")
    parser.addoption("--each-once", action="store_true", help="of tests/conformance: enough to show each behaviour")


def _driver(config: pytest.Config) -> str:
    # Where this directory is not named on the command line its options are not known.
    return str(config.getoption("--driver", default=DRIVERS[0]))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "behaviour(number, ...): the numbers of docs/behaviour.md that the test shows")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("driver", [_driver(metafunc.config)], scope="session", indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    driver = _driver(config)
    mine = [item for item in items if item.path.is_relative_to(HERE)]
    chosen = set(choose(mine, driver, each_once=bool(config.getoption("--each-once", default=False))))
    config.hook.pytest_deselected(items=[item for item in mine if item not in chosen])
    items[:] = [item for item in items if item in chosen or item not in mine]
    for at, item in enumerate(each for each in items if each in chosen):
        # A host without cgroups is told so once per process; test_limits.py looks at the words.
        item.add_marker(pytest.mark.filterwarnings(NO_CGROUPS))
        mark = item.get_closest_marker("timeout")
        limit_s = mark.args[0] if mark else 60
        if at == 0:
            limit_s = max(limit_s, 240)  # the base is made once, by the first test
        item.add_marker(pytest.mark.timeout(PACES[driver].seconds(limit_s)), append=False)


@pytest.fixture(scope="session", autouse=True)
def driver(request: pytest.FixtureRequest, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the driver, which is that of a sandbox whose test names none."""
    name = str(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLDFORK_DRIVER", name)
        if name == "microvm":
            _give_images(home)
            patch.setenv("WORLDFORK_ALLOW_TCG", "1")
            if "WORLDFORK_BASE" not in os.environ:
                patch.setenv("WORLDFORK_BASE", f"dir:{make_world(tmp_path_factory.mktemp('world') / 'root')}")
        yield name


def _give_images(home: Path) -> None:
    """Lay a kernel for guests into a home, or skip where none can run; under CI that fails."""
    lacking = machines.missing()
    if lacking:
        pytest.skip(lacking)
    images = machines.prepare_images(home / "images")
    if images != home / "images":
        (home / "images").symlink_to(images)


def share_images(home: Path, other: Path) -> None:
    """Give another home the guest images of this run, if it has any: they take long to make."""
    if os.environ["WORLDFORK_DRIVER"] == "microvm":
        other.mkdir(exist_ok=True)
        (other / "images").symlink_to((home / "images").resolve())


@pytest.fixture
def fresh_home(fresh_home: Path, home: Path) -> Path:
    """An empty home, for this test alone."""
    share_images(home, fresh_home)
    return fresh_home


@pytest.fixture(scope="session")
def pace(driver: str) -> Pace:
    """How fast this driver's sandboxes are."""
    return PACES[driver]


@pytest.fixture(scope="session")
def base(driver: str) -> str:
    """What a fresh sandbox starts from whose test names nothing."""
    return os.environ.get("WORLDFORK_BASE") or "host"


@pytest.fixture(scope="session")
def of_the_host(base: str) -> tuple[str, ...]:
    """The directories of this host that such a sandbox shows."""
    return ("/usr",) if base == "host" else ()


@pytest.fixture(scope="session")
def capabilities(driver: str, home: Path) -> Capabilities:
    """What the driver can do on this host. Makes the base on the way, which takes seconds once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no cgroup of this host", RuntimeWarning)
        with Sandbox.create(driver=driver, network="none"):
            return place().driver_of(driver).capabilities()


@pytest.fixture(autouse=True)
def able(request: pytest.FixtureRequest, capabilities: Capabilities) -> None:
    """Skip a test of what the driver cannot do, as `differences` says."""
    lacking = lacks(request.node.originalname, capabilities)
    if lacking:
        pytest.skip(f"a capability that this driver has not got here: {lacking}")


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
    out, _ = process.communicate(timeout=PACES[os.environ["WORLDFORK_DRIVER"]].seconds(timeout_s))
    assert process.returncode == 0, f"ended with {process.returncode}: {out}"
    return out
