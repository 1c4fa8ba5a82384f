"""What a set of passed tests is worth."""

from __future__ import annotations

from worldfork.core.errors import ConfigError, VerifierError
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.reward.calibration import Calibration


def score_tests(task: Task, calibration: Calibration, passed: frozenset[str]) -> tuple[float, dict[str, float]]:
    """Return the reward of `task.score`, and the scores of all kinds as parts.

    `fraction` is passed of expected. `fail_to_pass` is the fraction of the tests that the starting state fails, and 0
    as soon as one is lost that it passes; there is none where it fails no test. Tests of a file that could not even be
    loaded count once all of them pass: most of such a file may be about what worked before, so that whoever only made
    it load would have nearly all. `resolved` is 1 where `fail_to_pass` is, else 0; a part only where it is asked for.

    Which tests must not be lost is what the task declares and the reference passes, whatever the starting state did in
    this world; where it declares none, all that the starting state passes.

    Args:
        task: whose tests.
        calibration: which of them are expected.
        passed: ids; those that are not expected count for nothing.
    """
    expected = frozenset(calibration.expected)
    passed &= expected
    parts = {"fraction": len(passed) / len(expected)}
    untouched = frozenset(calibration.untouched)
    declared = frozenset(task.fail_to_pass) & expected
    broken = declared - untouched or expected - untouched
    if broken:
        kept = expected & frozenset(task.pass_to_pass) | declared & untouched if task.pass_to_pass else untouched
        repaired = _repaired(passed & broken, broken & frozenset(calibration.unloaded)) if kept <= passed else 0
        parts["fail_to_pass"] = repaired / len(broken)
        if task.score == "resolved":
            parts["resolved"] = float(repaired == len(broken))
    return parts.get(task.score, parts["fraction"]), parts


def _repaired(passed: frozenset[str], unloaded: frozenset[str]) -> int:
    """Count what passes, of tests that could not be loaded those whose whole file does."""
    lost = {file_of(name) for name in unloaded - passed}
    return sum(name not in unloaded or file_of(name) not in lost for name in passed)


def file_of(name: str) -> str:
    """Return what of an id tells where a test lies."""
    return name.partition("::")[0]


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
