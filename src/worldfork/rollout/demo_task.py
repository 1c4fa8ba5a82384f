"""The article's harness in small: one buggy module, three hidden tests, eight scripted candidates.

It needs no model and no key, and every reward is known beforehand.
"""

from __future__ import annotations

from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits

_PROMPT = """\
`median` in buggy.py should return the middle value of its argument in order of size; for an even count the mean
of the two middle ones. It must raise ValueError if there is nothing to take the median of. Repair it.
"""

_BUGGY = '''\
def median(values):
    """Return the middle value; for an even count, the mean of the two middle ones."""
    middle = len(values) // 2
    return values[middle]
'''

_TESTS = """\
import pytest

from buggy import median


def test_order_does_not_matter():
    assert median([9, 1, 5]) == 5


def test_even_count():
    assert median([4, 1, 3, 2]) == 2.5


def test_nothing():
    with pytest.raises(ValueError):
        median([])
"""

_RIGHT = """\
def median(values):
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no median of nothing")
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
"""

_CANDIDATES = {
    "unchanged": _BUGGY,
    "sorts": """\
def median(values):
    return sorted(values)[len(values) // 2]
""",
    "right": _RIGHT,
    "does-not-compile": """\
def median(values)
    return sorted(values)[len(values) // 2]
""",
    "minds-nothing-only": """\
def median(values):
    if not values:
        raise ValueError("no median of nothing")
    return values[len(values) // 2]
""",
    "forgets-even-counts": """\
def median(values):
    if not values:
        raise ValueError("no median of nothing")
    return sorted(values)[len(values) // 2]
""",
    "forgets-nothing": """\
def median(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
""",
    "uses-the-library": """\
import statistics


def median(values):
    return statistics.median(values)
""",
}

DEMO_REWARDS = (0.0, 1 / 3, 1.0, 0.0, 1 / 3, 2 / 3, 2 / 3, 1.0)
"""What each candidate is worth, in the order of `demo_candidates`."""


def demo_task() -> Task:
    """Return the task: repair `buggy.py`."""
    return Task(
        task_id="demo/median",
        prompt=_PROMPT,
        files={"buggy.py": _BUGGY},
        editable=("buggy.py",),
        hidden_tests={"test_buggy.py": _TESTS},
        test_args=("test_buggy.py",),
        solution={"buggy.py": _RIGHT},
        limits=TaskLimits(policy_wall_s=60, grade_cpu_s=20, grade_wall_s=60),
    )


def demo_candidates() -> dict[str, dict[str, str]]:
    """Return the eight candidates: name -> path -> text, from bad to good in no order."""
    return {name: {"buggy.py": text} for name, text in _CANDIDATES.items()}
