"""The split verifier for real: two forks, a candidate that attacks, tests that never meet it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import VerifierError
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.calibration import Calibration, CalibrationStore
from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.reward.split.automatic import AutomaticVerifier
from worldfork.reward.split.proof import ProofStore
from worldfork.reward.split.verifier import SplitVerifier
from worldfork.reward.verifier import Case, Grade, Start
from worldfork.rollout.starts import StartingStates

pytestmark = pytest.mark.filterwarnings("ignore:no cgroup of this host:RuntimeWarning")

TESTS = """
import pytest

from answer import AnswerError, Box, WORD, apply, fail, grow, many, value


def test_value():
    assert value(1) == 2


def test_nested():
    assert value({"a": [(1, 2.5), None], "b": {3, 4}}) == {"a": [(1, 2.5), None], "b": {3, 4}}


def test_in_place():
    given = [3, 1, [2]]
    inner = given[2]
    assert grow(given) is None
    assert given == [3, 1, [2, 0], 9] and given[2] is inner


def test_generator():
    assert list(many(3)) == [0, 1, 2]


def test_endless_generator():
    numbers = many(None)
    assert [next(numbers) for _ in range(5)] == [0, 1, 2, 3, 4]


def test_callback():
    assert apply([1, 2], lambda x: x * 10) == [10, 20]


def test_exception():
    with pytest.raises(ValueError) as caught:
        fail("no")
    assert caught.value.args == ("no",)


def test_own_exception():
    with pytest.raises(AnswerError) as caught:
        fail("own")
    assert str(caught.value) == "own!" and caught.value.code == 7


def test_constant():
    assert WORD == "word"


def test_object():
    box = Box(4)
    box.put(5)
    assert box.items() == [4, 5] and box.first == 4 and len(box) == 2
    box.first = 8
    assert box.first == 8 and box == Box(8, 5) and box != Box(4)
