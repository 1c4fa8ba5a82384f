"""PID 1 by itself, without a sandbox round it, and `keep` with a stand-in for its machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.native.keeping import Keep, Start
from tests.unit.native.raw_client import Init, RawClient

NATIVE = Path(__file__).resolve().parents[3] / "native"


@pytest.fixture(scope="session")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """native/tests/harness, compiled."""
    out = tmp_path_factory.mktemp("native") / "harness"
    line = [sys.executable, str(NATIVE / "build.py"), "--harness", "--out", str(out)]
    built = subprocess.run(line, capture_output=True, text=True, check=False)
    if built.returncode and not any(shutil.which(cc) for cc in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler")
    assert built.returncode == 0, built.stderr
    return out


@pytest.fixture
def start(harness: Path, tmp_path: Path) -> Iterator[Callable[..., Init]]:
    """Starts a PID 1 with options of the harness."""
    started: list[Init] = []

    def go(*options: str | Path, keep: tuple[int, ...] = ()) -> Init:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        init = Init(harness, directory, *options, keep=keep)
        started.append(init)
        if not init.runs:
            pytest.skip("no pid namespace here: it takes root, or unprivileged user namespaces")
        return init

    yield go
    for init in started:
        init.stop()


@pytest.fixture
def init(start: Callable[..., Init]) -> Init:
    """PID 1; in a user namespace where the tests do not run as root."""
    return start() if os.geteuid() == 0 else start("--user")


@pytest.fixture
def client(init: Init) -> RawClient:
    """A first connection to it."""
    return init.client()


@pytest.fixture
def start_keep(tmp_path: Path) -> Iterator[Start]:
    """Starts a `keep` with items of its plan."""
    started: list[Keep] = []

    def go(*items: tuple[str, str], owner: int | None = None, program: str = sys.executable) -> Keep:
        run = tmp_path / f"r{len(started)}"
        run.mkdir(mode=0o700)
        own = os.pidfd_open(os.getpid()) if owner is None else owner
        try:
            keep = Keep(run, own, program, *items)
        finally:
            if owner is None:
                os.close(own)
        started.append(keep)
        return keep

    yield go
    for keep in started:
        for sock in (keep.start, *keep.socks):
            sock.close()
        with contextlib.suppress(ProcessLookupError):
            if keep.reaped is None:
                os.kill(keep.pid, signal.SIGKILL)
        keep.code()


@pytest.fixture
def keep(start_keep: Start) -> Keep:
    """One whose machine has answered."""
    keep = start_keep()
    keep.ready()
    return keep
