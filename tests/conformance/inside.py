"""Small programs that tests run inside a sandbox, and how they run them."""

from __future__ import annotations

import json
from typing import Any

from worldfork import Sandbox


def python(box: Sandbox, program: str, *arguments: str, **options: Any) -> str:
    """Run a Python program inside that must succeed; return what it printed."""
    result = box.run("python", ["-c", program, *arguments], **options)
    assert result.exit_code == 0, f"{result.reason}: {result.stderr}"
    return result.stdout


def told(box: Sandbox, program: str, *arguments: str, **options: Any) -> Any:
    """The same for a program that prints JSON; return what it says."""
    return json.loads(python(box, program, *arguments, **options))


def shell(box: Sandbox, line: str, **options: Any) -> str:
    """Run a line of sh that must succeed; return what it printed, less the last line end."""
    result = box.run("sh", ["-c", line], **options)
    assert result.exit_code == 0, f"{result.reason}: {result.stderr}"
    return result.stdout.rstrip("\n")


def wait_for(box: Sandbox, path: str) -> None:
    """Return when a path exists inside."""
    shell(box, f"until [ -e {path} ]; do sleep 0.005; done", timeout=20)


def processes(box: Sandbox) -> int:
    """How many processes there are inside, its init and what belongs to it not counted."""
    count = box.info().processes
    assert count is not None
    return count


SLEEPER = ("sleep", ["1000"])
"""A process that makes a sandbox busy: its checkpoints copy."""
