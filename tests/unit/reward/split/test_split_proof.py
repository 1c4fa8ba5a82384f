"""Which tasks cannot be split, told before anything runs; proofs that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.task import Task
from worldfork.reward.calibration import CalibrationStore
from worldfork.reward.needs import Need
from worldfork.reward.pytest_verifier import PytestVerifier
from worldfork.reward.report import Report, TestRecord
from worldfork.reward.split.automatic import AutomaticVerifier
from worldfork.reward.split.proof import Proof, ProofStore, learn_modules
from worldfork.reward.split.trial import SplitTrial
from worldfork.reward.split.verifier import SplitVerifier
from worldfork.reward.verifier import Case, Grade


def a_task(**changes: Any) -> Task:
    values: dict[str, Any] = {
        "task_id": "t",
        "prompt": "",
        "editable": ("pkg/**",),
        "hidden_tests": {"test_a.py": "pass"},
        "test_args": ("test_a.py",),
    }
    return Task(**{**values, **changes})


def start_of(originals: Mapping[str, bytes], **solution: bytes) -> Any:
    files = {path.replace("__", "/").replace("_py", ".py"): EditedFile(text) for path, text in solution.items()}
    return SimpleNamespace(originals=originals, solution=Edits(files, ("pkg/gone.py",)))


def test_the_modules_are_those_of_the_reference_and_other_editable_files_are_absent() -> None:
    start = start_of({"pkg/a.py": b"old = 1", "pkg/gone.py": b"x = 1", "pkg/data.txt": b""}, pkg__a_py=b"def f(): ...")
    learned = learn_modules(a_task(), start)
    assert set(learned.modules) == {"pkg/a.py"}
    assert learned.modules["pkg/a.py"]["functions"] == ["f"]
    assert learned.absent == ("pkg/data.txt",)
    assert not learned.capable


@pytest.mark.parametrize(
    ("changes", "originals", "why"),
    [
        ({"test_command": ("./run",), "reader": "tap"}, {"pkg/a.py": b""}, "not run by pytest"),
        ({"rebuild": ("make",)}, {"pkg/a.py": b""}, "rebuilt"),
        ({}, {"pkg/a.c": b""}, "no Python module"),
        ({}, {"pkg/a.py": b"\xff"}, "UTF-8"),
        ({}, {"pkg/a.py": b"def"}, "no Python"),
    ],
)
def test_what_stands_in_the_way_is_said(changes: dict[str, Any], originals: dict[str, bytes], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        learn_modules(a_task(**changes), start_of(originals))


class Originals(dict[str, bytes]):
    """Opens its snapshot at each reading."""

    opened = 0

    def __getitem__(self, path: str) -> bytes:
        raise AssertionError(f"{path} was read alone")

    def read(self, paths: Sequence[str]) -> list[bytes]:
        self.opened += 1
        return [dict.__getitem__(self, path) for path in paths]


def test_the_originals_are_read_together() -> None:
    originals = Originals({f"pkg/m{number}.py": b"x = 1" for number in range(50)} | {"pkg/a.py": b""})
    learned = learn_modules(a_task(), start_of(originals, pkg__a_py=b"def f(): ..."))
    assert len(learned.modules) == 51
    assert learned.modules["pkg/a.py"]["functions"] == ["f"]
    assert originals.opened == 1


def test_a_proof_is_made_once_and_read_by_the_next(tmp_path: Path) -> None:
    made = []

    async def make() -> Proof:
        made.append(1)
        await asyncio.sleep(0)
        return Proof(True, shapes={"f()": ("Box",)}, modules={"a.py": {"functions": ["f"]}}, absent=("x",), cpu_s=1.5)

    async def ask(store: ProofStore, count: int) -> list[Proof]:
        return list(await asyncio.gather(*(store.get_or_make("task", "sn-1", make) for _ in range(count))))

    first = asyncio.run(ask(ProofStore(tmp_path), 5))
    again = asyncio.run(ask(ProofStore(tmp_path), 1))
    assert len(made) == 1
    assert first == again * 5
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text()[:20])
    assert asyncio.run(ask(ProofStore(tmp_path), 1)) == again
    assert len(made) == 2


class Played(SplitVerifier):
    """Its runs end as it was told: with these ids passed."""

    def __init__(self, directory: Path, *runs: set[str]) -> None:
        knows: Any = SimpleNamespace(calibrate=self._calibrate)
        super().__init__(knows, ProofStore(directory))
        self.runs = list(runs)

    async def _calibrate(self, task: Task, start: Any) -> Any:
        return SimpleNamespace(expected=("a", "b"))

    async def _try_out(self, *_: Any, **__: Any) -> tuple[SplitTrial, str]:
        report = Report(ready=True, tests={name: TestRecord("passed") for name in self.runs.pop(0)})
        return SplitTrial(report, "exited", 1.0, 4.0, False, missed_s=1.5), "sb-1"


@pytest.mark.parametrize(
    ("runs", "capable"),
    [
        ([{"a", "b"}] * 2, True),
        ([{"a"}, {"a", "b"}, {"a", "b"}], True),
        ([{"a", "b"}, {"a"}, {"a", "b"}, {"a", "b"}], True),
        ([{"a"}, {"a"}], False),
    ],
)
def test_one_miss_by_chance_decides_nothing(tmp_path: Path, runs: list[set[str]], capable: bool) -> None:
    start = start_of({"pkg/a.py": b"def f(): ..."})
    start.snapshot_id = "sn-1"
    verifier = Played(tmp_path, *runs)
    proof = asyncio.run(verifier.prove(a_task(), start))
    assert proof.capable is capable
    assert proof.need == (Need(cpu_s=1.0, wall_s=2.5) if capable else Need())
    assert not verifier.runs


def test_what_the_texts_tell_is_not_asked_again(tmp_path: Path) -> None:
    start = start_of({"pkg/a.c": b""})
    start.snapshot_id = "sn-1"
    assert "no Python module" in asyncio.run(Played(tmp_path).prove(a_task(), start)).why


def test_what_was_missed_once_can_be_looked_at_again(tmp_path: Path) -> None:
    start = start_of({"pkg/a.py": b"def f(): ..."})
    start.snapshot_id = "sn-1"
    missed = Played(tmp_path, {"a"}, {"a"})
    assert not asyncio.run(missed.prove(a_task(), start)).capable
    # As it was found, by whoever asks; until somebody has it looked at again.
    assert not asyncio.run(missed.prove(a_task(), start)).capable
    later = Played(tmp_path, {"a", "b"}, {"a", "b"})
    assert asyncio.run(later.prove(a_task(), start, again=True)).capable
    assert asyncio.run(Played(tmp_path).prove(a_task(), start)).capable
    assert asyncio.run(Played(tmp_path).prove(a_task(), start, again=True)).capable


@pytest.mark.parametrize(("runs", "by"), [([{"a", "b"}] * 2, "split"), ([{"a"}] * 2, "pytest")])
def test_a_grade_says_which_of_the_two_judged(tmp_path: Path, runs: list[set[str]], by: str) -> None:
    start = start_of({"pkg/a.py": b"def f(): ..."})
    start.snapshot_id = "sn-1"

    async def grade(case: Any) -> Grade:
        return Grade(reward=0.5)

    by_split, by_pytest = Played(tmp_path, *runs), PytestVerifier(CalibrationStore(tmp_path))
    for each in (by_split, by_pytest):
        each.grade = grade  # type: ignore[attr-defined]
    found = asyncio.run(AutomaticVerifier(by_pytest, by_split).grade(Case(a_task(), start, Edits())))
    assert (found.reward, found.judged_by.partition(":")[0]) == (0.5, by)
    assert found.judged_by in {by_split.verifier_id, by_pytest.verifier_id}
