"""Assertions on the files of an end state, and programs that judge, for real."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from worldfork.lineage.asynchronous import AsyncSandbox
from worldfork.records.edits import EditedFile, Edits
from worldfork.records.task import Task
from worldfork.records.task_limits import TaskLimits
from worldfork.reward.assertions import FilesSpec
from worldfork.reward.command_verifier import CommandVerifier
from worldfork.reward.files_verifier import FilesVerifier
from worldfork.reward.judge_program import JudgeSpec
from worldfork.reward.verifier import Case, Grade
from worldfork.rollout.starts import StartingState, StartingStates

# The first one builds a world.
pytestmark = pytest.mark.timeout(300)

TASK = Task(
    task_id="e2e/files",
    prompt="",
    files={"notes.txt": "kept\n", "judge.py": "print(0.5)\n"},
    editable=("*.py", "*.txt"),
    verifier={"kind": "files", "checks": [{"path": "notes.txt"}]},
    limits=TaskLimits(grade_cpu_s=10, grade_wall_s=20, memory_mb=256, disk_mb=64, pids=64),
)

LAID = """
printf '{"odd": 5, "list": [1, {"a/b": true}], "text": "x"}' > values.json
printf 'line one\\nline two\\n' > text.txt
printf 'run' > tool; chmod 755 tool
mkdir -p deep/er; printf x > deep/er/x; ln -s deep/er/x inner; ln -s /etc/passwd outer; ln -s loop loop
ln -s / root; mkfifo pipe; head -c 3 /dev/zero | tr '\\0' '\\377' > bytes
truncate -s 10G huge; rm notes.txt
"""


async def end_of(start: StartingState, line: str) -> str:
    async with start.fork() as sandbox:
        (await sandbox.sh(line)).check()
        return (await sandbox.checkpoint(stop=True, level="volatile")).snapshot_id


def looked(checks: list[dict[str, Any]], line: str = LAID, task: Task = TASK) -> Grade:
    async def look() -> Grade:
        start = await (await StartingStates.open()).get(task)
        end = await end_of(start, line)
        try:
            verifier = FilesVerifier(FilesSpec.from_json(checks))
            return await verifier.grade(Case(task, start, Edits(), end_snapshot_id=end))
        finally:
            await AsyncSandbox.delete_snapshot(end)

    return asyncio.run(look())


TRUE: list[dict[str, Any]] = [
    {"path": "values.json", "json": {"/odd": 5, "/list/1/a~1b": True, "/text": "x"}},
    {"path": "text.txt", "equals": "line one\nline two\n", "contains": ["one", "two"], "lacks": "three"},
    {"path": "text.txt", "equals": "line one\nline two", "trim": True, "matches": "^line [a-z]+$"},
    {"path": "text.txt", "sha256": hashlib.sha256(b"line one\nline two\n").hexdigest(), "kind": "file"},
    {"path": "tool", "mode": "0755"},
    {"path": "deep/er", "kind": "directory"},
    {"path": "inner", "kind": "link", "target": "deep/er/x"},
    {"path": "inner", "follow": True, "equals": "x", "kind": "file"},
    {"path": "/workspace/root/workspace/tool", "equals": "run"},
    {"path": "pipe", "kind": "fifo"},
    {"path": "notes.txt", "absent": True},
    {"path": "bytes", "sha256": hashlib.sha256(b"\xff\xff\xff").hexdigest()},
    {"path": "huge"},
]

FALSE: list[dict[str, Any]] = [
    {"path": "values.json", "json": {"/odd": 5.5}},
    {"path": "values.json", "json": {"/list/1/a~1b": 1}},
    {"path": "values.json", "json": {"/list/7": 1}},
    {"path": "values.json", "json": {"/text/0": "x"}},
    {"path": "values.json", "json": {"": {"odd": 5}}},
    {"path": "text.txt", "json": {"": 1}},
    {"path": "text.txt", "equals": "line one\nline two"},
    {"path": "text.txt", "contains": ["one", "three"]},
    {"path": "text.txt", "lacks": ["two"]},
    {"path": "text.txt", "matches": "^two"},
    {"path": "text.txt", "matches": "(([a-z]| )+)+#"},
    {"path": "text.txt", "sha256": "0" * 64},
    {"path": "text.txt", "absent": True},
    {"path": "tool", "mode": "0644"},
    {"path": "inner", "equals": "x"},
    {"path": "inner", "kind": "file"},
    {"path": "inner", "target": "elsewhere"},
    {"path": "outer", "absent": True},
    {"path": "loop", "follow": True},
    {"path": "pipe", "equals": ""},
    {"path": "huge", "contains": ["x"]},
    {"path": "bytes", "contains": ["x"]},
    {"path": "notes.txt"},
    {"path": "deep/er/x/y"},
    {"path": "deep", "equals": ""},
]


def test_what_is_true_and_what_is_not() -> None:
    found = looked([*TRUE, *FALSE])
    asked = FilesSpec.from_json([*TRUE, *FALSE]).checks
    true, false = asked[: len(TRUE)], asked[len(TRUE) :]
    assert found.passed == tuple(sorted(check.name for check in true))
    assert found.failed == tuple(sorted(check.name for check in false))
    assert (found.reward, found.parts["all"], found.trust) == (len(true) / len(asked), 0.0, "final")
    assert found.notes


def test_weights_and_what_was_true_before() -> None:
    checks = [{"path": "notes.txt", "equals": "kept\n"}, {"path": "new.txt", "equals": "x", "weight": 3}]
    whole, part = looked(checks, "printf x > new.txt"), looked(checks, "true")
    assert (whole.reward, whole.parts["all"], whole.notes) == (1.0, 1.0, ())
    assert (part.reward, part.passed, part.untouched) == (0.25, part.untouched, (part.passed[0],))


def test_a_million_entries_cost_nothing_that_is_not_asked_for() -> None:
    many = "mkdir many && cd many && seq 1 3000 | xargs -n 500 touch"
    assert looked([{"path": "many", "kind": "directory"}, {"path": "many/77"}], many).reward == 1.0


def test_a_state_that_did_not_live_to_be_looked_at_is_worth_0() -> None:
    async def look() -> Grade:
        start = await (await StartingStates.open()).get(TASK)
        return await FilesVerifier(FilesSpec.from_json([{"path": "made.txt"}])).grade(Case(TASK, start, Edits()))

    assert asyncio.run(look()).reward == 0.0


def judged(program: str, answer: str, edits: str = "x = 1\n") -> Grade:
    task = Task(
        task_id="e2e/judged",
        prompt="",
        files={"a.py": "x = 0\n"},
        editable=("*.py",),
        hidden_tests={"hidden/judge.py": program},
        solution={"a.py": "x = 1\n"},
        limits=TASK.limits,
    )

    async def judge() -> Grade:
        start = await (await StartingStates.open()).get(task)
        verifier = CommandVerifier(JudgeSpec(("python", "hidden/judge.py"), answer))
        return await verifier.grade(Case(task, start, Edits({"a.py": EditedFile(edits.encode())})))

    return asyncio.run(judge())


def test_a_program_judges() -> None:
    assert judged("import sys; sys.exit('x = 1' not in open('a.py').read())", "exit").reward == 1.0
    assert judged("import os; print(0.5 if len(os.environ['WORLDFORK_GRADE_KEY']) > 64 else 0)", "stdout").reward == 0.5
    assert judged("open('out', 'w').write('{\"reward\": 0.25}')", "file:out").reward == 0.25


IMPORTS = "import runpy; runpy.run_path('a.py'); open('out', 'w').write('1')"


@pytest.mark.parametrize(
    "edits",
    [
        "import os; os.mkfifo('out'); os._exit(0)",
        "import os; os.truncate(os.open('out', os.O_CREAT | os.O_RDWR), 10 << 30); os._exit(0)",
        "import os; os.symlink('/etc/passwd', 'out'); os._exit(0)",
        "import os; os.mkdir('out'); os._exit(0)",
        "import os; open('out', 'w').write('NaN'); os._exit(0)",
        "import os; open('out', 'w').write('1e300'); os._exit(0)",
        "import os; os.kill(os.getppid(), 9); os._exit(0)",
    ],
)
def test_an_answer_that_the_code_under_test_spoils_is_worth_0(edits: str) -> None:
    assert judged(IMPORTS, "file:out", edits).reward == 0.0
