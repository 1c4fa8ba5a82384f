"""Rows as of SWE-bench on a repository of our own: what is carried, what must not be lost, what is told."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from worldfork.core.errors import ConfigError
from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.episode import Episode
from worldfork.records.task import Task
from worldfork.rollout.group import run_rollouts
from worldfork.rollout.loading import load_tasks
from worldfork.rollout.policies import NopPolicy, ReferencePolicy

pytestmark = [
    # The first one builds a world.
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("git") is None, reason="there is no git"),
]

FILES = {
    "pkg/__init__.py": "",
    "pkg/a.py": "import json, pathlib\n\n\ndef value():\n"
    "    return json.loads(pathlib.Path(__file__).with_name('data.json').read_text())\n",
    "pkg/data.json": "1\n",
    "tests/test_old.py": "from pkg.a import value\n\n\ndef test_old():\n    assert value() > 0\n",
}
FIX = """\
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -3,3 +3,7 @@

 def value():
     return json.loads(pathlib.Path(__file__).with_name('data.json').read_text())
+
+
+def twice():
+    return 2
"""
TESTS = """\
--- a/tests/test_old.py
+++ b/tests/test_old.py
@@ -1,5 +1,13 @@
-from pkg.a import value
+from pkg.a import twice, value


 def test_old():
     assert value() > 0
+
+
+def test_more():
+    assert value() in (1, 2)
+
+
+def test_twice():
+    assert twice() == 2
"""
STUB = "printf '\\n\\ndef twice():\\n    return 0\\n' >>pkg/a.py"
MENDED = "printf '\\n\\ndef twice():\\n    return value()\\n' >>pkg/a.py; echo 2 >pkg/data.json"
CLUTTER = "mkdir -p .venv/lib build/lib; for i in $(seq 60); do echo >.venv/lib/m$i.py; echo >build/lib/m$i.py; done"


class Shell:
    """A policy of one line."""

    def __init__(self, line: str) -> None:
        self.policy_id = "line"
        self.line = line

    async def agent(self, sandbox: AsyncSandbox, task: Task, turn: object) -> None:
        await sandbox.sh(self.line, check=True)


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Task]:
    words = ["git", "-C", str(tmp_path / "src"), "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    for path, text in FILES.items():
        place = tmp_path / "src" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "one"]):
        subprocess.run([*words, *command], check=True)

    def loaded(*ids: str, keep: tuple[str, ...] = ()) -> Task:
        row: dict[str, Any] = {
            "instance_id": "o__n-1",
            "repo": "o/n",
            "base_commit": "HEAD",
            "patch": FIX,
            "test_patch": TESTS,
            "problem_statement": "",
            "FAIL_TO_PASS": [f"tests/test_old.py::{each}" for each in ids],
            "PASS_TO_PASS": [f"tests/test_old.py::{each}" for each in keep],
        }
        odd = {**row, "instance_id": "o__n-2", "FAIL_TO_PASS": ["test_x (tests.A)"]}
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(odd) + "\n" + json.dumps(row) + "\n")
        errors: list[ConfigError] = []
        (task,) = load_tasks(path, repositories={"o/n": tmp_path / "src"}, on_unusable=errors.append)
        assert [each.fields["task_id"] for each in errors] == ["o__n-2"]
        return replace(task, env={"PYTHONPATH": "/workspace"}, limits=replace(task.limits, carry_files=40))

    return loaded


def one(task: Task, policy: object) -> Episode:
    (episode,) = asyncio.run(run_rollouts([task], policy))
    assert episode.failure is None, episode.failure
    return episode


def test_a_fix_among_clutter_is_worth_1_and_what_finds_no_room_is_told(load: Callable[..., Task]) -> None:
    task = load("test_twice", keep=("test_old", "test_more"))
    assert one(task, ReferencePolicy()).reward == 1.0
    nothing = one(task, NopPolicy())
    assert nothing.reward == 0.0
    assert not any("not carried" in each for each in nothing.notes)
    # Its fix is another one, and no code alone.
    mended = one(task, Shell(f"{CLUTTER}; {MENDED}"))
    assert mended.reward == 1.0
    told = mended.notes[0]
    assert told.startswith("not carried: build/lib/m")
    assert "carry_files" in told


def test_what_must_not_be_lost_and_what_loading_is_worth(load: Callable[..., Task]) -> None:
    declared = load("test_twice", keep=("test_old", "test_more"))
    # The start cannot load these tests, so that it passes none of them.
    assert (
        one(
            declared, Shell(f"{MENDED}; echo 3 >pkg/data.json; sed -i 's/return value/return 2 or value/' pkg/a.py")
        ).reward
        == 0.0
    )
    for task in (load(), load("test_twice", "test_old", "test_more")):
        assert one(task, Shell(STUB)).reward == 0.0
        assert one(task, ReferencePolicy()).reward == 1.0
