"""Tasks of whole repositories: built from the registry, rebuilt where there is C, graded by what a fix turns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from worldfork.records.edits import EditedFile, Edits
from worldfork.records.task import Task
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.reward.verifier import Case, Grade
from worldfork.rollout.loading import load_tasks
from worldfork.rollout.starts import StartingState, StartingStates

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "repos.jsonl"

pytestmark = [
    pytest.mark.skipif(not DATA.exists(), reason=f"{DATA} is not there"),
    pytest.mark.timeout(900),  # downloads, and a C build in each grading
]


def named(name: str) -> Task:
    return next(task for task in load_tasks(DATA) if task.task_id == f"pypi/{name}")


@pytest.fixture(scope="module")
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> CalibrationStore:
    return CalibrationStore(tmp_path_factory.mktemp("calibrations"))


async def graded(task: Task, calibrations: CalibrationStore, *more: Edits) -> tuple[StartingState, list[Grade]]:
    start = await (await StartingStates.open()).get(task)
    verifier = PytestVerifier(calibrations)
    return start, [await verifier.grade(Case(task, start, edits)) for edits in (start.solution, Edits(), *more)]


def test_a_package_is_graded_by_the_tests_of_its_next_version(calibrations: CalibrationStore) -> None:
    task = named("tabulate-0.8.9")
    start, (reference, nop) = asyncio.run(graded(task, calibrations))
    assert reference.reward == 1.0
    assert set(task.fail_to_pass) <= set(reference.passed)
    assert nop.reward < 1.0
    assert not set(task.fail_to_pass) & set(nop.passed)

    async def seen() -> str:
        async with start.fork() as sandbox:
            return (await sandbox.sh("grep -c maxcolwidths tabulate.py test/*.py; python -m pip list")).stdout

    # Neither the fix nor its tests are anywhere in a policy's sandbox.
    said = asyncio.run(seen())
    assert "tabulate.py:0" in said
    assert ":1" not in said
    assert "0.8.10" not in said


def test_programs_that_the_package_declares_are_on_the_path_of_its_tests(calibrations: CalibrationStore) -> None:
    task = named("python-dotenv-1.0.0")
    _, (reference, _, broken) = asyncio.run(
        graded(task, calibrations, Edits({"src/dotenv/__main__.py": EditedFile(b"raise SystemExit(1)\n")}))
    )
    assert set(task.pass_to_pass) <= set(reference.passed)
    # They run what the policy made of the package.
    assert "tests/test_cli.py::test_run" in reference.passed
    assert "tests/test_cli.py::test_run" not in broken.passed


def test_a_c_extension_is_rebuilt_and_what_does_not_compile_earns_nothing(calibrations: CalibrationStore) -> None:
    task = named("ujson-5.4.0")
    broken = Edits({"python/ujson.c": EditedFile(b"not C")})
    _, (reference, nop, wrong) = asyncio.run(graded(task, calibrations, broken))
    assert reference.reward == 1.0
    assert nop.reward < 1.0
    assert (wrong.reward, wrong.end) == (0.0, "build_failed")
