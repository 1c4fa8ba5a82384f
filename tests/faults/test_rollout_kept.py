"""A process that keeps final states dies at each step: what the journal names is there, and nothing else is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import leaks
from tests.faults.rolling_keeper import ENOUGH, REWARDS

from worldfork.lineage import place as places
from worldfork.rollout.leftovers import sweep_ends
from worldfork.rollout.stored import StoredRun

pytestmark = [
    pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning"),
    pytest.mark.timeout(240),
]

ROOT = Path(__file__).resolve().parents[2]
STEPS = [
    ("publish:committed", 2, "best"), ("rollout:lasting", 4, "all"), ("rollout:written", 1, "best"),
    ("rollout:written", 3, "all"), ("rollout:let_go", 1, "best"), ("delete_snapshot:committed", 1, "best"),
    ("rollout:settle", 1, "all"), ("set_labels:committed", 1, "all"),
]  # fmt: skip
OTHER = {"best": "all", "all": "best"}


@pytest.fixture
def own_home(fresh_home: Path) -> Iterator[Path]:
    yield fresh_home
    places.close_places()


def roll(run: Path, keep: str, step: str = "", number: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.faults.rolling_keeper", str(run), keep, step, str(number)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))},
    )


def check(run: Path) -> set[int]:
    """Look whether the books of a run are right after a sweep; return the indices whose states are kept."""
    here = places.place()
    here.sweep()
    sweep_ends(here)
    there = {each.snapshot_id: str(each.label) for each in here.store.snapshots() if str(each.label).startswith("end ")}
    named = {each.final_snapshot_id: each for each in StoredRun(run).episodes if each.final_snapshot_id is not None}
    assert set(there) == set(named)
    assert all(there[key] == f"end of {each.sandbox_id}" for key, each in named.items())
    assert all(each.valid for each in named.values())
    return {each.index for each in named.values()}


@pytest.mark.parametrize(
    ("step", "number", "keep"),
    [*STEPS, *(pytest.param(*step, OTHER[keep], marks=pytest.mark.exhaustive) for *step, keep in STEPS)],
)
def test_killed_at_any_step_the_books_are_right(
    step: str, number: int, keep: str, own_home: Path, tmp_path: Path
) -> None:
    died = roll(tmp_path, keep, step, number)
    assert died.returncode == -9, died.stderr
    assert check(tmp_path) <= set(range(len(REWARDS)))
    again = roll(tmp_path, keep)
    assert again.returncode == 0, again.stderr
    # What an earlier call finished behind the cut stays as it is.
    assert check(tmp_path) - {ENOUGH} == ({3} if keep == "best" else set(range(ENOUGH)))
    places.close_places()
    assert leaks.wait_until_clean(leaks.look(own_home), own_home) == []
