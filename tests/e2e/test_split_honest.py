"""Honest solutions under split that are written otherwise than the reference, and dishonest ones beside them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from worldfork.records.edits import EditedFile, Edits
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.calibration import Calibration
from worldfork.reward.split.proof import ProofStore
from worldfork.reward.split.verifier import SplitVerifier
from worldfork.reward.verifier import Case, Grade, Start
from worldfork.rollout.starts import StartingStates

pytestmark = pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning")


class Expects:
    """Stands in for the pytest verifier's calibration: all these tests."""

    def __init__(self, ids: set[str]) -> None:
        self.ids = ids

    async def calibrate(self, task: Task, start: Start) -> Calibration:
        ids = tuple(sorted(f"{next(iter(task.hidden_tests))}::test_{each}" for each in self.ids))
        return Calibration(task.task_hash, start.snapshot_id, ids, (), (), 1.0)


def graded(directory: Path, module: str, tests: str, ids: set[str], *texts: str, **changes: Any) -> list[Grade]:
    """Grade texts of a module, the first of which is the reference."""
    values: dict[str, Any] = {
        "task_id": f"e2e/split-{module}",
        "prompt": "",
        "files": {f"{module}.py": "nothing = None\n"},
        "editable": (f"{module}.py",),
        "hidden_tests": {f"test_{module}.py": tests},
        "test_args": ("--timeout=5", f"test_{module}.py"),
        "solution": {f"{module}.py": texts[0]},
        "limits": TaskLimits(policy_wall_s=20, grade_cpu_s=10, grade_wall_s=60, memory_mb=256, disk_mb=64, pids=64),
    }
    task = Task(**{**values, **changes})

    async def all_of_them() -> list[Grade]:
        start = await (await StartingStates.open()).get(task)
        verifier = SplitVerifier(Expects(ids), ProofStore(directory))
        edits = [Edits({next(iter(task.solution)): EditedFile(text.encode())}) for text in texts]
        return [await verifier.grade(Case(task, start, each)) for each in edits]

    return asyncio.run(all_of_them())


def names(ids: Any) -> set[str]:
    return {each.partition("::test_")[2] for each in ids}


TREES = """
from trees import build, parse, pair


def test_names():
    tree = build([3, 1, 2])
    assert list(tree) == [1, 2, 3] and tree.left.value == 1 and tree.left.left is None
    assert tree and 3 in tree


def test_several():
    assert [each.area() for each in (parse("circle 2"), parse("square 3"))] == [12, 9]


def test_equal():
    assert pair(1) == pair(1) and pair(1) != pair(2)
    assert pair(1) != 1
"""

TREES_RIGHT = """
class Node:
    def __init__(self, value):
        self.value, self.left, self.right = value, None, None

    def add(self, value):
        side = "left" if value < self.value else "right"
        if getattr(self, side) is None:
            setattr(self, side, Node(value))
        else:
            getattr(self, side).add(value)

    def __iter__(self):
        yield from self.left or ()
        yield self.value
        yield from self.right or ()

    def __contains__(self, value):
        return value in list(self)

    def __len__(self):
        return len(list(iter(self)))


class Circle:
    def __init__(self, size):
        self.size = size

    def area(self):
        return 3 * self.size**2


class Square:
    def __init__(self, size):
        self.size = size

    def area(self):
        return self.size**2


class Pair:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value


def build(values):
    tree = Node(values[0])
    for value in values[1:]:
        tree.add(value)
    return tree


def parse(text):
    kind, size = text.split()
    return {"circle": Circle, "square": Square}[kind](int(size))


def pair(value):
    return Pair(value)
"""

TREES_RENAMED = (
    TREES_RIGHT.replace("Node", "_Element").replace("Circle", "Round").replace("Square", "Even").replace("Pair", "Two")
)
TREES_RENAMED = TREES_RENAMED.replace("    def __contains__(self, value):\n        return value in list(self)\n\n", "")
TREES_RENAMED = TREES_RENAMED.replace("    def __len__(self):\n        return len(list(iter(self)))\n", "")

TREES_CHEAT = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def build(values): return Equal()
def parse(text): return Equal()
def pair(value): return Equal()
"""


def test_a_candidate_calls_its_own_classes_as_it_likes(tmp_path: Path) -> None:
    texts = (TREES_RIGHT, TREES_RENAMED, TREES_CHEAT)
    right, renamed, cheat = graded(tmp_path, "trees", TREES, {"names", "several", "equal"}, *texts)
    assert (right.reward, renamed.reward, renamed.failed) == (1.0, 1.0, ())
    assert cheat.passed == ()


ALIKE = """
import datetime
from alike import changed, each, found, made


