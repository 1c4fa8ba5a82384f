"""Which verifier grades which task of this home."""

from __future__ import annotations

import os
from collections.abc import Callable

from worldfork.lineage.place import place
from worldfork.records.task import Task
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.reward.verifier import Verifier


def home_calibrations() -> CalibrationStore:
    """Return where this home keeps what was found out about its tasks' tests."""
    return CalibrationStore(place().home.scratch / "tasks")


def judges(calibrations: CalibrationStore | None = None) -> Callable[[Task], Verifier]:
    """Return what gives each task the verifier that it names."""
    verifier = PytestVerifier(calibrations or home_calibrations())
    return lambda _: verifier


def cpus() -> int:
    """Return how many processors this process may use: so many gradings go on at a time."""
    return max(1, len(os.sched_getaffinity(0)))
