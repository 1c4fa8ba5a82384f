"""The pytest verifier for real: forks, hidden tests, files that would run before them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import VerifierError
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.episode import FailureKind
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.reward.verifier import Case, Grade
from worldfork.rollout.starts import StartingStates

# The first one builds a world.
pytestmark = pytest.mark.timeout(300)

TESTS = """
import sys

import pytest
from answer import value


def test_old():
    assert value(0) == 0


@pytest.mark.parametrize("x", [1, 2], ids=["one-" + "x" * 600, "two [with] 'odd'"])
def test_new(x):
    assert value(x) == x


def test_configuration(request):
    assert request.config.getini("markers") == [] or "own" in str(request.config.getini("markers"))
"""
WRONG = "def value(x):\n    return 0\n"
RIGHT = "def value(x):\n    return x\n"


def task(**changes: Any) -> Task:
    values: dict[str, Any] = {
        "task_id": "e2e/verified",
        "prompt": "",
        "files": {"src/answer.py": WRONG, "conftest.py": "WORLD = True\n"},
        "editable": ("**",),
        "hidden_tests": {"tests/test_answer.py": TESTS},
        "test_args": ("--timeout=5", "tests"),
        "test_roots": ("tests",),
        "solution": {"src/answer.py": RIGHT},
        "env": {"PYTHONPATH": "src"},
        "score": "fail_to_pass",
        "limits": TaskLimits(grade_cpu_s=10, grade_wall_s=30, memory_mb=256, disk_mb=64, pids=64),
    }
    return Task(**{**values, **changes})


def edits(**files: str) -> Edits:
    return Edits({path: EditedFile(text.encode()) for path, text in files.items()})


def grading(tmp_path: Path, what: Task, *left: Edits) -> list[Grade]:
    async def all_of_them() -> list[Grade]:
        start = await (await StartingStates.open()).get(what)
        verifier = PytestVerifier(CalibrationStore(tmp_path))
        return [await verifier.grade(Case(what, start, each)) for each in left]

    return asyncio.run(all_of_them())


def test_repairs_are_counted_and_long_ids_are_whole(tmp_path: Path) -> None:
    half = "def value(x):\n    return 1 if x == 1 else 0\n"
    broken = "def value(x):\n    return x or 7\n"
    right, nothing, one, lost = grading(
        tmp_path,
        task(),
        edits(**{"src/answer.py": RIGHT}),
        Edits(),
        edits(**{"src/answer.py": half}),
        edits(**{"src/answer.py": broken}),
    )
    assert (right.reward, right.end, right.notes) == (1.0, "exited", ())
    assert any(len(name) > 600 for name in right.expected)
    assert (nothing.reward, nothing.passed) == (0.0, nothing.untouched)
    assert (one.reward, lost.reward) == (0.5, 0.0)


CHEATS = {
    "conftest.py": "def pytest_pyfunc_call(pyfuncitem):\n    return True\n",
    "src/conftest.py": "raise SystemExit(0)\n",
    "src/sitecustomize.py": "import os; os._exit(0)\n",
    "src/usercustomize.py": "import os; os._exit(0)\n",
    "src/pytest.py": "raise SystemExit(0)\n",
    "src/pytest_timeout.py": "raise SystemExit(0)\n",
    "src/json.py": "import os; os._exit(0)\n",
    "json.py": "import os; os._exit(0)\n",
    "pytest.ini": "[pytest]\naddopts = --collect-only\n",
    "tests/test_answer.py": "def test_old(): pass\n",
    "tests/conftest.py": "import pytest\ndef pytest_collection_modifyitems(items):\n    items.clear()\n",
    "src/evil-1.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
    "src/evil.py": "raise SystemExit(0)\n",
}


def test_no_file_that_runs_before_the_tests_is_the_policys(tmp_path: Path) -> None:
    cheat, both = grading(
        tmp_path,
        task(),
        edits(**CHEATS, **{"src/answer.py": WRONG}),
        edits(**CHEATS, **{"src/answer.py": RIGHT}),
    )
    assert (cheat.reward, both.reward) == (0.0, 1.0)
    assert "conftest.py" in both.notes[0]


def test_sources_are_rebuilt(tmp_path: Path) -> None:
    built = task(
        task_id="e2e/built",
        files={"src/answer.txt": WRONG, "src/answer.py": WRONG},
        editable=("src/*.txt",),
        solution={"src/answer.txt": RIGHT},
        rebuild=("sh", "-c", "grep -q def src/answer.txt && cp src/answer.txt src/answer.py"),
    )
    right, nothing, bad = grading(
        tmp_path, built, edits(**{"src/answer.txt": RIGHT}), Edits(), edits(**{"src/answer.txt": "nothing"})
    )
    assert (right.reward, nothing.reward, bad.reward) == (1.0, 0.0, 0.0)
    assert (bad.end, bad.failed) == ("build_failed", ())


def test_nothing_that_a_rebuild_step_left_running_sees_a_test(tmp_path: Path) -> None:
    watching = (
        "(while :; do if [ -d tests ]; then rm -rf tests; mkdir -p tests;"
        " echo 'def test_old(): pass' > tests/test_answer.py; fi; done) >/dev/null 2>&1 </dev/null &"
    )
    built = task(
        task_id="e2e/left",
        files={"src/answer.py": WRONG, "build.sh": "true\n"},
        rebuild=("sh", "build.sh"),
    )
    cheat, right = grading(
        tmp_path, built, edits(**{"build.sh": watching}), edits(**{"build.sh": watching, "src/answer.py": RIGHT})
    )
    assert (cheat.reward, cheat.passed, right.reward) == (0.0, cheat.untouched, 1.0)


REPORTS = """
import sys, unittest
sys.path.insert(0, "src")
from answer import value
for number, x in enumerate([0, 1, 2], 1):
    print("ok" if value(x) == x else "not ok", number, "- value of", x)
