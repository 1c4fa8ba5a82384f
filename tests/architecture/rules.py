"""The rules of the house as functions: each takes a source tree and returns one line per breach."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "worldfork"
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"core"}),
    frozenset({"records"}),
    frozenset({"content"}),  # trees on disk, as the store reads and writes them, without its metadata
    frozenset({"store", "sandbox"}),
    frozenset({"keeping"}),  # works on a store from outside, and knows no sandbox
    frozenset({"exchange"}),
    frozenset({"lineage"}),
    frozenset({"worlds"}),  # a world is made once with what lineage offers
    frozenset({"reward"}),
    frozenset({"rollout"}),
    frozenset({"search", "evaluation", "testing"}),
    frozenset({""}),  # the package itself: the public names
    frozenset({"server", "integrations"}),
    frozenset({"cli"}),
)
"""Rooms from the ground up. A room imports only from floors below its own."""

MODULE_LINES = 500
INIT_LINES = 60
TEST_LINES = 600
FUNCTION_LINES = 50

FORBIDDEN = frozenset(
    {"environment", "runtime", "instance", "container", "manager", "helper", "helpers", "util", "utils", "common"}
)
"""Words that mean three things each in this field, or nothing."""


def floor_of(room: str) -> int | None:
    """Return the floor of a room, counted from the ground; None if it is on none."""
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def modules(package: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    """Yield the dotted name, path and syntax tree of every module below `package`."""
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, path, ast.parse(path.read_text(encoding="utf-8"), str(path))


def room_of(name: str, known: frozenset[str]) -> str:
    """Return the room of a dotted name: "" for the package itself and its public names."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in known else ""


def imports(name: str, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and dotted target of every import: lazy, for typing alone, relative, or by name at run time."""
    here = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def floor_breaches(package: Path) -> list[str]:
    """Find imports that do not go down, and rooms that are on no floor."""
    rooms = frozenset(
        path.name if path.is_dir() else path.stem
        for path in package.iterdir()
        if (path.is_dir() and any(path.rglob("*.py"))) or (path.suffix == ".py" and path.stem != "__init__")
    )
    lines = [f"{package.name}/{room} is on no floor" for room in sorted(rooms) if floor_of(room) is None]
    rooms = rooms.union(*FLOORS) - {""}
    for name, path, tree in modules(package):
        room = room_of(name, rooms)
        mine = floor_of(room)
        for line, target in imports(name, path, tree):
            if target.split(".")[0] != package.name:
                continue
            other = room_of(target, rooms)
            theirs = floor_of(other)
            if other == room or mine is None or theirs is None:
                continue
            if theirs >= mine:
                lines.append(f"{path.relative_to(package)}:{line}: {room or 'the package'} imports {target}")
    return lines


def size_breaches(root: Path) -> list[str]:
    """Find modules, C files and test files that grew past their limits."""
    lines = []
    for pattern, limit in (
        ("src/**/*.py", MODULE_LINES),
        ("native/*.[ch]", MODULE_LINES),
        ("tests/**/*.py", TEST_LINES),
    ):
        for path in sorted(root.glob(pattern)):
            allowed = INIT_LINES if path.name == "__init__.py" else limit
            count = len(path.read_text(encoding="utf-8").splitlines())
            if count > allowed:
                lines.append(f"{path.relative_to(root)}: {count} lines, at most {allowed}")
    return lines


def function_breaches(package: Path) -> list[str]:
    """Find functions that are too long; the text that documents one does not count."""
    lines = []
    for _, path, tree in modules(package):
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
                continue
            length = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                text = node.body[0]
                length -= (text.end_lineno or text.lineno) - text.lineno + 1
            if length > FUNCTION_LINES:
                lines.append(f"{path.relative_to(package)}:{node.lineno}: {node.name} has {length} lines")
    return lines


def _words(name: str) -> set[str]:
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return set(spaced.lower().split("_"))


def _defined(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def name_breaches(package: Path) -> list[str]:
    """Find forbidden words in the names that the house gives: files, classes, functions, arguments, variables."""
    lines = []
    for path in sorted([*package.rglob("*.py"), *(path for path in package.rglob("*") if path.is_dir())]):
        if path.name != "__pycache__" and _words(path.stem) & FORBIDDEN:
            lines.append(f"{path.relative_to(package)}: its name")
    for _, path, tree in modules(package):
        for line, name in _defined(tree):
            if _words(name) & FORBIDDEN:
                lines.append(f"{path.relative_to(package)}:{line}: {name}")
    return lines


def python_blocks(page: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each fenced Python block of a Markdown page."""
    block: list[str] | None = None
    start = 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if block is None and re.fullmatch(r"```(python|py)\s*", line):
            block, start = [], number + 1
        elif block is not None and line.startswith("```"):
            yield start, "\n".join(block) + "\n"
            block = None
        elif block is not None:
            block.append(line)


def block_breaches(page: Path, public: frozenset[str]) -> list[str]:
    """Find Python blocks that do not compile, or that import a public name that is not there."""
    lines = []
    for start, text in python_blocks(page):
        try:
            tree = compile(text, str(page), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            lines.append(f"{page.name}:{start + (error.lineno or 1) - 1}: {error.msg}")
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
                missing = [alias.name for alias in node.names if alias.name not in public]
                lines += [f"{page.name}:{start + node.lineno - 1}: no public name {name}" for name in missing]
    return lines


def error_breaches(root: type, table: dict[str, tuple[int, int]], page: str) -> list[str]:
    """Find error classes without a code of their own, a row in the table, or a row in the page of exit codes."""
    lines, seen = [], {}
    kinds = [root]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds:
        code = vars(kind).get("code")
        if code is None:
            lines.append(f"{kind.__name__} has no code of its own")
        elif code in seen:
            lines.append(f"{kind.__name__} and {seen[code]} share the code {code}")
        elif code not in table:
            lines.append(f"{kind.__name__}: {code} is not in the table")
        seen[code] = kind.__name__
    lines += [f"{code} is in the table and no error has it" for code in table if code not in seen]
    exits = [exit_code for _, exit_code in table.values()]
    lines += [f"two errors end with code {number}" for number in sorted(set(exits)) if exits.count(number) > 1]
    for code, (status, exit_code) in table.items():
        row = next((line for line in page.splitlines() if f"`{code}`" in line and line.startswith("|")), "")
        cells = [cell.strip() for cell in row.split("|")]
        if str(exit_code) not in cells or str(status) not in cells:
            lines.append(f"{code}: no row with {exit_code} and {status} in the page of exit codes")
    return lines


def verb_breaches(verbs: list[str], pages: dict[str, str]) -> list[str]:
    """Find verbs of the command line that no page describes."""
    text = "\n".join(pages.values())
    return [
        f"worldfork {verb} is in no page" for verb in verbs if not re.search(rf"worldfork {re.escape(verb)}\b", text)
    ]


def docstring_breaches(package: Path) -> list[str]:
    """Find modules without a docstring; the linter finds classes and functions."""
    lines = []
    for _, path, tree in modules(package):
        if ast.get_docstring(tree) is None:
            lines.append(f"{path.relative_to(package)}: the module")
    return lines
