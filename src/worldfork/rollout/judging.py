"""Which verifier grades which task of this home."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from worldfork.lineage.place import place
from worldfork.records.task import Task
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.choosing import verifier_for
from worldfork.reward.score_verifier import ScoreFunction
from worldfork.reward.verifier import Verifier


def home_calibrations() -> CalibrationStore:
    """Return where this home keeps what was found out about its tasks' tests."""
    return CalibrationStore(place().home.scratch / "tasks")


def judges(
    calibrations: CalibrationStore | None = None, *, score: ScoreFunction | None = None
) -> Callable[[Task], Verifier]:
    """Return what gives each task the verifier that it names; tasks that name the same one share it.

    Args:
        calibrations: where expected ids are kept; by default this home's.
        score: grades all tasks, in the place of whatever they name.
    """
    made: dict[str, Verifier] = {}

    def judge(task: Task) -> Verifier:
        key = json.dumps(dict(task.verifier), sort_keys=True)
        if key not in made:
            made[key] = verifier_for(task, calibrations or home_calibrations(), score=score)
        return made[key]

    return judge


def cpus() -> int:
    """Return how many processors this process may use: so many gradings go on at a time."""
    return max(1, len(os.sched_getaffinity(0)))
