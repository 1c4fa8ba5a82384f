"""Every promise has a test and every conformance test a promise; and this check can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.architecture import behaviours

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "behaviour.md").read_text(encoding="utf-8")


def test_the_page_is_numbered() -> None:
    assert behaviours.page_breaches(PAGE) == []
    assert len(behaviours.promised(PAGE)) > 100


def test_promises_and_tests_are_the_same() -> None:
    assert behaviours.behaviour_breaches(PAGE, ROOT / "tests" / "conformance") == []


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("- **a-1** X.\n- **a-1** Y.\n", "a-1 follows a-1"),
        ("- **a-1** X.\n- **a-3** Y.\n", "a-3 follows a-1"),
        ("- **a-2** X.\n", "a-2 follows a-0"),
        ("- **a-1** X.\n- **b-1** Y.\n- **a-2** Z.\n", "a is in two places"),
        ("- **a-1** X.\n* **a-2** Y.\n", "a-2 begins no statement"),
    ],
)
def test_a_page_that_is_wrong_is_found(page: str, words: str) -> None:
    assert words in behaviours.page_breaches(page)
    assert behaviours.page_breaches("- **a-1** X.\n- **a-2** Y.\n- **b-1** Z.\n") == []


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("def test_x(): pass\n", "test_p.py: test_x names no behaviour"),
        ("@m.behaviour('a-1', 'a-9')\ndef test_x(): pass\n", "test_p.py: test_x names a-9, which is not promised"),
        ("@m.behaviour('b-1')\nasync def test_x(): pass\n", "no test shows a-1"),
        ("class T:\n    def test_x(self): pass\n", "test_p.py: test_x names no behaviour"),
        ("N = 'a-1'\n@m.behaviour(N)\ndef test_x(): pass\n", "test_p.py: test_x names ?, which is not promised"),
        ("@m.behaviour()\ndef test_x(): pass\n", "test_p.py: test_x names no behaviour"),
    ],
)
def test_tests_that_are_wrong_are_found(tmp_path: Path, test: str, words: str) -> None:
    page = "- **a-1** X.\n- **b-1** Y.\n"
    (tmp_path / "test_p.py").write_text(test)
    assert words in behaviours.behaviour_breaches(page, tmp_path)
    (tmp_path / "test_p.py").write_text("@m.behaviour('a-1', 'b-1')\ndef test_x(): pass\ndef other(): pass\n")
    assert behaviours.behaviour_breaches(page, tmp_path) == []
