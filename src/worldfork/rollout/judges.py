"""Which verifier grades which task of this home."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from worldfork.core.errors import ConfigError
from worldfork.core.recent import Recent
from worldfork.lineage.place import place
from worldfork.records.task import Task
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.choosing import verifier_for
from worldfork.reward.score_verifier import ScoreFunction
from worldfork.reward.verifier import Verifier

KEPT_BYTES = 4 << 20
"""Of what tasks say of their verifiers; where each says something else, those used last are kept."""


def home_calibrations() -> CalibrationStore:
    """Return where this home keeps what was found out about its tasks' tests."""
    return CalibrationStore(place().home.scratch / "tasks")


def judges(
    calibrations: CalibrationStore | None = None,
    *,
    verifier: Verifier | None = None,
    score: ScoreFunction | None = None,
) -> Callable[[Task], Verifier]:
    """Return what gives each task the verifier that it names; tasks that name the same one share it.

    Args:
        calibrations: where expected ids are kept; by default this home's.
        verifier: grades all tasks, in the place of whatever they name.
        score: a function that does so.

    Raises:
        ConfigError: both are named.
    """
    if verifier is not None:
        if score is not None:
            raise ConfigError("a verifier and a score function cannot both grade", remedy="name one", field="score")
        return lambda _: verifier
    made: Recent[Verifier] = Recent(KEPT_BYTES)

    def judge(task: Task) -> Verifier:
        key = json.dumps(dict(task.verifier), sort_keys=True)
        found = made.get(key)
        if found is None:
            found = verifier_for(task, calibrations or home_calibrations(), score=score)
            made.put(key, found, len(key))
        return found

    return judge


def cpus() -> int:
    """Return how many processors this process may use: so many gradings go on at a time."""
    return max(1, len(os.sched_getaffinity(0)))
