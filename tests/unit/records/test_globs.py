from __future__ import annotations

import pytest

from worldfork.records.globs import is_editable, is_literal, taking_in


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("a.py", "a.py"),
        ("*.py", "a.py"),
        ("src/**/*.py", "src/a.py"),
        ("src/**/*.py", "src/b/c/d.py"),
        ("src/**", "src/a"),
        ("src/**", "src/a/b"),
        ("**/src/**", "src/a"),
        ("**/test", "test"),
        ("**/test", "a/b/test"),
        ("**", "a/b"),
        ("a/**/**/b", "a/b"),
        ("a?[bc]", "axb"),
        ("[x]", "[x]"),
    ],
)
def test_what_is_meant(pattern: str, path: str) -> None:
    assert is_editable(path, ["other", pattern])


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*.py", "a/b.py"),
        ("*", "a/b"),
        ("a?b", "a/b"),
        ("a[!x]b", "a/b"),
        ("src/**", "src"),
        ("src/**/*.py", "src/a.pyc"),
        ("src/**/*.py", "srca.py"),
        ("a.py", "A.py"),
        ("**/test", "test/a"),
    ],
)
def test_what_is_not_meant(pattern: str, path: str) -> None:
    assert not is_editable(path, [pattern])


def test_many_wide_patterns_cost_no_more_than_one() -> None:
    assert not is_editable("/".join("a" * 60), ["/".join(["**", "a"] * 30) + "/b"])


def test_literal() -> None:
    assert is_literal("a/b.py")
    assert not is_literal("a/*.py")


@pytest.mark.parametrize(
    ("path", "means"),
    [
        ("a.py", True),
        ("lib/a.py", True),
        ("tests/a.py", False),
        ("lib/tests/deep/a.py", False),
        ("lib/tests/kept.py", True),
        ("tests", False),
    ],
)
def test_the_last_pattern_that_means_a_path_decides(path: str, means: bool) -> None:
    patterns = ["**/*.py", "!**/tests/**", "lib/tests/kept.py"]
    assert is_editable(path, patterns) is means
    assert not is_editable(path, [*patterns, f"!{path}"])


def test_what_takes_out_means_no_path() -> None:
    assert not is_literal("!a")
    assert taking_in(["a", "!b", "c/*"]) == ("a", "c/*")
    assert not is_editable("!a", ["!a"])
