"""docs/peers-items.md names tests that exist, for every item."""

from __future__ import annotations

import re
from pathlib import Path

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "peers-items.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \|.*\| (.+) \|$", re.MULTILINE)
FILE = re.compile(r"`((?:tests/[\w/]+/)?test_\w+\.py)`: ((?:`test_\w+`(?:, )?)+)")


def named() -> list[tuple[Path, str]]:
    found = []
    for file, tests in FILE.findall(PAGE):
        path = TOP / file if file.startswith("tests/") else TOP / "tests" / "faults" / file
        found += [(path, name) for name in re.findall(r"`(test_\w+)`", tests)]
    return found


def test_every_item_is_answered() -> None:
    rows = dict(ROW.findall(PAGE))
    assert list(rows) == [str(number) for number in range(30, 61)]
    assert all("test_" in answer or answer.startswith("does not apply: ") for answer in rows.values())


def test_every_test_that_is_named_exists() -> None:
    assert len(named()) > 80
    missing = [name for path, name in named() if f"def {name}(" not in path.read_text(encoding="utf-8")]
    assert missing == []


def test_every_test_that_names_an_item_is_on_the_page() -> None:
    listed = {name for _, name in named()}
    written = {
        name
        for path in (TOP / "tests" / "faults").glob("test_*.py")
        for name in re.findall(r"^def (test_item_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert written
    assert written <= listed, written - listed