"""

RIGHT = """
class AnswerError(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.code = 7

    def __str__(self):
        return f"{self.args[0]}!"


WORD = "word"


class Box:
    def __init__(self, *items):
        self._items = list(items)

    @property
    def first(self):
        return self._items[0]

    @first.setter
    def first(self, item):
        self._items[0] = item

    def put(self, item):
        self._items.append(item)

    def items(self):
        return list(self._items)

    def __len__(self):
        return len(self._items)

    def __eq__(self, other):
        return self._items == other._items


def value(x):
    return x + 1 if type(x) is int else x


def grow(given):
    given[2].append(0)
    given.append(9)


def many(count):
    number = 0
    while count is None or number < count:
        yield number
        number += 1


def apply(values, function):
    return [function(value) for value in values]


def fail(text):
    raise (AnswerError if text == "own" else ValueError)(text)
"""

STUB = "def value(x):\n    return None\n"

ALL = {
    f"test_answer.py::test_{name}"
    for name in (
        "value", "nested", "in_place", "generator", "endless_generator", "callback", "exception", "own_exception",
        "constant", "object",
    )
}  # fmt: skip


def task(**changes: Any) -> Task:
    values: dict[str, Any] = {
        "task_id": "e2e/split",
        "prompt": "",
        "files": {"answer.py": STUB},
        "editable": ("answer.py",),
        "hidden_tests": {"test_answer.py": TESTS},
        "test_args": ("--timeout=2", "test_answer.py"),
        "solution": {"answer.py": RIGHT},
        "limits": TaskLimits(policy_wall_s=20, grade_cpu_s=10, grade_wall_s=60, memory_mb=256, disk_mb=64, pids=64),
    }
    return Task(**{**values, **changes})


class Expects:
    """Stands in for the pytest verifier's calibration: all these ids."""

    def __init__(self, ids: set[str]) -> None:
        self.ids = ids

    async def calibrate(self, task: Task, start: Start) -> Calibration:
        return Calibration(task.task_hash, start.snapshot_id, tuple(sorted(self.ids)), (), (), 1.0)


async def grade_all(directory: Path, a_task: Task, ids: set[str], candidates: list[str]) -> list[Grade]:
    states = await StartingStates.open()
    start = await states.get(a_task)
    verifier = SplitVerifier(Expects(ids), ProofStore(directory))
    return [
        await verifier.grade(Case(a_task, start, Edits({"answer.py": EditedFile(text.encode())})))
        for text in candidates
    ]


def grade(directory: Path, candidate: str, *, a_task: Task | None = None, ids: set[str] = ALL) -> Grade:
    return asyncio.run(grade_all(directory, a_task or task(), ids, [candidate]))[0]


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proofs")


def names(ids: Any) -> set[str]:
    return {each.partition("::test_")[2] for each in ids}


def test_the_reference_passes_everything_and_nothing_passes_nothing(proofs: Path) -> None:
    right, nothing = asyncio.run(grade_all(proofs, task(), ALL, [RIGHT, STUB]))
    assert right.reward == 1.0
    assert right.passed == tuple(sorted(ALL))
    # A module without the names that tests import cannot be loaded, as in one process.
    assert nothing.reward == 0.0


FRAMES = """
import gc, os, struct

def server():
    return next(each for each in gc.get_objects() if type(each).__name__ == "Server")

def frame(kind, body, token=None):
    token = server()._token if token is None else token
    return struct.pack("<I", 9 + len(body)) + kind + token + body

def write(data):
    while data:
        data = data[os.write(server()._sink, data):]

def text(value):
    return b"s" + struct.pack("<I", len(value)) + value

def answer(body):
    return b"t" + struct.pack("<I", 2) + body + b"N"
"""

ATTACKS = {
    "exits": "import os\ndef value(x): os._exit(0)",
    "exits politely": "def value(x): raise SystemExit(0)",
    "interrupts": "def value(x): raise KeyboardInterrupt",
    "loops": "def value(x):\n    while True: pass",
    "sleeps": "import time\ndef value(x): time.sleep(1000)",
    "equal to everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
def value(x): return Equal()""",
    "a number equal to everything": """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __reduce__(self): return eval, ("2",)
    __hash__ = int.__hash__
def value(x): return Equal(7)""",
    "a list equal to everything": """
class Equal(list):
    def __eq__(self, other): return True
def value(x): return Equal([7])""",
    "a box in a place of numbers": """
class Odd(Box):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def value(x): return Odd(1)""",
    "not a number": "def value(x): return float('nan')",
    "not implemented": "def value(x): return NotImplemented",
    "deep": "def value(x):\n    made = []\n    for _ in range(100000): made = [made]\n    return made",
    "wide": "def value(x): return [0] * 10_000_000",
    "long": "def value(x): return 'x' * 20_000_000",
    "holds itself": "def value(x):\n    made = []\n    made.append(made)\n    return made",
    "takes all memory": "def value(x):\n    made = []\n    while True: made.append('x' * 10_000_000)",
    "forks": "import os\ndef value(x):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "prints": "import sys\ndef value(x):\n    while True: print('x' * 10000); sys.stderr.write('y' * 10000)",
    "kills all": "import os, signal\ndef value(x): os.kill(-1, signal.SIGKILL)",
    "kills its parent": "import os, signal\ndef value(x): os.kill(os.getppid(), signal.SIGKILL)",
    "closes its streams": "import os\ndef value(x): os.closerange(0, 1000)",
    "removes the toolchain": "import os\ndef value(x): os.system('rm -rf /usr /workspace /etc 2>/dev/null'); return 0",
    "skips": "import unittest\ndef value(x): raise unittest.SkipTest('no')",
    "skips as pytest does": "import pytest\ndef value(x): pytest.skip('no')",
    "hostile exception": """
import os
class Hostile(Exception):
    def __str__(self): os._exit(0)
    __repr__ = __str__
    args = property(__str__)
def value(x): raise Hostile""",
    "exception of hostile arguments": """
class Equal:
    def __eq__(self, other): return True
def value(x): raise ValueError(Equal(), [Equal()])""",
    "names its exception oddly": "def value(x): raise type('Exit', (BaseException,), {})('stop')",
    "garbage": FRAMES + "def value(x): write(b'\\xff' * 1000); return x",
    "huge frame": FRAMES + "def value(x): write(struct.pack('<I', 2**32 - 1) + b'R' * 100_000); return 2",
    "flood of frames": FRAMES + "def value(x):\n    while True: write(frame(b'R', answer(b'T')) * 1000)",
    "answer of another token": FRAMES + "def value(x): write(frame(b'R', answer(b'T'), b'12345678')); return 2",
    "a function of tests": FRAMES + "def value(x): write(frame(b'R', answer(b'k' + bytes(4)))); return 2",
    "a name of the library": FRAMES
    + "def value(x): write(frame(b'R', answer(b'y' + text(b'os') + text(b'_exit')))); return 2",
    "an object of tests": FRAMES
    + "def value(x): write(frame(b'R', answer(b'n' + bytes(4) + text(b'Item')))); return 2",
    "a count without end": FRAMES + "def value(x): write(frame(b'R', b't' + b'\\xff' * 4)); return 2",
    "bombs of levels": FRAMES + "def value(x): write(frame(b'R', b't\\1\\0\\0\\0' * 100_000)); return 2",
    "a month that is none": FRAMES
    + "def value(x):\n    one = b'i\\1\\0\\0\\0\\x63'\n    write(frame(b'R', answer(b'Y' + one * 3))); return 2",
    "a list as a key": FRAMES
    + "def value(x): write(frame(b'R', answer(b'd\\1\\0\\0\\0' + b'l' + bytes(4) + b'N'))); return 2",
    "changes more than it was given": FRAMES
    + "def value(x): write(frame(b'R', b't\\2\\0\\0\\0T' + b't\\3\\0\\0\\0NNN')); return 2",
    "asks for a function that is none": FRAMES
    + "NUMBER = b'i\\1\\0\\0\\0\\x63'\n"
    + "def value(x): write(frame(b'K', b't\\3\\0\\0\\0' + NUMBER + b't' + bytes(4) + b'd' + bytes(4))); return 2",
    "asks for no function at all": FRAMES + "def value(x): write(frame(b'K', b't\\2\\0\\0\\0NN')); return 2",
    "is plain without end": "class Nested(list):\n    def __iter__(self): yield Nested()\n"
    "def value(x): return Nested()",
    "reports a test": FRAMES
    + 'def value(x): write(frame(b\'J\', b\'{"id": "test_answer.py::test_value", "outcome": "passed"}\')); return 2',
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_fails_its_own_tests_and_no_others(proofs: Path, attack: str) -> None:
    given = grade(proofs, f"{RIGHT}\n{ATTACKS[attack]}\n")
    assert names(ALL - set(given.passed)) == {"value", "nested"}
    assert given.end == "exited"


SEES = """
import os, sys


def found():
    seen = [name for top in ("/workspace", "/tmp", "/var", "/home") for _, _, names in os.walk(top) for name in names]
    told = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("cmdline", "environ"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    told.append(file.read().decode("latin-1"))
            except OSError:
                pass
    loaded = [str(vars(module)) for module in list(sys.modules.values()) if module is not None]
    return [text for text in seen + told + loaded if "hidden" + "_marker" in text or "test" + "_answer" in text]


class Box:
    def __eq__(self, other):
        global GIVEN
        GIVEN.append(other)
        return False


GIVEN = []


def given():
    return [type(each).__name__ for each in GIVEN]
"""

SEES_TESTS = """
from answer import Box, found, given

hidden_marker = 12345


def test_found():
    assert found() == []


def test_given():
    box = Box()
    assert box != 12345
    assert box != [hidden_marker]
    assert not box == Box()
    assert given() == ["Box"]
"""


def test_a_candidate_sees_no_test_and_nothing_of_what_tests_expect(proofs: Path) -> None:
    ids = {"test_answer.py::test_found", "test_answer.py::test_given"}
    a_task = task(task_id="e2e/sees", hidden_tests={"test_answer.py": SEES_TESTS}, solution={"answer.py": SEES})
    given = grade(proofs, SEES, a_task=a_task, ids=ids)
    assert set(given.passed) == ids


STATE = """
COUNT = 0


def count():
    global COUNT
    COUNT += 1
    return COUNT


def end():
    import os
    os._exit(0)


def value(x):
    return x
"""

STATE_TESTS = """
from answer import count, end, value


def test_a():
    assert count() == 1


def test_b():
    assert count() == 2


def test_c():
    try:
        end()
    except BaseException:
        pass


def test_d():
    assert count() == 1


def test_e():
    try:
        value({1: object()})
    except BaseException:
        pass
"""


def test_a_process_is_kept_from_test_to_test_and_followed_by_another_when_it_ends(proofs: Path) -> None:
    ids = {f"test_answer.py::test_{name}" for name in "abd"}
    a_task = task(task_id="e2e/state", hidden_tests={"test_answer.py": STATE_TESTS}, solution={"answer.py": STATE})
    given = grade(proofs, STATE, a_task=a_task, ids=ids)
    # Neither the end of the candidate nor what cannot be sent passes, whatever the test catches.
    assert set(given.passed) == ids
    assert any("ended" in note for note in given.notes)


INCAPABLE = {
    "patches": (
        "from unittest.mock import patch\nimport answer\n\n"
        "def test_it():\n    with patch('answer.helper', lambda: 5):\n        assert answer.value(1) == 5\n",
        "def helper():\n    return 1\n\n\ndef value(x):\n    return helper()\n",
        "1 of 1 tests fail, such as test_answer.py::test_it",
    ),
    "prints": (
        "from answer import value\n\ndef test_it(capsys):\n    value(1)\n    assert capsys.readouterr().out\n",
        "def value(x):\n    print(x)\n",
        "1 of 1 tests fail, such as test_answer.py::test_it",
    ),
    "sends what is no value": (
        "from answer import value\n\ndef test_it():\n    assert value(open('/dev/null')) is None\n",
        "def value(x):\n    return None\n",
        "a value of type TextIOWrapper cannot be sent",
    ),
    "is no Python": ("def test_it():\n    assert True\n", "def value(x)\n", "answer.py is no Python"),
}


@pytest.mark.parametrize("why", INCAPABLE)
def test_a_task_that_cannot_be_split_says_why(proofs: Path, why: str) -> None:
    tests, solution, reason = INCAPABLE[why]
    a_task = task(task_id=f"e2e/{why}", hidden_tests={"test_answer.py": tests}, solution={"answer.py": solution})
    with pytest.raises(VerifierError, match="cannot be split") as caught:
        grade(proofs, solution, a_task=a_task, ids={"test_answer.py::test_it"})
    assert reason in str(caught.value)


def test_a_candidate_that_fills_its_disk_or_its_sandbox_fails_what_is_left(proofs: Path) -> None:
    fill = """
def value(x):
    with open("/workspace/big", "wb") as file:
        while True:
            file.write(bytes(1 << 20))
"""
    given = grade(proofs, f"{RIGHT}\n{fill}\n")
    assert not {"value", "nested"} & names(given.passed)
    assert given.end == "exited"


def test_tests_that_never_end_are_ended(proofs: Path) -> None:
    tests = "from answer import value\n\ndef test_it():\n    value(1)\n\ndef test_never():\n    while True: pass\n"
    a_task = task(
        task_id="e2e/never", hidden_tests={"test_answer.py": tests}, test_args=("test_answer.py",),
        limits=TaskLimits(grade_cpu_s=1, grade_wall_s=20, memory_mb=256, disk_mb=64, pids=64),
    )  # fmt: skip
    given = grade(proofs, RIGHT, a_task=a_task, ids={"test_answer.py::test_it"})
    assert given.end == "signaled"
    assert given.reward == 1.0


def test_a_task_without_a_verifier_is_split_where_that_is_proven_and_run_by_pytest_where_not(tmp_path: Path) -> None:
    tests, solution, _ = INCAPABLE["patches"]
    tasks = [
        task(task_id="e2e/auto"),
        task(task_id="e2e/auto-not", hidden_tests={"test_answer.py": tests}, solution={"answer.py": solution}),
    ]

    async def choose() -> list[tuple[str, float, float]]:
        by_pytest = PytestVerifier(CalibrationStore(tmp_path / "calibrations"))
        verifier = AutomaticVerifier(by_pytest, SplitVerifier(by_pytest, ProofStore(tmp_path / "proofs")))
        states = await StartingStates.open()
        found = []
        for each in tasks:
            start = await states.get(each)
            case = Case(each, start, start.solution)
            chosen = await verifier.choose(case)
            nothing = await verifier.grade_nothing(case)
            found.append((chosen.verifier_id.partition(":")[0], (await verifier.grade(case)).reward, nothing.reward))
        return found

    assert asyncio.run(choose()) == [("split", 1.0, 0.0), ("pytest", 1.0, 0.0)]
    # What was proven is kept.
    assert len(list((tmp_path / "proofs").glob("*.json"))) == 2


STOPS_ALL = """
import os, signal, sys, time

if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            try:
                os.kill(-1, signal.SIGSTOP)
            except OSError:
                pass
            time.sleep(0.001)
    os._exit(0)
time.sleep(0.2)


def value(x):
    os._exit(1)
"""


@pytest.mark.parametrize("args", [("test_answer.py",), ("--timeout=1", "test_answer.py")])
def test_a_candidate_that_stops_whatever_is_started_beside_it_is_graded_within_the_limits(
    proofs: Path, args: tuple[str, ...]
) -> None:
    limits = TaskLimits(grade_cpu_s=5, grade_wall_s=8, memory_mb=256, disk_mb=64, pids=64)
    given = grade(proofs, RIGHT + STOPS_ALL, a_task=task(test_args=args, limits=limits))
    assert given.reward == 0.0
    assert given.grade_s < 60


THREADS = """
import threading

from answer import value


def test_leaves_a_call():
    threading.Thread(target=value, args=(0.4,), daemon=True).start()


def test_after():
    assert value(0) == 0


def test_last():
    assert value(0.1) == 0.1
"""

SLEEPS = """
import time


def value(x):
    time.sleep(x)
    return x
"""


def test_a_call_that_a_test_left_to_a_thread_holds_up_nothing(proofs: Path) -> None:
    ids = {f"test_answer.py::test_{name}" for name in ("leaves_a_call", "after", "last")}
    a_task = task(task_id="e2e/threads", hidden_tests={"test_answer.py": THREADS}, solution={"answer.py": SLEEPS})
    given = grade(proofs, SLEEPS, a_task=a_task, ids=ids)
    assert set(given.passed) == ids
    assert given.end == "exited"
