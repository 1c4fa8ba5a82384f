"""The table of drivers, the capabilities and the tests that need them are of one mind; and this check can fail."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.architecture import behaviours
from tests.conformance.differences import TESTS_THAT_NEED

from worldfork.sandbox.driver import Capabilities

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "behaviour.md").read_text(encoding="utf-8")
CONFORMANCE = ROOT / "tests" / "conformance"
_ROW = re.compile(r"^\| `(\w+)` \|.*\| ([a-z0-9, -]+) \|$", re.MULTILINE)


def rows(page: str) -> dict[str, set[str]]:
    """Return, of the table of drivers: capability -> the numbers that it is about."""
    return {name: set(numbers.split(", ")) for name, numbers in _ROW.findall(page)}


def breaches(
    page: str, capabilities: set[str], needed: dict[str, tuple[str, ...]], shown: dict[str, set[str]]
) -> list[str]:
    """Find where the page, the capabilities and the tests (name -> numbers) disagree."""
    told = rows(page)
    promised = set(behaviours.promised(page))
    lines = [f"{name} is no capability" for name in sorted(told.keys() - capabilities)]
    lines += [f"{name} is in no row" for name in sorted(capabilities - told.keys())]
    lines += [f"{number} is not promised" for numbers in told.values() for number in sorted(numbers - promised)]
    for name, tests in needed.items():
        if name not in capabilities:
            lines.append(f"tests need {name}, which is no capability")
        for test in tests:
            if test not in shown:
                lines.append(f"there is no test {test}")
            elif not shown[test] & told.get(name, set()):
                lines.append(f"{test} needs {name}, whose row names none of {', '.join(sorted(shown[test]))}")
    return lines


def test_the_table_of_drivers_is_complete() -> None:
    fields = {field.name for field in dataclasses.fields(Capabilities)} - {"form"}
    shown = {test: set(numbers) for _, test, numbers in behaviours.shown(CONFORMANCE)}
    assert breaches(PAGE, fields, TESTS_THAT_NEED, shown) == []


def test_what_tests_ask_for_is_a_capability() -> None:
    fields = {field.name for field in dataclasses.fields(Capabilities)}
    asked = set()
    for path in CONFORMANCE.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("needs", "able"):
                asked |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    assert asked - fields == set()
    assert len(asked) > 2


@pytest.mark.timeout(120)
def test_the_selection_shows_each_number_once_at_least() -> None:
    line = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*line, "--driver", "microvm", "--each-once", str(CONFORMANCE)], capture_output=True, text=True, check=True
    )
    chosen = set(re.findall(r"::(test_\w+)", done.stdout))
    shown = {test: numbers for _, test, numbers in behaviours.shown(CONFORMANCE)}
    assert {number for test in chosen for number in shown[test]} == set(behaviours.promised(PAGE))
    assert len(chosen) < len(shown)


PLAIN = "- **a-1** X.\n- **a-2** Y.\n| `big` | it is | it is not | yes | no | a-1 |\n"


@pytest.mark.parametrize(
    ("page", "needed", "words"),
    [
        (PLAIN.replace("big", "small"), {}, ["small is no capability", "big is in no row"]),
        (PLAIN.replace("a-1 |", "a-3 |"), {}, ["a-3 is not promised"]),
        (PLAIN, {"odd": ("test_a",)}, ["tests need odd, which is no capability"]),
        (PLAIN, {"big": ("test_gone",)}, ["there is no test test_gone"]),
        (PLAIN, {"big": ("test_b",)}, ["test_b needs big, whose row names none of a-2"]),
        (PLAIN, {"big": ("test_a",)}, []),
    ],
)
def test_a_table_that_is_wrong_is_found(page: str, needed: dict[str, tuple[str, ...]], words: list[str]) -> None:
    found = breaches(page, {"big"}, needed, {"test_a": {"a-1"}, "test_b": {"a-2"}})
    assert [line for line in found if line in words] == words
    assert bool(found) == bool(words)
