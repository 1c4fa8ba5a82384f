"""Each rule of the house finds the fault that was planted for it, and nothing in a clean tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.architecture import rules


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small clean house."""
    package = tmp_path / "src" / "worldfork"
    plant(package / "__init__.py", '"""P."""\nfrom worldfork.lineage.fork import run\n')
    plant(package / "core" / "errors.py", '"""E."""\n')
    plant(package / "store" / "home.py", '"""H."""\nfrom worldfork.core import errors\n')
    plant(package / "sandbox" / "wire.py", '"""W."""\nimport worldfork.core.errors\n')
    plant(package / "lineage" / "fork.py", '"""F."""\nfrom worldfork.store.home import x\ndef run(): ...\n')
    plant(package / "cli" / "main.py", '"""M."""\nfrom worldfork import run\n')
    return package


def plant(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_clean_house_has_no_breach(package: Path) -> None:
    root = package.parents[1]
    found = [rules.floor_breaches(package), rules.size_breaches(root), rules.function_breaches(package)]
    assert [*found, rules.name_breaches(package), rules.docstring_breaches(package)] == [[], [], [], [], []]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("store/a.py", "import worldfork.sandbox.wire"),
        ("store/a.py", "from worldfork.lineage import fork"),
        ("store/a.py", "from worldfork import lineage"),
        ("store/a.py", "def f():\n    from worldfork.lineage import fork"),
        ("store/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from worldfork.sandbox import wire"),
        ("store/a.py", "from ..lineage import fork"),
        ("store/__init__.py", "from ..sandbox.wire import x"),
        ("store/a.py", "import importlib\nimportlib.import_module('worldfork.sandbox.wire')"),
        ("store/a.py", "from worldfork import run"),
        ("core/a.py", "import worldfork"),
        ("__init__.py", "from worldfork.cli.main import main"),
        ("attic/a.py", "x = 1"),
    ],
)
def test_an_import_that_does_not_go_down(package: Path, file: str, text: str) -> None:
    plant(package / file, text + "\n")
    assert len(rules.floor_breaches(package)) == 1


@pytest.mark.parametrize(
    ("file", "count"),
    [
        ("src/worldfork/core/a.py", 501),
        ("src/worldfork/core/__init__.py", 61),
        ("native/init.c", 501),
        ("tests/unit/test_a.py", 601),
    ],
)
def test_a_file_that_grew(package: Path, file: str, count: int) -> None:
    root = package.parents[1]
    plant(root / file, "\n" * (count - 1))
    assert rules.size_breaches(root) == []
    plant(root / file, "\n" * count)
    assert len(rules.size_breaches(root)) == 1


def test_a_function_that_grew(package: Path) -> None:
    text = "def f():\n    '''Text\n    of two lines.'''\n"
    plant(package / "core" / "a.py", text + "    x = 1\n" * 49)
    assert rules.function_breaches(package) == []
    plant(package / "core" / "a.py", text + "    x = 1\n" * 50)
    assert len(rules.function_breaches(package)) == 1


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/utils.py", ""),
        ("common/a.py", ""),
        ("core/a.py", "class SandboxManager: ..."),
        ("core/a.py", "def make_container(): ..."),
        ("core/a.py", "def f(runtime): ..."),
        ("core/a.py", "helper = 1"),
        ("core/a.py", "def f(self):\n    self._instance = 1"),
    ],
)
def test_a_forbidden_name(package: Path, file: str, text: str) -> None:
    plant(package / file, text + "\n")
    assert len(rules.name_breaches(package)) >= 1


def test_words_within_words_are_free(package: Path) -> None:
    plant(package / "core" / "a.py", "def f(x):\n    uncommon = isinstance(x, str)\n    return uncommon\n")
    assert rules.name_breaches(package) == []


def test_a_module_that_says_nothing(package: Path) -> None:
    plant(package / "core" / "a.py", "x = 1\n")
    assert rules.docstring_breaches(package) == ["core/a.py: the module"]


def test_a_block_that_does_not_compile(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    plant(page, "```python\nfrom worldfork import Sandbox\nawait x\n```\n\n    def indented(:\n")
    assert rules.block_breaches(page, frozenset({"Sandbox"})) == []
    assert rules.block_breaches(page, frozenset()) == ["README.md:2: no public name Sandbox"]
    plant(page, "```python\nx = 1\ndef f(:\n```\n")
    assert len(rules.block_breaches(page, frozenset())) == 1


def test_an_error_outside_the_table() -> None:
    class Root(Exception):
        code = "root"

    class Child(Root):
        code = "child"

    page = "| 1 | `root` | 500 |\n| 2 | `child` | 400 |\n"
    table = {"root": (500, 1), "child": (400, 2)}
    assert rules.error_breaches(Root, table, page) == []
    assert len(rules.error_breaches(Root, {"root": (500, 1)}, page)) == 1
    assert len(rules.error_breaches(Root, table | {"ghost": (500, 3)}, page)) == 2
    assert len(rules.error_breaches(Root, table, "| 1 | `root` | 500 |\n")) == 1
    assert len(rules.error_breaches(Root, table | {"child": (400, 1)}, page.replace("| 2 |", "| 1 |"))) == 1

    class Nameless(Child): ...

    assert rules.error_breaches(Root, table, page) == ["Nameless has no code of its own"]


def test_a_verb_that_no_page_describes() -> None:
    pages = {"cli.md": "`worldfork create` makes one"}
    assert rules.verb_breaches(["create"], pages) == []
    assert rules.verb_breaches(["create", "rm"], pages) == ["worldfork rm is in no page"]
    assert rules.verb_breaches(["crea"], pages) == ["worldfork crea is in no page"]
