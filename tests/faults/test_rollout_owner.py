"""The owner of 64 live rollouts is killed in the middle, and the run gone on with."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import leaks
from tests.faults.rolling_owner import N

from worldfork import AsyncSandbox
from worldfork.lineage import place as places
from worldfork.rollout.journal import Journal
from worldfork.rollout.stored import StoredRun

pytestmark = pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning")

ROOT = Path(__file__).resolve().parents[2]
LIVE_S = 60.0


_started: list[subprocess.Popen[str]] = []


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    while _started:
        # Those of a test that failed; the others have ended.
        with _started.pop() as owner:
            owner.kill()
    places.close_places()


def start(run: Path, turn_s: float) -> subprocess.Popen[str]:
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.rolling_owner", str(run), str(turn_s)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))},
    )
    _started.append(owner)
    return owner


def living() -> int:
    async def count() -> int:
        return len(await AsyncSandbox.list())

    return asyncio.run(count())


def labels() -> list[str]:
    async def found() -> list[str]:
        return [str(each.label) for each in await AsyncSandbox.list_all_snapshots()]

    return asyncio.run(found())


def test_finished_work_is_kept_nothing_runs_twice_nothing_is_left(own_home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    owner = start(run, 600.0)
    assert owner.stdout is not None
    finished = {int(owner.stdout.readline().split()[0]) for _ in range(8)}
    assert finished == set(range(8))
    end_s = time.monotonic() + LIVE_S
    while living() < N - 8 and time.monotonic() < end_s:
        time.sleep(0.1)
    assert living() == N - 8
    before = StoredRun(run).episodes
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()

    again = start(run, 0.0)
    told, _ = again.communicate(timeout=300)
    lines = told.splitlines()
    assert lines[-1] == f"whole {N}"
    assert {int(line.split()[0]) for line in lines[:-1]} == set(range(8, N))
    assert again.returncode == 0

    after = StoredRun(run).episodes
    assert [each for each in after if each.index < 8] == sorted(before, key=lambda each: before.index(each))
    assert sorted(each.index for each in after) == list(range(N))
    with (run / "episodes.jsonl").open() as file:
        assert len(file.readlines()) == N + 1, "each episode is written once"
    with Journal.open(run / "episodes.jsonl") as journal:
        assert all(journal.is_finished(each.key) for each in after)
    assert living() == 0
    places.place().sweep()
    assert [label for label in labels() if not label.startswith(("base ", "world "))] == []
    assert leaks.wait_until_clean(leaks.look(own_home), own_home) == []