print("1..3")
"""


def test_results_in_tap(tmp_path: Path) -> None:
    tap = task(
        task_id="e2e/tap",
        hidden_tests={"tests/run.py": REPORTS},
        test_command=("python", "tests/run.py"),
        reader="tap",
    )
    right, nothing = grading(tmp_path, tap, edits(**{"src/answer.py": RIGHT}), Edits())
    assert (right.reward, nothing.reward) == (1.0, 0.0)
    assert nothing.passed == ("value of 0",)


def test_results_in_junit(tmp_path: Path) -> None:
    junit = task(
        task_id="e2e/junit",
        test_command=("sh", "-c", "PYTHONPATH=src python -m pytest -q --junitxml=out.xml tests"),
        reader="junit:out.xml",
    )
    right, nothing = grading(tmp_path, junit, edits(**{"src/answer.py": RIGHT}), Edits())
    assert (right.reward, nothing.reward) == (1.0, 0.0)


FILLING = {
    "fifo": "import os\nos.unlink('out.xml') if os.path.exists('out.xml') else 0\nos.mkfifo('out.xml')\nos._exit(0)\n",
    "huge": "import os\nos.truncate(os.open('out.xml', os.O_CREAT | os.O_RDWR), 10 << 30)\nos._exit(0)\n",
    "link": "import os\nos.symlink('/etc/passwd', 'out.xml')\nos._exit(0)\n",
    "bomb": (
        "import os\nentities = ''.join(f'<!ENTITY a{n} \"' + f'&a{n-1};' * 10 + '\">' for n in range(1, 30))\n"
        "open('out.xml', 'w').write(f'<!DOCTYPE x [<!ENTITY a0 \"a\">{entities}]><x>&a29;</x>')\nos._exit(0)\n"
    ),
}


@pytest.mark.parametrize("name", FILLING)
def test_results_that_are_none_are_worth_0(tmp_path: Path, name: str) -> None:
    junit = task(
        task_id=f"e2e/junit-{name}",
        test_command=("sh", "-c", "PYTHONPATH=src python -m pytest -q --junitxml=out.xml tests"),
        reader="junit:out.xml",
    )
    (grade,) = grading(tmp_path, junit, edits(**{"src/answer.py": FILLING[name]}))
    assert (grade.reward, grade.passed) == (0.0, ())


def test_suites_that_never_end_or_leave_something_behind(tmp_path: Path) -> None:
    endless = "def value(x):\n    while x:\n        pass\n    return 0\n"
    daemon = (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    while True:\n        pass\ndef value(x):\n    return x\n"
    )
    quick = task(task_id="e2e/ends", test_args=("--timeout=0.5", "tests"))
    slow, left = grading(tmp_path, quick, edits(**{"src/answer.py": endless}), edits(**{"src/answer.py": daemon}))
    assert (slow.reward, slow.end) == (0.0, "exited")
    assert left.reward == 1.0


def test_a_task_whose_plugin_the_world_lacks_says_so(tmp_path: Path) -> None:
    with pytest.raises(VerifierError) as raised:
        grading(tmp_path, task(test_args=("--forked", "tests")), Edits())
    assert raised.value.fields["kind"] is FailureKind.CALIBRATION


ALL_AT_ONCE = """
import __main__, concurrent.futures, multiprocessing, os, time
import pytest
from answer import value

