"""docs/store-faults.md answers every row, with tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "store-faults.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \|.*\| (.+) \|$", re.MULTILINE)
FILE = re.compile(r"`((?:tests/[\w/]+/)?test_\w+\.py)`: ((?:`test_\w+`(?:, )?)+)")


def named() -> list[tuple[Path, str]]:
    found = []
    for file, tests in FILE.findall(PAGE):
        path = TOP / file if file.startswith("tests/") else TOP / "tests" / "faults" / file
        found += [(path, name) for name in re.findall(r"`(test_\w+)`", tests)]
    return found


def test_every_row_is_answered() -> None:
    rows = dict(ROW.findall(PAGE))
    assert list(rows) == [str(number) for number in range(1, 45)]
    assert all("test_" in answer or answer.startswith("does not apply: ") for answer in rows.values())


def test_every_test_that_is_named_exists() -> None:
    assert len(named()) > 80
    missing = [name for path, name in named() if f"def {name}(" not in path.read_text(encoding="utf-8")]
    assert missing == []


def test_nothing_on_the_page_is_named_in_passing() -> None:
    assert set(re.findall(r"`(test_\w+)`", PAGE)) == {name for _, name in named()}
