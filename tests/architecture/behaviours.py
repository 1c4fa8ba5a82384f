"""The numbers of docs/behaviour.md against the marks of the conformance tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

MARK = "behaviour"
_NUMBER = re.compile(r"^- \*\*([a-z]+)-(\d+)\*\* \S", re.MULTILINE)
_WRITTEN = re.compile(r"\*\*([a-z]+-\d+)\*\*")


def promised(page: str) -> list[str]:
    """Return the numbers of a page in its order."""
    return [f"{group}-{number}" for group, number in _NUMBER.findall(page)]


def page_breaches(page: str) -> list[str]:
    """Find numbers that come twice, leave a gap, stand in another group, or begin no statement."""
    lines, last = [], {"": 0}
    names = promised(page)
    for name in names:
        group, _, number = name.partition("-")
        if int(number) != last.get(group, 0) + 1:
            lines.append(f"{name} follows {group}-{last.get(group, 0)}")
        last[group] = int(number)
    groups = [name.partition("-")[0] for name in names]
    lines += [f"{group} is in two places" for group in sorted(set(groups)) if _runs(groups, group) > 1]
    lines += [f"{name} begins no statement" for name in _WRITTEN.findall(page) if name not in names]
    return lines


def _runs(groups: list[str], wanted: str) -> int:
    return sum(1 for at, group in enumerate(groups) if group == wanted and (at == 0 or groups[at - 1] != wanted))


def shown(directory: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield file, name and numbers of every test below a directory."""
    for path in sorted(directory.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path.name, node.name, [number for mark in node.decorator_list for number in _numbers(mark)]


def _numbers(mark: ast.expr) -> Iterator[str]:
    if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute) and mark.func.attr == MARK:
        for argument in mark.args:
            yield argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else "?"


def behaviour_breaches(page: str, directory: Path) -> list[str]:
    """Find promises that no test shows, tests that show none, and numbers that nobody promised."""
    names = set(promised(page))
    lines, seen = [], set()
    for file, test, numbers in shown(directory):
        if not numbers:
            lines.append(f"{file}: {test} names no behaviour")
        lines += [f"{file}: {test} names {number}, which is not promised" for number in numbers if number not in names]
        seen |= set(numbers)
    return lines + [f"no test shows {name}" for name in sorted(names - seen)]
