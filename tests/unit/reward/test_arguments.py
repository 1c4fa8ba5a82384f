"""What is known of tests' limits before they run, and where they look for modules."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from worldfork.records.task import Task
from worldfork.reward.arguments import shortest_limit
from worldfork.reward.commanded import import_path


class Files:
    """A sandbox with one file."""

    def __init__(self, content: bytes = b"") -> None:
        self.content = content

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        assert path == "/workspace/setup.cfg"
        return self.content


MARKS = b"@pytest.mark.timeout(60)\ndef test_a(): pass\npytestmark = [pytest.mark.timeout(timeout=2.5)]\n"


@pytest.mark.parametrize(
    ("tests", "content", "limit_s"),
    [
        ({"test_a.py": b"def test_a(timeout=1): pass\n"}, b"", None),
        ({"test_a.py": MARKS, "data.txt": b"mark.timeout(1)"}, b"", 2.5),
        ({}, b"[tool:pytest]\ntimeout = 5\n", 5.0),
        ({"test_a.py": MARKS}, b"[tool:pytest]\naddopts = -q --timeout=2 --timeout-method=thread\n", 2.0),
        ({}, b"[tool:pytest]\naddopts = --timeout 3\nsession_timeout = 1\n", 3.0),
        ({"setup.cfg": b"timeout = 7"}, b"timeout = 1", 7.0),
        ({"test_a.py": b"@pytest.mark.timeout(0)\n"}, b"", None),
    ],
)
def test_the_shortest_limit_is_read_from_what_no_policy_writes(
    tests: dict[str, bytes], content: bytes, limit_s: float | None
) -> None:
    sandbox: Any = Files(content)
    configuration = "setup.cfg" if content or "setup.cfg" in tests else None
    assert asyncio.run(shortest_limit(sandbox, tests, configuration)) == limit_s


@pytest.mark.parametrize(
    ("command", "env", "path"),
    [
        ((), {}, ""),
        (("pytest", "tests"), {"PYTHONPATH": "src:"}, "src"),
        (("python", "-m", "pytest", "tests"), {}, ":"),
        (("python3", "-m", "pytest"), {"PYTHONPATH": "src:lib"}, ":src:lib"),
    ],
)
def test_python_m_pytest_has_its_working_directory_on_the_path(
    command: tuple[str, ...], env: dict[str, str], path: str
) -> None:
    assert (
        import_path(Task(task_id="t", prompt="", hidden_tests={"test_a.py": ""}, test_command=command, env=env)) == path
    )
