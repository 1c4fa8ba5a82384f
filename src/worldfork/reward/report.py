"""Reading what the reporter wrote: lines from a process that also ran code which nobody trusts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_TEST_ID_CHARACTERS = 4096
"""A longer id is not one of a test."""

MAX_LINES = 250_000
"""More lines say nothing: whoever writes them may want to keep their reader busy."""

_MAX_LINE_BYTES = 64 << 10


@dataclass(frozen=True)
class TestRecord:
    """How one test ended."""

    __test__ = False  # pytest would collect a class of this name

    outcome: str
    """`passed`, `failed` or `skipped`."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    waited_s: float = 0.0
    """Seconds in which the test was ready to run and had no CPU."""
    limit_s: float = 0.0
    """Wall seconds that it may take, where there is a limit."""


@dataclass(frozen=True)
class Report:
    """What the reporter said, as far as it came."""

    ready: bool = False
    """The reporter had started before any code under test was loaded."""
    finished: bool = False
    """pytest came to its end."""
    collected: int | None = None
    tests: Mapping[str, TestRecord] = field(default_factory=dict)

    @property
    def passed(self) -> frozenset[str]:
        """The ids of the tests that passed."""
        return frozenset(name for name, test in self.tests.items() if test.outcome == "passed")


def read_report(output: bytes) -> Report:
    """Read the reporter's lines. Never raises: a line that is none of its own is left out.

    An id that is reported more than once has passed only if it passed each time. A last line without its end
    is left out, and so are all behind the first `MAX_LINES`.
    """
    ready = finished = False
    collected: int | None = None
    tests: dict[str, TestRecord] = {}
    for line in output.split(b"\n", MAX_LINES)[:-1]:
        facts = _facts(line)
        if "id" in facts:
            _add_test(tests, facts)
        elif "collected" in facts and isinstance(facts["collected"], int):
            collected = facts["collected"]
        elif "finished" in facts:
            finished = True
        elif "ready" in facts:
            ready = True
    return Report(ready, finished, collected, tests)


def _facts(line: bytes) -> dict[str, object]:
    if len(line) > _MAX_LINE_BYTES:
        return {}
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _add_test(tests: dict[str, TestRecord], facts: dict[str, object]) -> None:
    name, outcome = facts["id"], facts.get("outcome")
    if not isinstance(name, str) or len(name) > MAX_TEST_ID_CHARACTERS:
        return
    if outcome not in ("passed", "failed", "skipped"):
        return
    earlier = tests.get(name)
    if earlier is not None and earlier.outcome != "passed":
        return
    seconds = [_seconds(facts.get(key)) for key in ("wall_s", "cpu_s", "waited_s", "limit_s")]
    tests[name] = TestRecord(str(outcome), *seconds)


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    try:
        number = float(value)
    except OverflowError:
        return 0.0
    return number if math.isfinite(number) and number >= 0 else 0.0
