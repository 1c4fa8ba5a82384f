"""What a set of passed tests is worth."""

from __future__ import annotations

from worldfork.core.errors import ConfigError, VerifierError
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.calibration import Calibration


def score_tests(task: Task, calibration: Calibration, passed: frozenset[str]) -> tuple[float, dict[str, float]]:
    """Return the reward of `task.score`, and both scores as parts.

    `fraction` is passed of expected. `fail_to_pass` is the fraction of the tests that the starting state fails, and 0
    as soon as one is lost that it passes; there is none where it fails no test. Where the task declares which tests
    must not be lost, only these are asked for: others may have been left out for being flaky.

    Args:
        task: whose tests.
        calibration: which of them are expected.
        passed: ids; those that are not expected count for nothing.
    """
    expected = frozenset(calibration.expected)
    passed &= expected
    parts = {"fraction": len(passed) / len(expected)}
    untouched = frozenset(calibration.untouched)
    broken = frozenset(task.fail_to_pass) & expected or expected - untouched
    if broken:
        kept = untouched & frozenset(task.pass_to_pass) if task.pass_to_pass else untouched
        parts["fail_to_pass"] = len(passed & broken) / len(broken) if kept <= passed else 0.0
    return parts.get(task.score, parts["fraction"]), parts


def check_teaches(task: Task, calibration: Calibration) -> Calibration:
    """Return the calibration of a task that is worth less than 1 as it is.

    Raises:
        VerifierError: whoever does nothing has solved it; `kind` is `calibration`.
    """
    if score_tests(task, calibration, frozenset(calibration.untouched))[0] < 1:
        return calibration
    raise VerifierError(
        f"{task.task_id} is worth 1 without any change",
        remedy="leave it out, or give it a test that fails before: `worldfork tasks check` finds such tasks",
        kind=FailureKind.CALIBRATION,
    )


def checked_weight(value: object, name: str) -> float:
    """Return the weight of one reward among others.

    Raises:
        ConfigError: it is no number above 0; `field` is `name`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(f"weight {value!r} is no number above 0", field=name)
    return float(value)
