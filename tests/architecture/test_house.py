"""The house as it stands keeps its rules. `test_rules.py` shows that each of them can fail."""

from __future__ import annotations

from pathlib import Path

import typer
from tests.architecture import rules

from worldfork.core.errors import ERROR_TABLE, WorldforkError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "worldfork"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]}


def test_imports_go_down() -> None:
    assert rules.floor_breaches(PACKAGE) == []


def test_files_are_small() -> None:
    assert rules.size_breaches(ROOT) == []


def test_functions_are_short() -> None:
    assert rules.function_breaches(PACKAGE) == []


def test_names_say_one_thing() -> None:
    assert rules.name_breaches(PACKAGE) == []


def test_modules_say_what_they_are() -> None:
    assert rules.docstring_breaches(PACKAGE) == []


def test_every_error_has_its_codes() -> None:
    assert rules.error_breaches(WorldforkError, ERROR_TABLE, PAGES["exit-codes.md"]) == []


def test_every_verb_is_described() -> None:
    from worldfork.cli.main import app

    # A group's command has its own commands; typer's classes follow click's.
    root = typer.main.get_command(app)
    verbs = []
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        verbs += [name, *(f"{name} {below}" for below in getattr(command, "commands", {}))]
    assert len(verbs) >= 12
    assert rules.verb_breaches(verbs, PAGES) == []


def test_blocks_of_python_compile() -> None:
    import worldfork

    public = frozenset(worldfork.__all__)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    assert [line for page in pages for line in rules.block_breaches(page, public)] == []
    assert list(rules.python_blocks(ROOT / "README.md"))
