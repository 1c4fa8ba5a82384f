from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from worldfork.rollout.mutation import choosing
from worldfork.rollout.mutation.choosing import FAMILIES, Mutations, mutate
from worldfork.rollout.mutation.module import Module
from worldfork.rollout.policies.mutating import propose

SEARCH = '''
def find(items, wanted):
    """Say where `wanted` is in sorted items; -1 if nowhere."""
    low = 0
    high = len(items)  # one past the end
    while low < high:
        middle = (low + high) // 2
        if items[middle] < wanted:
            low = middle
        else:
            high = middle
    return low if low < len(items) and items[low] == wanted else -1
'''

DEFECTS = {
    "comparison": ("def f(a, b):\n    return a <= b\n", "a < b"),
    "off_by_one": ("def f(items):\n    return items[len(items)]\n", "items[len(items) - 1]"),
    "name": ("def f(a, b):\n    c = a\n    return a + a\n", "return a + b"),
    "operator": ("def f(n):\n    n ^= n - 1\n    return n\n", "n &= n - 1"),
    "swap": ("def f(a, b):\n    return f(a % b, b)\n", "f(b, a % b)"),
    "condition": ("def f(a):\n    if not a:\n        return 1\n", "if a:"),
    "wider": ("def f(a, b):\n    while a.next is None:\n        return a\n", "a is None or a.next is None"),
    "constant": ("def f(a):\n    return []\n", "[[]]"),
    "operand": ("def f(a, b):\n    return 1 + g(a)\n", "return g(a)"),
    "return": ("def f(a):\n    if a:\n        return a\n    return True\n", "return not a"),
    "callee": ("def f(a):\n    return any(a)\n", "all(a)"),
    "insertion": ("def f(a):\n    b = None\n    while a:\n        a = a.next\n    return b\n", "        b = a\n"),
    "slice": ("def f(a, k):\n    for x in a:\n        print(x, a[k])\n", "for x in a[k:]"),
    "move": (
        "def f(a):\n    for x in a:\n        a = x\n        print(a)\n    return a\n",
        "        print(a)\n        a = x\n",
    ),
    "attribute": ("def f(a, b):\n    return a.left + b.right\n", "a.right + b.right"),
    "wrapping": ("def f(a, b):\n    return a - b > 3\n", "abs(a - b)"),
    "removal": ("def f(a):\n    a = a.next\n    return a\n", "def f(a):\n    return a\n"),
    "target": ("def f(a, b):\n    b = a\n    return b\n", "    a = a\n"),
    "ingredient": ("def f(a, b):\n    c = g(a[b])\n    return g(b) + c\n", "return g(a[b]) + c"),
    "arguments": ("def f(a):\n    return g(a, 1)\n", "return g(a)"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_makes_its_repair(family: str) -> None:
    source, repaired = DEFECTS[family]
    found = [change.apply(source) for change in Mutations(source, 0).changes if change.family == family]
    assert any(repaired in each for each in found), found


def test_the_rest_of_the_text_stays() -> None:
    for index in range(60):
        changed = mutate(SEARCH, 1, index).splitlines()
        same = [line for line in SEARCH.splitlines() if line in changed]
        assert len(same) >= len(SEARCH.splitlines()) - 4
        assert '    """Say where `wanted` is in sorted items; -1 if nowhere."""' in changed


def test_no_program_comes_twice_and_all_compile() -> None:
    programs = [mutate(SEARCH, 3, index) for index in range(300)]
    shapes = {ast.dump(ast.parse(program)) for program in programs}
    assert len(shapes) == 300
    assert ast.dump(ast.parse(SEARCH)) not in shapes


def test_a_defect_is_found_within_two_groups_of_64() -> None:
    def works(program: str) -> bool:
        # Not run here: a wrong search may never end.
        return "low = middle + 1\n" in program and ast.dump(ast.parse(program)) == right

    right = ast.dump(ast.parse(SEARCH.replace("low = middle\n", "low = middle + 1\n")))
    for seed in range(5):
        assert any(works(mutate(SEARCH, seed, index)) for index in range(128)), seed


def test_a_seed_decides_in_every_process_and_in_any_order() -> None:
    here = [mutate(SEARCH, 5, index) for index in (9, 0, 31)]
    code = (
        "import json,sys; from worldfork.rollout.mutation.choosing import mutate;"
        "print(json.dumps([mutate(sys.argv[1], 5, index) for index in (9, 0, 31)]))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code, SEARCH],
        capture_output=True,
        check=True,
        timeout=50,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
    )
    assert json.loads(there.stdout) == here
    assert [mutate(SEARCH, 6, index) for index in (9, 0, 31)] != here


@pytest.mark.parametrize("source", ["", "x = 1\n", "def f(:\n", "\0", "def f():\n    pass\n", "(" * 5000])
def test_what_cannot_be_changed_stays(source: str) -> None:
    assert mutate(source, 0, 0) == source


def test_when_there_are_no_more_changes_the_source_comes() -> None:
    source = "def f(a, b):\n    return a < b\n"
    programs = [mutate(source, 0, index) for index in range(2000)]
    ended = programs.index(source)
    assert ended > 5
    assert set(programs[ended:]) == {source}
    assert len(set(programs[:ended])) == ended


def test_text_that_is_not_ascii_keeps_its_places() -> None:
    source = 'def f(wörter, länge):\n    ä = "→→"; b = wörter[länge - 1]\n    return ä, b\n'
    module = Module(source)
    subscript = next(node for node in ast.walk(module.tree) if isinstance(node, ast.Subscript))
    assert module.segment(subscript) == "wörter[länge - 1]"
    assert any("wörter[länge]" in mutate(source, 0, index) for index in range(60))


def test_line_ends_of_two_characters_and_form_feeds_do_not_shift_places() -> None:
    source = "def f(a, b):\r\n\x0c    c = a\r\n    return c <= b\r\n"
    assert any("return c < b\r\n" in mutate(source, 0, index) for index in range(60))


def test_precedence_is_kept_where_an_operator_changes() -> None:
    source = "def f(a, b, c):\n    return a * b * c\n"
    found = {change.apply(source) for change in Mutations(source, 0).changes if change.family == "operator"}
    assert "def f(a, b, c):\n    return (a + b) * c\n" in found


def test_methods_are_changed_too_and_annotations_are_not() -> None:
    source = textwrap.dedent("""
        class Box:
            def put(self, item: int, count: int = 1) -> int:
                return item + count
    """)
    for index in range(30):
        assert "item: int, count: int" in mutate(source, 2, index)
    assert mutate(source, 2, 0) != source


def test_of_a_large_module_the_seed_decides_which_functions_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "MAX_CHANGES", 50)
    source = "\n".join(f"def f{number}(a, b):\n    return a[b - {number}] < b\n" for number in range(2, 40))
    touched = set()
    for seed in range(8):
        changes = Mutations(source, seed).changes
        assert 50 < len(changes) < 150
        touched |= {source.count("def ", 0, change.start) for change in changes}
    assert len(touched) > 10


def test_several_files_take_turns_and_none_comes_twice() -> None:
    sources = {"a.py": "def f(a, b):\n    return a < b\n", "b.py": SEARCH, "empty.py": ""}
    found = [propose(sources, 4, index) for index in range(200)]
    assert None not in found
    assert len(set(found)) == 200
    assert {each[0] for each in found[:2] if each} == {"a.py", "b.py"}
    assert propose({"empty.py": ""}, 0, 0) is None
    assert propose({}, 0, 0) is None


def test_an_argument_in_the_parentheses_of_its_call_stays_in_them() -> None:
    source = "def f(a, y):\n    z = max(y, a)\n    return sum(x for x in y) + z\n"
    called = {
        node.id
        for change in Mutations(source, 0).changes
        for node in ast.walk(ast.parse(change.apply(source)))
        if isinstance(node, ast.Name)
    }
    assert called <= {"f", "a", "y", "z", "max", "min", "sum", "x", "any", "all"}


@pytest.mark.timeout(60)
def test_a_function_of_very_many_names_is_done_with_soon() -> None:
    lines = "".join(f"    b{place} = a{place % 250} + {place}\n" for place in range(1500))
    source = f"def f({','.join(f'a{place}' for place in range(250))}):\n{lines}    return b1\n"
    assert len(Mutations(source, 0).changes) > 1000
    long = f"def f(a):\n    return {' + '.join('a' * 900)}\n"
    assert len(Mutations(long, 0).changes) > 100


def test_lines_that_end_in_a_way_that_only_the_parser_knows() -> None:
    source = "X = 1\r\rdef g(b):\r    return b + 1\r"
    assert mutate(source, 0) == source
    assert mutate("X = 1\r\ndef g(b):\r\n    return b + 1\r\n", 0).endswith("\r\n")


def test_warnings_decide_nothing_and_reach_nobody(recwarn: pytest.WarningsRecorder) -> None:
    source = "def f(a):\n    return a is 1\n"
    programs = [mutate(source, 5, index) for index in range(20)]
    assert not recwarn.list
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Mutations(source, 5)
        assert [again.program(index) for index in range(20)] == programs
