from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldfork.records.globs import Reach, is_editable, is_literal, taking_in


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


_NAMES = st.sampled_from(["a", "b", "a.py", "b.py", "t", "[a]", "x*"])
_PATTERNS = st.lists(
    st.builds(
        lambda out, names: out + "/".join(names),
        st.sampled_from(["", "", "!"]),
        st.lists(_NAMES | st.sampled_from(["**", "*", "*.py", "?"]), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=4,
)


@given(_PATTERNS, st.lists(_NAMES, min_size=1, max_size=5))
def test_on_the_way_down_a_path_means_what_it_means_whole(patterns: list[str], names: list[str]) -> None:
    path = "/".join(names)
    reach, leads = Reach.of(patterns), True
    for depth, name in enumerate(names[:-1]):
        leads = leads and reach.leads_on("/".join(names[:depth]))
        reach = reach.below(name)
    leads = leads and reach.leads_on("/".join(names[:-1]))
    meant = is_editable(path, patterns)
    assert reach.means(names[-1], path) == meant
    assert leads or not meant


def test_what_no_pattern_leads_to_is_not_entered() -> None:
    reach = Reach.of(["*.py", "src/**/*.py", "!src/tests/**"])
    assert reach.leads_on("")
    assert not reach.below("docs").leads_on("docs")
    assert reach.below("src").below("deep").leads_on("src/deep")
    assert not reach.below("src").below("tests").leads_on("src/tests")
    again = Reach.of(["**", "!src/**", "src/tests/*.py"]).below("src")
    assert again.leads_on("src")
    assert again.below("tests").leads_on("src/tests")
    assert not again.below("deep").leads_on("src/deep")