@pytest.mark.timeout(0.5)
def test_sleeps(): time.sleep(1); assert value(1) == 1

@pytest.mark.timeout(0.5)
def test_spins():
    end = time.process_time() + 20
    while time.process_time() < end and value(1) != 1: pass
    assert value(1) == 1

def test_spawns():
    assert os.path.isfile(__main__.__file__)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(value, 7).result() == 7
"""


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("from nosuch import double\n\ndef test_three(): assert double(3) == 6\n", {}, "tests/test_answer.py: Module"),
        ("def test_three(): assert 3 == 6\n", {}, "tests/test_answer.py::test_three: assert 3 == 6"),
        ("def test_three(: pass\n", {}, "tests/test_answer.py: .*invalid syntax|tests/test_answer.py: .*SyntaxError"),
        ("def test_three(nosuch): pass\n", {}, "test_answer.py::test_three: fixture 'nosuch' not found"),
        ("import pytest\n\n@pytest.mark.skip\ndef test_three(): pass\n", {}, "all 1 are skipped"),
        (
            "def test_one(): pass\n\ndef test_three(): assert 3 == 6\n",
            {"fail_to_pass": ("tests/test_answer.py::test_three",)},
            r"test_three \(tests/test_answer.py::test_three: assert 3 == 6\)",
        ),
        (
            "def test_three(): assert 3 == 6\n",
            {"test_command": ("python", "-m", "pytest", "--junitxml=/tmp/r.xml"), "reader": "junit:/tmp/r.xml"},
            "passes no test: tests.test_answer::test_three: assert 3 == 6",
        ),
    ],
)
def test_an_author_learns_why_the_reference_passes_nothing(
    tmp_path: Path, text: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(VerifierError, match=words) as raised:
        grading(tmp_path, task(hidden_tests={"tests/test_answer.py": text}, **changes), edits())
    assert raised.value.fields["kind"] is FailureKind.CALIBRATION
    assert len(raised.value.message) < 1000


def test_a_repository_is_tested_as_by_hand(tmp_path: Path) -> None:
    what = task(
        task_id="e2e/by-hand",
        files={"answer.py": WRONG, "setup.cfg": "[tool:pytest]\naddopts = --cov=answer -n auto --strict-markers\n"},
        editable=("*.py",),
        hidden_tests={"tests/test_answer.py": ALL_AT_ONCE},
        test_args=(),
        test_command=("python", "-m", "pytest", "-p", "pytest_timeout", "tests"),
        solution={"answer.py": RIGHT},
        env={},
    )
    right, nothing = grading(tmp_path, what, edits(**{"answer.py": RIGHT}), Edits())
    assert (right.reward, len(right.passed), right.notes) == (1.0, 3, ())
    assert nothing.reward == 0.0