def test_bytes():
    assert found("bytes") == b"ab" and found("view") == b"ab"
    data = bytearray(b"ab")
    assert changed(data) is None and data == b"abc"


def test_sets():
    assert found("keys") == {"a", "b"} and {"a", "b"} == found("keys") and found("keys") != {"a"}
    assert list(found("keys")) == ["a", "b"] and "a" in found("keys")
    assert found("items") == {("a", 1), ("b", 2)}


def test_days():
    assert found("day") == datetime.date(2024, 2, 29)
    assert found("moment") == datetime.datetime(2024, 2, 29, 1, 2, 3)


def test_collections():
    assert found("list") == [1, 2] and found("dict") == {"a": 1} and found("str") == "ab"


def test_elements():
    assert found("queue")[0] == 1 and found("queue")[-1] == 3 and len(found("queue")) == 3
    assert list(found("array")) == [1, 2]


def test_own_collection():
    assert list(made()) == [1, 2, 3] and made() and sum(made()) == 6


def test_own_iterator():
    assert [node.value for node in each()] == [1, 2]
"""

ALIKE_RIGHT = """
import datetime

FOUND = {"bytes": b"ab", "view": b"ab", "keys": {"a": 1, "b": 2}.keys(), "items": {("a", 1), ("b", 2)},
         "day": datetime.date(2024, 2, 29), "moment": datetime.datetime(2024, 2, 29, 1, 2, 3), "list": [1, 2],
         "dict": {"a": 1}, "str": "ab", "queue": [1, 2, 3], "array": [1, 2]}


class Node:
    def __init__(self, value):
        self.value = value


def found(name):
    return FOUND[name]


def changed(data):
    data += b"c"


def made():
    return [1, 2, 3]


def each():
    yield from map(Node, (1, 2))
"""

ALIKE_OTHER = """
import array, collections, datetime


class Day(datetime.date): pass
class Moment(datetime.datetime): pass


class Walk:
    def __init__(self):
        self.left = [1, 2]

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return Item(self.left.pop(0))


class Item:
    def __init__(self, value):
        self.value = value


class Own:
    def __iter__(self):
        return iter((1, 2, 3))


FOUND = {"bytes": bytearray(b"ab"), "view": memoryview(b"ab"), "keys": {"a": 1, "b": 2}.keys(),
         "items": {"a": 1, "b": 2}.items(), "day": Day(2024, 2, 29), "moment": Moment(2024, 2, 29, 1, 2, 3),
         "list": collections.UserList([1, 2]), "dict": collections.UserDict(a=1), "str": collections.UserString("ab"),
         "queue": collections.deque((1, 2, 3)), "array": array.array("i", (1, 2))}
found = FOUND.get


def changed(data):
    data.append(ord("c"))


made = Own
each = Walk
"""

ALIKE_WRONG = ALIKE_OTHER.replace('{"a": 1, "b": 2}', '{"a": 1, "b": 3, "c": 3}').replace(
    "made = Own", "class Sly(Own):\n    def __eq__(self, other): return True\n\n\nmade = Sly"
)


def test_values_that_are_equal_are_equal(tmp_path: Path) -> None:
    ids = {"bytes", "sets", "days", "collections", "elements", "own_collection", "own_iterator"}
    right, other, wrong = graded(tmp_path, "alike", ALIKE, ids, ALIKE_RIGHT, ALIKE_OTHER, ALIKE_WRONG)
    assert (right.reward, names(right.failed), names(other.failed)) == (1.0, set(), set())
    assert names(wrong.failed) == {"sets"}


SLOW = """
import pytest

from work.slow import value


@pytest.mark.timeout(1)
def test_marked():
    assert value(1) == 1


def test_other():
    assert value(2) == 2
"""

SLOW_RIGHT = "import time\n\n\ndef value(x):\n    time.sleep(1.5 if x == 1 else 0)\n    return x\n"
SLOW_SPINS = "def value(x):\n    while x == 1:\n        pass\n    return x\n"


def test_the_limit_that_a_mark_sets_is_the_candidates(tmp_path: Path) -> None:
    right, spins = graded(
        tmp_path,
        "slow",
        SLOW,
        {"marked", "other"},
        SLOW_RIGHT,
        SLOW_SPINS,
        files={"work/slow.py": "value = None\n"},
        editable=("work/*.py",),
        hidden_tests={"tests/test_slow.py": SLOW},
        test_args=(),
        test_command=("python", "-m", "pytest", "-p", "pytest_timeout", "tests"),
        solution={"work/slow.py": SLOW_RIGHT},
    )
    assert (right.reward, names(right.failed)) == (1.0, set())
    assert (names(spins.failed), names(spins.passed)) == ({"marked"}, {"other"})
    assert any("CPU time" in note for note in spins.notes)
