"""Which tasks cannot be split, told before anything runs; proofs that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.task import Task
from worldfork.reward.split.proof import Proof, ProofStore, learn_modules


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
